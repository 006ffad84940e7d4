"""Published vectors of one variable or two: the arithmetic of a window.

The numbers are those of the Graphcore, Keras, optax and Horovod suites and of public
threads, restated. The number of a vector stands in the name of its test.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training
from tests.micro_steps import MicroSteps

FLOAT32 = tolerances.BY_DTYPE["float32"]


def descent(steps, **arguments):
    return lambda: keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(1.0), steps, **arguments
    )


def accumulator(optimizer):
    """What the first accumulator holds, over all replicas."""
    [variable] = [v for v in optimizer.variables if v.name == "accumulator_0"]
    return training.numbers(variable)


class RecordingSGD(keras.optimizers.SGD):
    """Keeps what it is handed, and makes no update of it."""

    def __init__(self):
        super().__init__(1.0)
        self.received = []

    def apply(self, grads, trainable_variables=None):
        self.received.append([np.array(gradient) for gradient in grads])


class GraphcoreTest(parameterized.TestCase):
    @parameterized.parameters(
        ("sum", 524032.0), ("mean", 65504.0), ("running_mean", 65504.0)
    )
    def test_vector_11_a_float32_accumulator_is_handed_over(self, micro, expected):
        seen = []

        def accumulator_dtype(variable):
            seen.append(variable)
            return "float32"

        inner = RecordingSGD()
        variable = keras.Variable([1.0, 1.0], dtype="float16")
        optimizer = keras_accum.AccumulationOptimizer(
            inner, 8, micro_reduction=micro, accumulator_dtype=accumulator_dtype
        )
        gradient = tf.constant([65504.0, 65504.0], "float16")
        for _ in range(8):
            self.assertEqual(inner.received, [])
            optimizer.apply_gradients([(gradient, variable)])
        [[received]] = inner.received
        self.assertEqual(received.dtype, "float32")
        np.testing.assert_array_equal(received, [expected, expected])
        self.assertTrue(all(each is variable for each in seen))

    @parameterized.parameters("float16", "bfloat16", "float32", "float64")
    def test_vector_11_by_default_the_variables_dtype_is_handed_over(self, dtype):
        inner = RecordingSGD()
        variable = keras.Variable([1.0, 1.0], dtype=dtype)
        optimizer = keras_accum.AccumulationOptimizer(inner, 8)
        for _ in range(8):
            optimizer.apply_gradients([(tf.constant([6e4, 6e4], dtype), variable)])
        [[received]] = inner.received
        self.assertEqual(received.dtype.name, dtype)
        expected = np.array(
            tf.cast([6e4, 6e4], dtype)
        )  # in float16, 8 of them overflow
        np.testing.assert_array_equal(received, expected)


class KerasTest(parameterized.TestCase):
    def test_vector_28_values_accumulators_and_updates(self):
        variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = descent(3)()
        optimizer.build([variable])
        expected_values = [[[1.0, 2.0], [3.0, 4.0]]] * 2 + [[[0.0, 1.0], [2.0, 3.0]]]
        for value, held, updates in zip(
            expected_values, [1.0, 2.0, 0.0], [0, 0, 1], strict=True
        ):
            optimizer.apply_gradients([(tf.ones((2, 2)), variable)])
            np.testing.assert_array_equal(variable.numpy(), value)
            np.testing.assert_array_equal(accumulator(optimizer), np.full((2, 2), held))
            self.assertEqual(int(optimizer.iterations), updates)

    @parameterized.parameters("eager", "graph")
    def test_vector_29_mean_over_the_window_and_sum_over_replicas(self, mode):
        step = MicroSteps("mirrored", descent(3), [[[1.0, 2.0], [3.0, 4.0]]], mode)
        self.assertEqual(step.strategy.num_replicas_in_sync, 2)
        gradient = np.array([[[1.0, 1.0], [2.0, 2.0]]] * 2, "float32")
        for _ in range(2):
            step([gradient])
            np.testing.assert_array_equal(step.values[0], [[1.0, 2.0], [3.0, 4.0]])
        step([gradient])
        np.testing.assert_array_equal(step.values[0], [[-1.0, 0.0], [-1.0, 0.0]])

    @parameterized.parameters(
        "adam",
        "sgd",
        "adamw",
        "adagrad",
        "rmsprop",
        "adadelta",
        "adamax",
        "lion",
        "nadam",
        "ftrl",
        "adafactor",
    )
    def test_vector_30_windows_equal_updates_on_the_mean(self, optimizer):
        def plain():
            return registry.OPTIMIZERS[optimizer](weight_decay=0.05)

        shapes = [(2, 3), (3,)]
        values = [np.full(shape, 0.5, "float32") for shape in shapes]
        taken = micro_steps.random_gradients(shapes, "default", 24)
        step = MicroSteps(
            "default", lambda: keras_accum.AccumulationOptimizer(plain(), 3), values
        )
        for gradients in taken:
            step(gradients)
        updates = [
            micro_steps.combined(window, shapes)
            for window in micro_steps.in_windows(taken, 3)
        ]
        variables, inner = micro_steps.plainly(plain(), values, updates)
        tolerance = registry.tolerance(optimizer)
        training.assert_same_variables(step.variables, variables, tolerance)
        self.assertEqual(step.num_updates, 8)
        training.assert_same_variables(
            step.optimizer.inner_optimizer.variables, inner.variables, tolerance
        )

    @parameterized.parameters(
        ("default", [[1.0], [2.0]]),
        ("default", [[2.0], [1.0]]),
        ("mirrored", [[1.0, 0.5], [0.5, 2.0]]),
        ("mirrored", [[0.5, 2.0], [1.0, 0.5]]),
    )
    def test_vector_31_an_overwritten_variable_becomes_the_maximum(
        self, strategy, gradients
    ):
        def scale():
            variable = keras.Variable(5.0)
            variable.overwrite_with_gradient = True
            return variable

        step = MicroSteps(strategy, descent(2), [scale])
        step([np.array(gradients[0], "float32")])
        self.assertEqual(step.values[0], 5.0)
        step([np.array(gradients[1], "float32")])
        self.assertEqual(step.values[0], 2.0)

    @parameterized.parameters("default", "mirrored")
    def test_vector_34_a_schedule_sees_updates(self, strategy):
        schedules = keras.optimizers.schedules
        cases = [
            (schedules.PiecewiseConstantDecay([0, 1], [1.0, 2.0, 3.0]), [-1, -3, -6]),
            # (1 + cos(pi t / 4)) / 2 at t = 0, 1, 2
            (schedules.CosineDecay(1.0, 4), [-1, -1.8535534, -2.3535534]),
        ]
        for schedule, expected in cases:
            step = MicroSteps(
                strategy,
                lambda schedule=schedule: keras_accum.AccumulationOptimizer(
                    keras.optimizers.SGD(schedule), 2, replica_reduction="mean"
                ),
                [0.0],
            )
            ones = np.ones(step.strategy.num_replicas_in_sync, "float32")
            for value in expected:
                step([ones])
                step([ones])
                np.testing.assert_allclose(
                    step.values[0], value, rtol=FLOAT32.rtol, atol=FLOAT32.atol
                )


class OtherSuitesTest(parameterized.TestCase):
    def test_vector_35_optax_mean_of_four(self):
        step = MicroSteps("default", descent(4), [0.0])
        for gradient, value in [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, -2.5)]:
            step([np.array([gradient], "float32")])
            self.assertEqual(step.values[0], value)

    @parameterized.parameters("default", "mirrored")
    def test_vector_38_horovod_gradient_is_the_replica_index(self, strategy):
        step = MicroSteps(strategy, descent(4, replica_reduction="mean"), [0.0])
        replicas = step.strategy.num_replicas_in_sync
        for k in range(1, 13):
            step([np.arange(replicas, dtype="float32")])
            self.assertEqual(-step.values[0], k // 4 * (replicas - 1) / 2)

    @parameterized.product(
        strategy=["default", "mirrored"], bad=[np.inf, -np.inf, np.nan]
    )
    def test_vector_39_horovod_infinity_leaves_the_next_window_finite(
        self, strategy, bad
    ):
        step = MicroSteps(strategy, descent(2, replica_reduction="mean"), [0.0])
        replicas = step.strategy.num_replicas_in_sync
        poisoned = np.ones(replicas, "float32")
        poisoned[-1] = bad
        for gradient in [poisoned, np.ones(replicas, "float32")]:
            step([gradient])
        self.assertEqual(step.values[0], 0.0)
        self.assertEqual(int(step.optimizer.skipped_windows), 1)
        for gradient in [1.0, 3.0]:
            step([np.full(replicas, gradient, "float32")])
        self.assertEqual(step.values[0], -2.0)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
class ThreadsTest(parameterized.TestCase):
    @parameterized.parameters("eager", "graph")
    def test_vector_47_none_takes_nothing_away(self, mode):
        for first_window in [(1.0, None), (None, 1.0)]:
            step = MicroSteps("default", descent(2), [0.0, 0.0], mode)
            for gradient in [*first_window, 1.0, 1.0]:
                given = None if gradient is None else np.array([gradient], "float32")
                step([given, np.ones(1, "float32")])
            self.assertEqual(step.values[0], -1.5)
            self.assertEqual(step.values[1], -2.0)

    @parameterized.parameters("default", "mirrored")
    def test_vector_48_a_thousand_ones_in_bfloat16(self, strategy):
        def zero():
            return keras.Variable(0.0, dtype="bfloat16")

        make = descent(1024, replica_reduction="mean")
        step = MicroSteps(strategy, make, [zero])
        ones = tf.ones(step.strategy.num_replicas_in_sync, "bfloat16")
        for _ in range(1024):
            self.assertEqual(step.num_updates, 0)
            step([ones])
        self.assertEqual(float(step.values[0]), -1.0)

    @parameterized.parameters("default", "mirrored")
    def test_vector_49_a_float16_gradient_of_a_float32_variable(self, strategy):
        step = MicroSteps(strategy, descent(2, replica_reduction="mean"), [0.0])
        for gradient in [1.0, 2.0]:
            step([np.full(step.strategy.num_replicas_in_sync, gradient, "float16")])
        self.assertEqual(step.values[0], -1.5)
        self.assertEqual(step.values[0].dtype, "float32")
