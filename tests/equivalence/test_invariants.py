"""What must hold in every micro step: purity, one verdict, no retrace, no poison.

Expected values are worked out in NumPy for SGD with momentum 0.5 and a learning rate of
0.5: gradients are multiples of 1/4, so that most results are exact.
"""

import collections
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import accumulators
from tests import registry, training
from tests.equivalence import given_gradients
from tests.equivalence.given_gradients import GivenGradients, random_gradients

STEPS = 4


class _Momentum:
    """SGD with momentum in NumPy."""

    def __init__(self, learning_rate=0.5):
        self.values = [v.astype("float64") for v in given_gradients.INITIAL_VALUES]
        self.momentums = [np.zeros_like(v) for v in self.values]
        self.learning_rate = learning_rate

    def update(self, window):
        """One update, of the mean over the window of the sum over the replicas."""
        for index, gradients in enumerate(zip(*window, strict=True)):
            mean = np.sum(gradients, axis=(0, 1), dtype="float64") / len(window)
            momentum = 0.5 * self.momentums[index] - self.learning_rate * mean
            self.momentums[index] = momentum
            self.values[index] = self.values[index] + momentum


def _same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


class PurityTest(parameterized.TestCase):
    @parameterized.parameters(
        ("default", "graph", "wrapper"),
        ("default", "eager", "mixin"),
        ("mirrored", "graph", "mixin"),
        ("mirrored", "eager", "wrapper"),
    )
    def test_nothing_but_the_window_moves_off_the_boundary(
        self, strategy, mode, surface
    ):
        def make():
            return given_gradients.SURFACES[surface](
                STEPS, use_ema=True, weight_decay=0.1
            )

        run = GivenGradients(strategy, mode, make)
        for window in range(3):
            before = run.moved_by_updates()
            for step in range(STEPS - 1):
                run.step(random_gradients(run.num_replicas, 10 * window + step))
                self.assertEqual(run.moved_by_updates(), before)
                self.assertEqual(int(run.optimizer.position), step + 1)
            run.step(random_gradients(run.num_replicas, 10 * window + STEPS))
            after = run.moved_by_updates()
            moved = [one != other for one, other in zip(before, after, strict=True)]
            # All but the learning rate, which stands second among the inner ones.
            still = len(run.variables) + 1
            self.assertEqual(moved, [index != still for index in range(len(moved))])


class PoisonTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_one_bad_value_skips_its_window_everywhere(self, strategy, surface):
        def make():
            return given_gradients.SURFACES[surface](STEPS, use_ema=True)

        run = GivenGradients(strategy, "graph", make)
        expected, skipped = _Momentum(), 0
        for replica in range(run.num_replicas):
            for position in range(STEPS):
                for bad in (np.nan, np.inf, -np.inf):
                    seed = 100 * skipped
                    before = run.moved_by_updates()
                    for step in range(STEPS):
                        gradients = random_gradients(run.num_replicas, seed + step)
                        if step == position:
                            gradients[skipped % 2][replica].flat[0] = bad
                        run.step(gradients)
                        self.assertFalse(bool(run.optimizer.has_updated))
                    skipped += 1
                    self.assertEqual(run.moved_by_updates(), before)
                    self.assertEqual(int(run.optimizer.skipped_windows), skipped)
                    self.assertEqual(int(run.optimizer.position), 0)
                    self._next_window_is_right(run, expected, seed + STEPS)
        self.assertEqual(int(training.numbers(run.optimizer.iterations)), skipped)

    def _next_window_is_right(self, run, expected, seed):
        window = [random_gradients(run.num_replicas, seed + k) for k in range(STEPS)]
        for gradients in window:
            run.step(gradients)
        expected.update(window)
        self.assertTrue(bool(run.optimizer.has_updated))
        _same(run.values(), expected.values)
        self._are_equal_on_all_replicas(run)

    def _are_equal_on_all_replicas(self, run):
        for copies in run.copies([*run.variables, *run.optimizer.variables]):
            self.assertLen(copies, run.num_replicas)
            self.assertLen(set(copies), 1)

    @parameterized.parameters("graph", "eager")
    def test_infinities_that_arise_in_the_reduction_skip(self, mode):
        run = GivenGradients("mirrored", mode, lambda: given_gradients.wrapped(2))
        largest = np.finfo("float32").max
        for window, bad in enumerate(([np.inf, -np.inf], [largest, largest])):
            bad = (bad * run.num_replicas)[: run.num_replicas]
            if run.num_replicas == 1:
                bad = [np.inf]
            before = run.moved_by_updates()
            for step in range(2):
                gradients = random_gradients(run.num_replicas, step)
                gradients[1][:, 0, 0] = bad
                run.step(gradients)
            self.assertEqual(run.moved_by_updates(), before)
            self.assertEqual(int(run.optimizer.skipped_windows), window + 1)
            self._are_equal_on_all_replicas(run)

    @parameterized.product(mode=["graph", "eager"], strategy=["default", "mirrored"])
    def test_an_infinity_in_window_one_leaves_window_two_finite(self, mode, strategy):
        # Vector 39.
        run = GivenGradients(strategy, mode, lambda: given_gradients.wrapped(2))
        gradients = random_gradients(run.num_replicas, 0)
        gradients[0][-1] = np.inf
        run.step(gradients)
        run.step(random_gradients(run.num_replicas, 1))
        window = [random_gradients(run.num_replicas, seed) for seed in (2, 3)]
        for gradients in window:
            run.step(gradients)
        expected = _Momentum()
        expected.update(window)
        _same(run.values(), expected.values)


class TraceTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_new_lengths_and_learning_rates_need_no_new_trace(self, strategy):
        run = GivenGradients(strategy, "graph", lambda: given_gradients.wrapped(3))
        expected, seed = _Momentum(), 0
        for steps, learning_rate in ((3, 0.5), (2, 0.25), (5, 1.0), (1, 0.125)):
            run.optimizer.accumulation_steps = steps
            run.optimizer.learning_rate = learning_rate
            expected.learning_rate = learning_rate
            window = []
            for _ in range(steps):
                window.append(random_gradients(run.num_replicas, seed))
                run.step(window[-1])
                seed += 1
            expected.update(window)
            _same(run.values(), expected.values)
        self.assertEqual(run.num_traces, 1)

    @parameterized.parameters("default", "mirrored")
    def test_new_loss_scales_need_no_new_trace(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        num_replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            variable = keras.Variable(0.0)
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(1.0), 2, loss_scale="dynamic"
            )
            optimizer.build([variable])
        traces = []

        @tf.function(autograph=False)
        def micro_step(slope):
            traces.append(slope)

            def on_replica():
                with tf.GradientTape() as tape:
                    loss = optimizer.scale_loss(slope * variable / num_replicas)
                optimizer.apply([tape.gradient(loss, variable.value)], [variable])

            strategy.run(on_replica)

        total = 0.0
        for slopes in (
            (1.0, 3.0),
            (1.0, np.inf),
            (2.0, 4.0),
            (np.nan, 1.0),
            (5.0, 6.0),
        ):
            scale = float(optimizer.loss_scale)
            for slope in slopes:
                micro_step(tf.constant(slope))
            is_finite = bool(np.isfinite(slopes).all())
            total -= np.mean(slopes) if is_finite else 0
            self.assertEqual(float(training.numbers(variable)), total)
            self.assertEqual(
                float(optimizer.loss_scale), scale if is_finite else scale / 2
            )
        self.assertLen(traces, 1)


class AccumulatorsTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        surface=["wrapper", "mixin"],
        steps=[1, 3],
        is_shared=[False, True],
    )
    def test_one_accumulator_per_variable_and_replica_or_none(
        self, strategy, surface, steps, is_shared
    ):
        created = collections.Counter()

        def count(next_creator, **arguments):
            variable = next_creator(**arguments)
            created[tuple(variable.shape)] += 1
            return variable

        small = accumulators.SMALL if is_shared else 0
        with (
            tf.variable_creator_scope(count),
            mock.patch.object(accumulators, "SMALL", small),
        ):
            run = GivenGradients(
                strategy,
                "graph",
                lambda: given_gradients.SURFACES[surface](steps),
            )
        run.step(random_gradients(run.num_replicas, 0))
        window = run.optimizer.variables[len(run.inner_variables()) :]
        found = [v for v in window if v.name.startswith("accumulator")]
        shapes = [tuple(value.shape) for value in given_gradients.INITIAL_VALUES]
        if is_shared:  # one for both, as long as both
            shapes = [(sum(int(np.prod(shape)) for shape in shapes),)]
        expected = [] if steps == 1 else shapes
        self.assertEqual([tuple(v.shape) for v in found], expected)
        for accumulator in found:
            copies = run.local(accumulator)
            self.assertLen({id(copy) for copy in copies}, run.num_replicas)
        # The variable and its momentum, and an accumulator, once for each replica.
        own = 0 if is_shared or steps == 1 else 1
        self.assertEqual(created[(3, 2)], (2 + own) * run.num_replicas)
        if is_shared:
            shared = 0 if steps == 1 else 1
            self.assertEqual(created[shapes[0]], shared * run.num_replicas)


class SlowGradientsTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_windows_wait_for_their_gradients(self, strategy):
        num_matmuls, side = 12, 192
        shift = tf.constant(np.roll(np.eye(side, dtype="float32"), 1, axis=0))

        class Slow(GivenGradients):
            def _on_replica(self, gradients, weights):
                def late(gradient):
                    for _ in range(num_matmuls):  # each shifts the rows by one, exactly
                        gradient = shift @ gradient
                    return gradient

                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                rows = late(gradients[0][replica])
                column, matrix = rows[:2, 0], rows[2:5, :2]
                pairs = zip((column, matrix), self.variables, strict=True)
                self.optimizer.apply_gradients(pairs)

        run = Slow(strategy, "graph", lambda: given_gradients.wrapped(3))
        expected, random = _Momentum(), np.random.RandomState(0)
        for _ in range(40):
            window = []
            for _ in range(3):
                shape = (run.num_replicas, side, side)
                late = random.randint(-8, 9, shape).astype("float32") / 4
                run.step([np.roll(late, -num_matmuls, axis=1)])
                window.append([late[:, :2, 0], late[:, 2:5, :2]])
            expected.update(window)
            _same(run.values(), expected.values)
