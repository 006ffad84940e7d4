"""An infinity or a NaN, on each replica in turn: what each policy makes of it."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training

N = 3
RATE, MOMENTUM = 0.5, 0.9
SCALES = {
    "none": lambda: None,
    "static": lambda: 64.0,
    "dynamic": lambda: keras_accum.DynamicLossScale(64.0, growth_interval=100),
    "scheduled": lambda: keras_accum.ScheduledLossScale(
        lambda updates: 2.0 ** tf.cast(updates + 3, "float32")
    ),
    "automatic": lambda: keras_accum.AutomaticLossScale(64.0, period=100),
}


def _run(strategy, mode="graph", policy="skip_micro_batch", scale="none", steps=N):
    return micro_steps.MicroSteps(
        strategy,
        lambda: keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(RATE, momentum=MOMENTUM),
            steps,
            replica_reduction="mean",
            loss_scale=SCALES[scale](),
            on_nonfinite=policy,
        ),
        [np.array([1.0, 2.0], "float32")],
        mode,
    )


def _gradients(replicas, num_steps, seed=0):
    random = np.random.RandomState(seed)
    return random.randn(num_steps, replicas, 2).astype("float32")


def _take(run, steps):
    """Micro steps with true gradients, scaled as the optimizer would have them."""
    for gradient in steps:
        run([gradient * np.float32(run.optimizer.loss_scale)])


def _momentum_sgd(means):
    value, velocity = np.array([1.0, 2.0]), np.zeros(2)
    for mean in means:
        velocity = MOMENTUM * velocity - RATE * mean
        value = value + velocity
    return value


def _assert_close(actual, expected):
    tolerance = tolerances.BY_DTYPE["float32"]
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance.rtol, atol=tolerance.atol
    )


class SkipMicroBatchTest(parameterized.TestCase):
    @parameterized.product(
        place=micro_steps.PLACES, scale=["none", "dynamic"], bad=[np.nan, -np.inf]
    )
    def test_it_leaves_the_window_where_it_was_bad(self, place, scale, bad):
        replicas = micro_steps.num_replicas(place[0])
        for replica in range(replicas):
            run = _run(*place, scale=scale)
            steps = _gradients(replicas, 2 * N)
            is_good = np.ones((2 * N, replicas), bool)
            steps[1, replica, 0], is_good[1, replica] = bad, False
            _take(run, steps)
            means = [
                steps[window][is_good[window]].mean(axis=0)
                for window in (slice(0, N), slice(N, None))
            ]
            _assert_close(run.values[0], _momentum_sgd(means))
            self.assertEqual(int(run.optimizer.skipped_micro_batches), 1)
            self.assertEqual(int(run.optimizer.skipped_windows), 0)
            if scale == "dynamic":  # what overflowed is to be scaled by less
                self.assertEqual(float(run.optimizer.loss_scale), 32)

    @parameterized.parameters("default", "mirrored")
    def test_a_window_of_nothing_else_is_skipped(self, strategy):
        run = _run(strategy)
        replicas = micro_steps.num_replicas(strategy)
        _take(run, np.full((N, replicas, 2), np.nan, "float32"))
        np.testing.assert_array_equal(run.values[0], [1, 2])
        self.assertEqual(run.num_updates, 0)
        self.assertEqual(int(run.optimizer.skipped_windows), 1)
        self.assertEqual(int(run.optimizer.skipped_micro_batches), N * replicas)
        steps = _gradients(replicas, N)
        _take(run, steps)
        _assert_close(run.values[0], _momentum_sgd([steps.mean(axis=(0, 1))]))

    @parameterized.parameters("default", "mirrored")
    def test_windows_of_one(self, strategy):
        replicas = micro_steps.num_replicas(strategy)
        run = _run(strategy, steps=1)
        steps = _gradients(replicas, 2)
        steps[0, -1, 1] = np.inf
        _take(run, steps)
        good = [steps[0, : replicas - 1], steps[1]]
        _assert_close(
            run.values[0], _momentum_sgd([g.mean(axis=0) for g in good if len(g)])
        )


class SkipWindowTest(parameterized.TestCase):
    @parameterized.product(
        place=micro_steps.PLACES, scale=["static", "dynamic", "scheduled", "automatic"]
    )
    def test_nothing_moves_with_any_loss_scale(self, place, scale):
        replicas = micro_steps.num_replicas(place[0])
        for replica in range(replicas):
            run = _run(*place, policy="skip_window", scale=scale)
            steps = _gradients(replicas, 3 * N)
            steps[N + 1, replica, 1] = np.inf
            _take(run, steps)
            means = [steps[:N].mean(axis=(0, 1)), steps[2 * N :].mean(axis=(0, 1))]
            _assert_close(run.values[0], _momentum_sgd(means))
            self.assertEqual(int(run.optimizer.skipped_windows), 1)
            self.assertEqual(run.num_updates, 2)
            after = {"static": 64, "dynamic": 32, "scheduled": 32, "automatic": 64}
            self.assertEqual(float(run.optimizer.loss_scale), after[scale])


class ResumeTest(parameterized.TestCase):
    @parameterized.parameters(("default", "mirrored"), ("mirrored", "default"))
    def test_a_window_without_weights_is_finished_on_other_replicas(self, first, then):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = f"{folder.name}/half.weights.h5"
        x, y = training.rows(2 * training.ROWS)
        halves = (slice(0, training.ROWS), slice(training.ROWS, None))
        for strategy, half in zip((first, then), halves, strict=True):
            with registry.STRATEGIES[strategy]().scope():
                optimizer = keras_accum.AccumulationOptimizer(
                    keras.optimizers.SGD(0.1), 2, on_nonfinite="skip_micro_batch"
                )
                model = training.network(optimizer)
                optimizer.build(model.trainable_variables)
            if half.start:
                model.load_weights(path)
            model.fit(
                training.batches(x[half], y[half], training.ROWS),
                shuffle=False,
                verbose=0,
            )
            model.save_weights(path)
        expected = training.network(keras.optimizers.SGD(0.1))
        expected.train_on_batch(x, y)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )


class PropagateTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_it_reaches_the_variables_of_all_replicas(self, strategy):
        replicas = micro_steps.num_replicas(strategy)
        run = _run(strategy, policy="propagate")
        steps = _gradients(replicas, N)
        steps[1, -1, 0] = np.nan
        _take(run, steps)
        for copy in run.strategy.experimental_local_results(run.variables[0].value):
            self.assertTrue(np.isnan(copy.numpy()[0]))
        self.assertEqual(run.num_updates, 1)
        self.assertEqual(int(run.optimizer.skipped_windows), 0)


class VectorsTest(parameterized.TestCase):
    @parameterized.parameters(*micro_steps.PLACES)
    def test_vector_37_two_windows_around_a_bad_one(self, strategy, mode):
        replicas = micro_steps.num_replicas(strategy)
        run = micro_steps.MicroSteps(
            strategy,
            lambda: keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(1.0), 2, replica_reduction="mean"
            ),
            [np.float32(0.0)],
            mode,
        )
        expected = [0, -1, -1, -1, -1, -2]
        for gradient, value in zip(
            (1.0, 1.0, np.inf, np.nan, 1.0, 1.0), expected, strict=True
        ):
            run([np.full(replicas, gradient, "float32")])
            self.assertEqual(run.values[0], value)

    @parameterized.parameters("default", "mirrored")
    def test_vector_54_a_scale_changed_inside_a_window(self, strategy):
        with registry.STRATEGIES[strategy]().scope():
            variable = keras.Variable(0.0)
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(1.0), 2, loss_scale=4.0
            )
            optimizer.build([variable])
        scope = registry.STRATEGIES[strategy]()
        num_traces = []

        @tf.function(autograph=False)
        def step(true_gradient):
            num_traces.append(1)

            def on_replica():
                replicas = scope.num_replicas_in_sync
                with tf.GradientTape() as tape:
                    loss = variable.value * true_gradient / replicas
                    scaled = optimizer.scale_loss(loss)
                gradient = tape.gradient(scaled, variable.value)
                optimizer.apply_gradients([(gradient, variable)])

            scope.run(on_replica)

        step(tf.constant(1.0))
        traces = len(num_traces)
        optimizer.loss_scale = 8
        self.assertEqual(float(optimizer.loss_scale), 4)
        step(tf.constant(3.0))
        self.assertEqual(training.numbers(variable), -2)
        self.assertEqual(float(optimizer.loss_scale), 8)
        step(tf.constant(1.0))
        step(tf.constant(3.0))
        self.assertEqual(training.numbers(variable), -4)
        self.assertEqual(len(num_traces), traces)


class FitTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], mode=["graph", "eager"], row=[9, 13]
    )
    def test_a_bad_row_leaves_with_its_micro_batch(self, strategy, mode, row):
        # Rows 8 to 15 are the second micro-batch; a replica has half of them.
        x, y = training.rows(4 * training.ROWS)
        share = training.ROWS // micro_steps.num_replicas(strategy)
        lost = range(row // share * share, row // share * share + share)
        kept = [i for i in range(2 * training.ROWS) if i not in lost]
        expected = training.network(keras.optimizers.SGD(0.1, momentum=0.9))
        expected.train_on_batch(x[kept], y[kept])
        expected.train_on_batch(x[2 * training.ROWS :], y[2 * training.ROWS :])
        x = np.where(np.arange(len(x))[:, None] == row, np.nan, x).astype("float32")
        with registry.STRATEGIES[strategy]().scope():
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9),
                2,
                on_nonfinite="skip_micro_batch",
            )
            model = training.network(optimizer, **registry.MODES[mode])
        model.fit(training.batches(x, y, training.ROWS), shuffle=False, verbose=0)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )
        self.assertEqual(int(model.optimizer.skipped_micro_batches), 1)

    def test_a_replica_without_rows_does_not_poison_the_others(self):
        if registry.NUM_REPLICAS < 2:
            self.skipTest("one replica has all rows")
        with registry.mirrored().scope():
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(0.1), 2, on_nonfinite="skip_micro_batch"
            )
            model = training.network(optimizer)
        x, y = training.rows(9)  # a micro-batch of 8 and one of 1: of one replica
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.fit(data, shuffle=False, verbose=0)
        for variable in model.variables:
            self.assertTrue(np.all(np.isfinite(training.numbers(variable))))
        self.assertEqual(int(training.numbers(optimizer.iterations)), 1)
