"""Weighted micro-batches of unequal size train as one large batch of all their rows.

The expected values come from NumPy and from the plain optimizer on the large batch.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, tolerances, training
from tests.micro_steps import MicroSteps, spread

FLOAT32 = tolerances.BY_DTYPE["float32"]
SHAPE = (3,)
VALUES = [np.full(SHAPE, 0.5, "float32")]


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def accumulating(steps, **arguments):
    return lambda: keras_accum.AccumulationOptimizer(momentum(), steps, **arguments)


def descent(steps, **arguments):
    """Plain gradient descent with a rate of 1, for numbers one can see through."""
    return lambda: keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(1.0), steps, **arguments
    )


class LargeBatchTest(parameterized.TestCase):
    @parameterized.parameters(*spread(("sum", 3), ("mean", 3), ("mean", 1)))
    def test_unequal_rows(self, strategy, mode, case):
        replica_reduction, steps = case
        make = accumulating(steps, replica_reduction=replica_reduction)
        step = MicroSteps(strategy, make, VALUES, mode)
        replicas = micro_steps.num_replicas(strategy)
        random = np.random.RandomState(0)
        updates = []
        for _ in range(2):
            of_window = []
            for _ in range(steps):
                num_rows = random.randint(1, 6, replicas)
                of_rows = [random.randn(n, *SHAPE) for n in num_rows]
                of_window += of_rows
                mean = np.stack([np.mean(each, axis=0) for each in of_rows])
                if replica_reduction == "sum":
                    mean /= replicas  # as Keras's losses do
                step([mean.astype("float32")], num_rows.astype("float32"))
            updates.append([np.mean(np.concatenate(of_window), axis=0)])
        variables, plain = micro_steps.plainly(momentum(), VALUES, updates)
        training.assert_same_variables(step.variables, variables, FLOAT32)
        inner = step.optimizer.inner_optimizer.variables
        training.assert_same_variables(inner, plain.variables, FLOAT32)

    @parameterized.product(
        strategy=["default", "mirrored"],
        replica_reduction=["sum", "mean"],
        steps=[1, 2],
    )
    def test_a_sum_is_weighted_and_not_divided(
        self, strategy, replica_reduction, steps
    ):
        reductions = {"micro_reduction": "sum", "replica_reduction": replica_reduction}
        step = MicroSteps(strategy, accumulating(steps, **reductions), VALUES)
        taken = micro_steps.random_gradients([SHAPE], strategy, 2 * steps)
        replicas = micro_steps.num_replicas(strategy)
        weights = np.arange(1.0, 1 + 2 * steps * replicas, dtype="float32")
        weights = weights.reshape(2 * steps, replicas)
        for gradients, weight in zip(taken, weights, strict=True):
            step(gradients, weight)
        updates = [
            micro_steps.combined(window, [SHAPE], of_window, **reductions)
            for window, of_window in zip(
                micro_steps.in_windows(taken, steps),
                micro_steps.in_windows(weights, steps),
                strict=True,
            )
        ]
        expected, _ = micro_steps.plainly(momentum(), VALUES, updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)

    @parameterized.parameters("default", "mirrored")
    def test_weighted_indexed_slices(self, strategy):
        shape = (4, 2)
        values = [np.full(shape, 0.5, "float32")]
        step = MicroSteps(strategy, accumulating(2), values)
        replicas = micro_steps.num_replicas(strategy)
        random = np.random.RandomState(0)
        taken = [
            [
                micro_steps.Rows(
                    np.stack([[k, (k + r) % 4, k] for r in range(replicas)]),
                    random.randn(replicas, 3, 2).astype("float32"),
                )
            ]
            for k in range(2)
        ]
        weights = [np.arange(1.0, 1 + replicas, dtype="float32") + k for k in (0, 3)]
        for gradients, weight in zip(taken, weights, strict=True):
            step(gradients, weight)
        updates = [micro_steps.combined(taken, [shape], weights)]
        expected, _ = micro_steps.plainly(momentum(), values, updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)


class ZeroWeightTest(parameterized.TestCase):
    @parameterized.parameters(*spread(("mean", 2), ("sum", 1)))
    def test_an_empty_micro_batch_does_not_poison(self, strategy, mode, case):
        """The gradient of no rows is 0/0; on one device one micro-batch is empty."""
        replica_reduction, steps = case
        make = descent(steps, replica_reduction=replica_reduction)
        step = MicroSteps(strategy, make, [np.zeros(2, "float32")], mode)
        replicas = micro_steps.num_replicas(strategy)
        if replicas == steps == 1:
            return  # the whole window would be empty: see the next test
        weights = np.full((steps, replicas), 2.0, "float32")
        given = np.full((steps, replicas, 2), 3.0, "float32")
        weights[-1, -1] = 0.0
        given[-1, -1] = [np.nan, np.inf]
        for gradient, weight in zip(given, weights, strict=True):
            step([gradient], weight)
        expected = -3.0 * (replicas if replica_reduction == "sum" else 1)
        np.testing.assert_allclose(step.values[0], [expected] * 2, rtol=FLOAT32.rtol)
        self.assertEqual(int(step.optimizer.skipped_windows), 0)
        self.assertEqual(step.num_updates, 1)

    @parameterized.parameters(*spread(("mean", 2), ("mean", 1), ("sum", 2)))
    def test_a_window_without_weight_makes_no_update(self, strategy, mode, case):
        micro_reduction, steps = case
        make = accumulating(steps, micro_reduction=micro_reduction)
        step = MicroSteps(strategy, make, VALUES, mode)
        replicas = micro_steps.num_replicas(strategy)
        first = micro_steps.random_gradients([SHAPE], strategy, steps)
        for gradients in first:
            step(gradients)
        after_one_update = (
            step.values,
            training.numbers(step.optimizer.inner_optimizer.variables[-1]),
        )
        for _ in range(steps):
            step([np.full((replicas, *SHAPE), np.nan)], np.zeros(replicas, "float32"))
        np.testing.assert_array_equal(step.values, after_one_update[0])
        np.testing.assert_array_equal(
            training.numbers(step.optimizer.inner_optimizer.variables[-1]),
            after_one_update[1],
        )
        self.assertEqual(step.num_updates, 1)
        self.assertFalse(bool(step.optimizer.has_updated))
        self.assertEqual(int(step.optimizer.position), 0)
        self.assertEqual(int(step.optimizer.skipped_windows), 0)


class FormsTest(parameterized.TestCase):
    @parameterized.product(strategy=["default", "mirrored"], steps=[1, 2])
    def test_forms_of_a_weight(self, strategy, steps):
        """A weight of 3, then one of 1, or the same alone in its window."""
        step = MicroSteps(strategy, descent(steps, replica_reduction="mean"), [0.0])

        def on_one_replica(gradient, weight):
            pairs = [(tf.constant(gradient), step.variables[0])]
            step.optimizer.apply_gradients(pairs, weight=weight)

        forms = [3, 3.0, np.int64(3), np.float16(3), np.array(3.0)]
        forms += [tf.constant(3), tf.constant(3.0, tf.float64), tf.constant(3.0)]
        for three in forms:
            before = step.values[0]
            for gradient, weight in [(4.0, three), (0.0, 1)][:steps]:
                step.strategy.run(on_one_replica, args=(gradient, weight))
            change = step.values[0] - before
            self.assertEqual(change, -4.0 if steps == 1 else -3.0, msg=repr(three))

    @parameterized.parameters("apply", "apply_gradients")
    def test_both_ways_in_take_a_weight(self, method):
        step = MicroSteps("default", descent(2), [0.0])
        for gradient, weight in [(4.0, 3.0), (0.0, 1.0)]:
            gradient = tf.constant(gradient)
            if method == "apply":
                step.optimizer.apply([gradient], step.variables, weight=weight)
            else:
                pairs = [(gradient, step.variables[0])]
                step.optimizer.apply_gradients(pairs, weight=weight)
        self.assertEqual(step.values[0], -3.0)

    def test_a_weight_of_each_replica(self):
        """As a `PerReplica` value, which `strategy.run` takes apart."""
        step = MicroSteps("mirrored", descent(1, replica_reduction="mean"), [0.0])
        replicas = step.strategy.num_replicas_in_sync

        def on_one_replica(gradient, weight):
            pairs = [(gradient, step.variables[0])]
            step.optimizer.apply_gradients(pairs, weight=weight)

        def own(value):
            return step.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(value(context.replica_id_in_sync_group))
            )

        gradient, weight = own(lambda r: 8.0 * r), own(lambda r: 1 + 2 * r)
        step.strategy.run(on_one_replica, args=(gradient, weight))
        weights = 1.0 + 2.0 * np.arange(replicas)
        expected = -np.average(8.0 * np.arange(replicas), weights=weights)
        np.testing.assert_allclose(step.values[0], expected, rtol=FLOAT32.rtol)

    @parameterized.parameters("default", "mirrored")
    def test_none_weighs_one_among_others(self, strategy):
        step = MicroSteps(strategy, accumulating(3), VALUES)
        replicas = micro_steps.num_replicas(strategy)
        taken = micro_steps.random_gradients([SHAPE], strategy, 3)
        weights = [None, np.arange(2.0, 2 + replicas, dtype="float32"), None]
        for gradients, weight in zip(taken, weights, strict=True):
            step(gradients, weight)
        updates = [micro_steps.combined(taken, [SHAPE], weights)]
        expected, _ = micro_steps.plainly(momentum(), VALUES, updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)

    @parameterized.parameters("default", "mirrored")
    def test_a_flush_divides_by_the_weight_that_is_there(self, strategy):
        step = MicroSteps(strategy, accumulating(4), VALUES)
        replicas = micro_steps.num_replicas(strategy)
        taken = micro_steps.random_gradients([SHAPE], strategy, 2)
        weights = [np.arange(2.0, 2 + replicas, dtype="float32") * k for k in (1, 3)]
        for gradients, weight in zip(taken, weights, strict=True):
            step(gradients, weight)
        step.optimizer.flush()
        updates = [micro_steps.combined(taken, [SHAPE], weights)]
        expected, _ = micro_steps.plainly(momentum(), VALUES, updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)
