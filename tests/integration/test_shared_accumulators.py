"""Small accumulators share a variable: what is saved and trained does not show it."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import accumulators
from tests import micro_steps, tolerances, training
from tests.integration import saving, stepping

STEPS = 3
SHAPES = [(2,), (3, 2), (), (2, 1, 2)]


def _shared(is_shared):
    """Whether accumulators that are made meanwhile share a variable."""
    return mock.patch.object(accumulators, "SMALL", 4096 if is_shared else 0)


def _optimizer():
    return keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), STEPS
    )


def _names(optimizer):
    names = [variable.name for variable in optimizer.window_state.held]
    return [name for name in names if name.startswith("accumulator")]


class FileTest(saving.TestCase):
    @parameterized.product(
        file_format=["keras", "weights", "checkpoint"],
        was_shared=[True, False],
        way=[("default", "mirrored"), ("mirrored", "default"), ("default", "default")],
    )
    def test_one_grouping_is_read_by_the_other(self, file_format, was_shared, way):
        source, target = way
        with _shared(was_shared):
            model = stepping.layered(source, _optimizer)
        self.assertLen(_names(model.optimizer), 1 if was_shared else 2)
        steps = stepping.gradients(2 * STEPS)
        for step in steps[:-1]:
            stepping.micro_step(model, source, step)
        path = saving.save(model, self.path(f"x{saving.SUFFIXES[file_format]}"))
        with _shared(not was_shared):
            model = saving.restore(path, target, _optimizer)
        self.assertLen(_names(model.optimizer), 2 if was_shared else 1)
        stepping.micro_step(model, target, steps[-1])
        expected = stepping.layered("default", lambda: _optimizer().inner_optimizer)
        for window in (steps[:STEPS], steps[STEPS:]):
            stepping.apply_plain(expected, stepping.window_mean(window))
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    def test_a_checkpoint_has_the_names_of_both(self):
        def keys(is_shared):
            with _shared(is_shared):
                model = stepping.layered("default", _optimizer)
            path = saving.save(model, self.path(f"{is_shared}.checkpoint"))
            return {name for name, _ in tf.train.list_variables(path)}

        self.assertEqual(keys(True), keys(False))

    def test_an_accumulator_of_another_shape_is_refused(self):
        model = stepping.layered("default", _optimizer)
        with self.assertRaisesRegex(ValueError, r"shape \(5,\) for one of shape \(3,"):
            model.optimizer.window_state.accumulator_0.assign(np.zeros(5))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
class StepsTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        mode=["eager", "graph"],
        micro_reduction=["mean", "running_mean"],
    )
    def test_none_and_rows_and_weights(self, strategy, mode, micro_reduction):
        replicas = micro_steps.num_replicas(strategy)
        is_weighted = micro_reduction == "mean"
        values = [np.ones(shape, "float32") for shape in SHAPES]

        def make():
            return keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.9),
                STEPS,
                micro_reduction=micro_reduction,
            )

        run = micro_steps.MicroSteps(strategy, make, values, mode)
        self.assertLen(_names(run.optimizer), 1)
        random = np.random.RandomState(0)
        steps = micro_steps.random_gradients(SHAPES, strategy, 2 * STEPS)
        weights = [None] * len(steps)
        if is_weighted:
            weights = list(random.rand(len(steps), replicas).astype("float32"))
        for k, step in enumerate(steps):
            if k % 2:  # some rows of the second, one of them twice
                step[1] = micro_steps.Rows(
                    np.array([[2, 0, 2]] * replicas),
                    random.randn(replicas, 3, 2).astype("float32"),
                )
            if k in (1, 3, 4, 5):  # the third has none in the second window
                step[2] = None
        for step, weight in zip(steps, weights, strict=True):
            run(step, weight)
        means = [
            micro_steps.combined(
                steps[i : i + STEPS],
                SHAPES,
                weights[i : i + STEPS] if is_weighted else None,
            )
            for i in (0, STEPS)
        ]
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        expected, _ = micro_steps.plainly(plain, values, means)
        for actual, other in zip(run.values, expected, strict=True):
            np.testing.assert_allclose(
                actual, training.numbers(other), rtol=1e-5, atol=1e-6
            )

    def test_who_shares(self):
        large = np.zeros(accumulators.SMALL + 1, "float32")
        small = np.zeros(accumulators.SMALL, "float32")

        def names(*values, **options):
            variables = [keras.Variable(value) for value in values]
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(), 2, **options
            )
            optimizer.build(variables)
            return _names(optimizer)

        self.assertEqual(names(small, large, small), ["accumulator_1", "accumulators"])
        self.assertEqual(names(small, large), ["accumulator_0", "accumulator_1"])
        dtypes = [small, small, *[small.astype("float64")] * 2]
        self.assertEqual(names(*dtypes), ["accumulators"] * 2)
        self.assertEqual(names(*dtypes, accumulator_dtype="float64"), ["accumulators"])

    def test_who_is_treated_alike_shares(self):
        """What is divided by another number, or cast to another dtype, does not."""
        names = ["exempt", "exempt", "other", "other"]
        variables = [keras.Variable(np.zeros(3, "float32"), name=n) for n in names]
        scale = keras_accum.DynamicLossScale(4.0, unscaled=lambda v: v.name == "exempt")
        optimizer = keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(1.0), 2, loss_scale=scale
        )
        optimizer.build(variables)
        self.assertEqual(_names(optimizer), ["accumulators"] * 2)
        for number in (1.0, 3.0):
            optimizer.apply([tf.fill([3], number)] * 4, variables)
        for variable, expected in zip(variables, (-2, -2, -0.5, -0.5), strict=True):
            np.testing.assert_array_equal(variable.numpy(), [expected] * 3)
        halves = [keras.Variable(np.zeros(3), dtype="float16") for _ in range(2)]
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(1.0), 2)
        optimizer.build([*halves, *variables])
        self.assertEqual(_names(optimizer), ["accumulators"] * 2)

    @parameterized.parameters("eager", "graph")
    def test_of_a_frozen_one_nothing_is_taken(self, mode):
        """It shares with the others, and holds a NaN of before it was frozen."""
        variables = [keras.Variable(np.zeros(shape)) for shape in SHAPES]
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(1.0), 2)
        optimizer.build(variables)
        self.assertEqual(_names(optimizer), ["accumulators"])

        def step(numbers, variables):
            gradients = [
                tf.fill(v.shape, number)
                for number, v in zip(numbers, variables, strict=True)
            ]
            optimizer.apply(gradients, variables)

        def run(numbers, variables):
            once = functools.partial(step, numbers, variables)
            (tf.function(once, autograph=False) if mode == "graph" else once)()

        run([1.0, float("nan"), 2.0, 3.0], variables)
        variables[1].trainable = False
        run([3.0, 6.0, 9.0], [variables[i] for i in (0, 2, 3)])
        for variable, expected in zip(variables, (-2, 0, -4, -6), strict=True):
            np.testing.assert_array_equal(
                variable.numpy(), np.full(variable.shape, expected)
            )

    def test_a_large_table_is_not_passed_over(self):
        """Rows are scattered: nothing of the table's size but its own accumulator."""
        rows = accumulators.SMALL
        table = keras.Variable(np.zeros((rows, 4), "float32"))
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(), 4)
        optimizer.build([table])

        @tf.function(autograph=False)
        def step(values, indices):
            slices = tf.IndexedSlices(values, indices, tf.constant([rows, 4]))
            optimizer.apply([slices], [table])

        function = step.get_concrete_function(
            tf.TensorSpec((3, 4)), tf.TensorSpec((3,), tf.int32)
        )
        outside = function.graph.get_operations()
        self.assertIn("ResourceScatterAdd", {op.type for op in outside})
        of_its_size = [
            op.name
            for op in outside
            for output in op.outputs
            if output.shape.rank == 2 and output.shape[0] == rows
        ]
        self.assertEqual(of_its_size, [])
