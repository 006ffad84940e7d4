"""Gradients of every form, and every reduction, give the update of the formula.

The expected values come from NumPy and from the plain optimizer that is handed what
NumPy combined.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training
from tests.micro_steps import PLACES, MicroSteps, Rows, spread

FLOAT32 = tolerances.BY_DTYPE["float32"]
SHAPES = [(4, 3), (3,), (4, 3)]
VALUES = [np.full(shape, 0.5, "float32") for shape in SHAPES]


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def accumulating(steps, **arguments):
    return lambda: keras_accum.AccumulationOptimizer(momentum(), steps, **arguments)


def repeated_rows(strategy, seed):
    """Three rows of four; two of the three are the same."""
    random = np.random.RandomState(seed)
    replicas = micro_steps.num_replicas(strategy)
    indices = np.stack([[r % 4, (r + seed) % 4, r % 4] for r in range(replicas)])
    return Rows(indices, random.randn(replicas, 3, 3).astype("float32"))


def gradients_of_both_forms(strategy, num_micro_steps):
    """The first variable's are sparse, the second's dense, the third's now and then."""
    taken = micro_steps.random_gradients(SHAPES, strategy, num_micro_steps)
    for seed, gradients in enumerate(taken):
        gradients[0] = repeated_rows(strategy, seed)
        if seed % 2:
            gradients[2] = repeated_rows(strategy, seed + 1)
    return taken


class Doubles(keras.constraints.Constraint):
    """No projection: it shows how often it is applied."""

    def __call__(self, value):
        return 2.0 * value


class GradientsTest(parameterized.TestCase):
    def assert_equals_plain(self, steps_taken, windows, **reductions):
        updates = [
            micro_steps.combined(window, SHAPES, **reductions) for window in windows
        ]
        variables, optimizer = micro_steps.plainly(momentum(), VALUES, updates)
        training.assert_same_variables(steps_taken.variables, variables, FLOAT32)
        inner = steps_taken.optimizer.inner_optimizer.variables
        training.assert_same_variables(inner, optimizer.variables, FLOAT32)

    @parameterized.parameters(*spread(3, 1))
    def test_dense_gradients_and_indexed_slices(self, strategy, mode, steps):
        step = MicroSteps(strategy, accumulating(steps), VALUES, mode)
        taken = gradients_of_both_forms(strategy, 2 * steps)
        for gradients in taken:
            step(gradients)
        self.assert_equals_plain(step, micro_steps.in_windows(taken, steps))

    @parameterized.parameters("default", "mirrored")
    def test_a_running_mean_of_both_forms(self, strategy):
        make = accumulating(3, micro_reduction="running_mean")
        step = MicroSteps(strategy, make, VALUES)
        taken = gradients_of_both_forms(strategy, 6)
        for gradients in taken:
            step(gradients)
        self.assert_equals_plain(step, micro_steps.in_windows(taken, 3))

    @parameterized.parameters("default", "mirrored")
    def test_embedding_through_fit(self, strategy):
        random = np.random.RandomState(0)
        ids = random.randint(0, 5, (3 * 24, 2))  # 5 rows: each comes many times
        targets = random.randn(len(ids), 1).astype("float32")

        def fitted(optimizer, batch_size):
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [
                    keras.Input((2,), dtype="int32"),
                    keras.layers.Embedding(6, 3),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(optimizer, loss="mse")
            dataset = training.batches(ids, targets, batch_size)
            model.fit(dataset, verbose=0, shuffle=False)
            return model

        expected = fitted(momentum(), 24)
        with registry.STRATEGIES[strategy]().scope():
            model = fitted(accumulating(3)(), 8)
        training.assert_same_variables(model.variables, expected.variables, FLOAT32)

    @parameterized.product(
        strategy_and_steps=[("default", 3), ("mirrored", 3), ("mirrored", 1)],
        micro_reduction=["sum", "mean", "running_mean"],
        replica_reduction=["sum", "mean"],
    )
    def test_reductions(self, strategy_and_steps, micro_reduction, replica_reduction):
        strategy, steps = strategy_and_steps
        reductions = {
            "micro_reduction": micro_reduction,
            "replica_reduction": replica_reduction,
        }
        step = MicroSteps(strategy, accumulating(steps, **reductions), VALUES, "eager")
        taken = micro_steps.random_gradients(SHAPES, strategy, 2 * steps)
        for gradients in taken:
            step(gradients)
        self.assert_equals_plain(
            step, micro_steps.in_windows(taken, steps), **reductions
        )

    @parameterized.product(
        strategy=["default", "mirrored"], micro_reduction=["mean", "running_mean"]
    )
    def test_a_window_closed_early_divides_by_what_it_holds(
        self, strategy, micro_reduction
    ):
        make = accumulating(5, micro_reduction=micro_reduction)
        step = MicroSteps(strategy, make, VALUES)
        taken = micro_steps.random_gradients(SHAPES, strategy, 3)
        for gradients in taken:
            step(gradients)
        step.optimizer.flush()
        self.assert_equals_plain(step, [taken])

    @parameterized.parameters(*PLACES)
    def test_constraints_apply_once_per_update(self, strategy, mode):
        def constrained():
            variable = keras.Variable([1.0, -2.0, 3.0])
            variable.constraint = Doubles()
            return variable

        step = MicroSteps(strategy, accumulating(2), [constrained], mode)
        taken = micro_steps.random_gradients([(3,)], strategy, 4)
        for gradients in taken:
            step(gradients)
        updates = [
            micro_steps.combined(window, [(3,)])
            for window in micro_steps.in_windows(taken, 2)
        ]
        expected, _ = micro_steps.plainly(momentum(), [constrained], updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)


class FormsTest(parameterized.TestCase):
    @parameterized.parameters(
        *spread(
            (["float16", "bfloat16", "float64"], "float32", 2),
            (["float32", "float16"], "float64", 2),
            (["float32"], "float16", 2),
            (["float32"], "bfloat16", 2),
            (["float16"], "float32", 1),
            (["float64"], "float32", 1),
        )
    )
    def test_gradients_of_another_dtype(self, strategy, mode, case):
        of_gradients, of_variable, steps = case

        def variable():
            return keras.Variable([1.0, 2.0], dtype=of_variable)

        def sgd():
            return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.5), steps)

        step = MicroSteps(strategy, sgd, [variable] * len(of_gradients), mode)
        # Exact in every dtype, so that nothing is left to a tolerance.
        replicas = micro_steps.num_replicas(strategy)
        gradients = [[4.0 * (r + 1), -2.0] for r in range(replicas)]
        for _ in range(steps):
            step([tf.cast(gradients, dtype) for dtype in of_gradients])
        expected = np.array([1.0, 2.0]) - 0.5 * np.sum(gradients, axis=0)
        for value in step.values:
            self.assertEqual(value.dtype.name, of_variable)
            np.testing.assert_array_equal(value.astype("float64"), expected)

    @parameterized.parameters("default", "mirrored")
    def test_variables_of_several_dtypes(self, strategy):
        def variable(dtype):
            return lambda: keras.Variable([1.0, 2.0], dtype=dtype)

        def sgd():
            return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.5), 2)

        dtypes = ["float32", "float64", "float16"]
        step = MicroSteps(strategy, sgd, [variable(dtype) for dtype in dtypes])
        replicas = micro_steps.num_replicas(strategy)
        for gradient in ([4.0, -2.0], [8.0, 2.0]):
            step([tf.cast([gradient] * replicas, dtype) for dtype in dtypes])
        for value in step.values:
            np.testing.assert_array_equal(value, [1.0 - 3.0 * replicas, 2.0])

    @parameterized.product(
        strategy=["default", "mirrored"],
        case=[(None, 1, "mean"), (None, 2, "running_mean"), ([None, None], 2, "mean")],
    )
    def test_gradients_without_a_static_shape(self, strategy, case):
        shape, steps, micro_reduction = case
        make = accumulating(steps, micro_reduction=micro_reduction)
        step = MicroSteps(strategy, make, [np.ones((2, 3), "float32")])
        variable = step.variables[0]

        @tf.function(input_signature=[tf.TensorSpec(shape)], autograph=False)
        def unshaped(gradient):
            def on_one_replica():
                context = tf.distribute.get_replica_context()
                factor = 1.0 + tf.cast(context.replica_id_in_sync_group, tf.float32)
                step.optimizer.apply_gradients([(gradient * factor, variable)])

            step.strategy.run(on_one_replica)

        taken = [np.arange(6.0).reshape(2, 3) + k for k in range(2 * steps)]
        for gradient in taken:
            unshaped(tf.constant(gradient, "float32"))
        replicas = micro_steps.num_replicas(strategy)
        factor = replicas * (replicas + 1) / 2
        updates = [
            [factor * np.mean(window, axis=0)]
            for window in micro_steps.in_windows(taken, steps)
        ]
        expected, _ = micro_steps.plainly(
            momentum(), [np.ones((2, 3), "float32")], updates
        )
        training.assert_same_variables([variable], expected, FLOAT32)

    @parameterized.product(
        strategy=["default", "mirrored"], steps=[1, 2], weight=[None, 3.0]
    )
    def test_gradients_as_numpy_arrays(self, strategy, steps, weight):
        step = MicroSteps(strategy, accumulating(steps), [np.ones(2, "float32")])

        def on_one_replica():
            gradient = np.array([1.0, 2.0], "float32")
            step.optimizer.apply_gradients(
                [(gradient, step.variables[0])], weight=weight
            )

        for _ in range(steps):
            step.strategy.run(on_one_replica)
        factor = 0.1 * micro_steps.num_replicas(strategy)
        np.testing.assert_allclose(
            step.values[0], [1 - factor, 1 - 2 * factor], rtol=FLOAT32.rtol
        )

    @parameterized.parameters("default", "mirrored")
    def test_float16_accumulators(self, strategy):
        make = accumulating(4, accumulator_dtype="float16")
        step = MicroSteps(strategy, make, VALUES)
        taken = micro_steps.random_gradients(SHAPES, strategy, 8)
        for gradients in taken:
            step(gradients)
        updates = [
            micro_steps.combined(window, SHAPES)
            for window in micro_steps.in_windows(taken, 4)
        ]
        expected, _ = micro_steps.plainly(momentum(), VALUES, updates)
        float16 = tolerances.BY_DTYPE["float16"]
        training.assert_same_variables(step.variables, expected, float16)
        # Rounded to ten bits they cannot agree as float32 would.
        with self.assertRaises(AssertionError):
            training.assert_same_variables(step.variables, expected, FLOAT32)

    @parameterized.parameters("default", "mirrored")
    def test_a_running_mean_in_float16_does_not_overflow(self, strategy):
        make = accumulating(
            8, accumulator_dtype="float16", micro_reduction="running_mean"
        )
        step = MicroSteps(strategy, make, [np.zeros(1, "float32")])
        replicas = micro_steps.num_replicas(strategy)
        share = 32768.0 / replicas  # over the replicas, 32768; eight of them overflow
        for _ in range(8):
            step([np.full((replicas, 1), share, "float32")])
        tolerance = tolerances.BY_DTYPE["float16"]
        np.testing.assert_allclose(step.values[0], [-3276.8], rtol=tolerance.rtol)
        self.assertEqual(int(step.optimizer.skipped_windows), 0)
