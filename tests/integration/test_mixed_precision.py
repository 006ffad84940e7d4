"""Half precision: one loss scale, outermost, judged on what is reduced.

The expected values come from the plain optimizer on the large batch.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import stepping

STEPS = 2
INITIAL_SCALE = 2.0**15  # Keras's


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def wrapper(**arguments):
    return keras_accum.AccumulationOptimizer(momentum(), STEPS, **arguments)


def mixin(**arguments):
    return stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS, **arguments
    )


def made(strategy, optimizer, **arguments):
    with registry.STRATEGIES[strategy]().scope():
        return training.network(optimizer(), **arguments)


def fit(model, rows, rows_per_step):
    x, y = rows
    return model.fit(
        training.batches(x, y, rows_per_step), shuffle=False, verbose=0
    ).history["loss"]


def large_batch(x, y):
    """The plain optimizer; under mixed_float16 Keras scales its loss by itself."""
    model = made("default", momentum)
    return model, fit(model, (x, y), STEPS * training.ROWS)


def rows_of(num_windows):
    return training.rows(num_windows * STEPS * training.ROWS)


class MixedPrecisionTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], dtype=["float16", "bfloat16"]
    )
    def test_trains_as_the_large_batch(self, strategy, dtype):
        keras.mixed_precision.set_dtype_policy(f"mixed_{dtype}")
        rows = rows_of(10)
        expected, loss = large_batch(*rows)
        model = made(strategy, wrapper)
        self.assertIs(type(model.optimizer), keras_accum.AccumulationOptimizer)
        actual_loss = fit(model, rows, training.ROWS)
        tolerance = tolerances.BY_DTYPE[dtype]
        training.assert_same_variables(model.variables, expected.variables, tolerance)
        # Logged as it is, not as it is scaled.
        np.testing.assert_allclose(actual_loss, loss, tolerance.rtol)
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 10)
        scale = INITIAL_SCALE if dtype == "float16" else 1.0
        self.assertEqual(float(model.optimizer.loss_scale), scale)

    @parameterized.parameters(
        ("mixed_float16", INITIAL_SCALE),
        ("mixed_bfloat16", 1.0),
        ("float32", 1.0),
    )
    def test_none_is_resolved_by_the_policy(self, policy, scale):
        keras.mixed_precision.set_dtype_policy(policy)
        self.assertEqual(float(wrapper().loss_scale), scale)
        self.assertEqual(float(mixin().loss_scale), scale)
        self.assertEqual(float(wrapper(loss_scale=1.0).loss_scale), 1.0)

    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_an_overflow_skips_the_window_everywhere(self, strategy, surface):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        x, y = rows_of(3)
        window = STEPS * training.ROWS
        others = np.r_[0:window, 2 * window : 3 * window]
        expected, _ = large_batch(x[others], y[others])
        make = wrapper if surface == "wrapper" else mixin
        model = made(strategy, make, auto_scale_loss=False)
        self.assertIs(type(model.optimizer), type(make()))
        fit(model, (x[:window], y[:window]), training.ROWS)
        plain = expected.optimizer.inner_optimizer.variables
        before = self.copies(model, len(plain))

        overflowing = x[window : 2 * window].copy()
        overflowing[training.ROWS - 1, 0] = 1e30  # one row, of one replica, once
        fit(model, (overflowing, y[window : 2 * window]), training.ROWS)
        for one, other in zip(self.copies(model, len(plain)), before, strict=True):
            np.testing.assert_array_equal(one, other)
        optimizer = model.optimizer
        self.assertEqual(float(optimizer.loss_scale), INITIAL_SCALE / 2)
        self.assertEqual(int(optimizer.skipped_windows), 1)
        self.assertEqual(int(optimizer.position), 0)
        self.assertFalse(bool(optimizer.has_updated))

        fit(model, (x[2 * window :], y[2 * window :]), training.ROWS)
        training.assert_same_variables(
            [*model.variables, *optimizer.variables[: len(plain)]],
            [*expected.variables, *plain],
            tolerances.BY_DTYPE["float16"],
        )
        self.assertTrue(bool(optimizer.has_updated))

    def copies(self, model, num_plain):
        """Each replica's copy of the model's and the plain optimizer's variables."""
        variables = [*model.variables, *model.optimizer.variables[:num_plain]]
        strategy = model.distribute_strategy
        return [
            copy.numpy()
            for variable in variables
            for copy in strategy.experimental_local_results(variable.value)
        ]

    @parameterized.parameters(("default", "wrapper"), ("one_device", "mixin"))
    def test_a_static_scale_changes_no_bit(self, strategy, surface):
        make = wrapper if surface == "wrapper" else mixin
        rows = rows_of(5)
        unscaled = made(strategy, make)
        scaled = made(strategy, lambda: make(loss_scale=1024.0))
        losses = [fit(each, rows, training.ROWS) for each in (unscaled, scaled)]
        self.assertEqual(*losses)
        for one, other in zip(
            scaled.get_weights(), unscaled.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        expected, _ = large_batch(*rows)
        training.assert_same_variables(
            scaled.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )


class InsideKerasLossScaleTest(parameterized.TestCase):
    def test_compile_puts_one_around_the_mixin_and_it_leaves_scaling_to_it(self):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        rows = rows_of(5)
        expected, _ = large_batch(*rows)
        with self.assertWarnsRegex(UserWarning, "auto_scale_loss=False"):
            model = made("default", mixin)
        surrounding = model.optimizer
        self.assertIs(type(surrounding), keras.optimizers.LossScaleOptimizer)
        self.assertEqual(float(surrounding.inner_optimizer.loss_scale), 1.0)
        fit(model, rows, training.ROWS)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float16"]
        )
        iterations = surrounding.inner_optimizer.iterations
        self.assertEqual(int(training.numbers(iterations)), 5)

    def test_a_scale_of_the_mixins_own_is_given_up(self):
        rows = rows_of(5)
        expected, _ = large_batch(*rows)
        optimizer = mixin(loss_scale="dynamic")
        with self.assertWarnsRegex(UserWarning, "auto_scale_loss=False"):
            surrounding = keras.optimizers.LossScaleOptimizer(optimizer, 64.0)
        model = made("default", lambda: surrounding)
        fit(model, rows, training.ROWS)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    def test_without_a_scale_of_its_own_nothing_is_said(self):
        keras.optimizers.LossScaleOptimizer(mixin())  # a warning would be an error

    def test_the_wrapper_stands_outermost(self):
        with self.assertRaisesRegex(ValueError, "outermost"):
            keras.optimizers.LossScaleOptimizer(wrapper())


class TracedBeforeBuildTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_the_step_reads_the_scale_of_the_day(self, strategy, surface):
        distribution = registry.STRATEGIES[strategy]()
        with distribution.scope():
            make = wrapper if surface == "wrapper" else mixin
            optimizer = make(loss_scale="dynamic")
            variable = keras.Variable(1.0)

        def step(x):
            with tf.GradientTape() as tape:
                loss = variable * x / distribution.num_replicas_in_sync
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, [variable.value])
            optimizer.apply_gradients(zip(gradients, [variable], strict=True))
            return scaled

        @tf.function
        def micro_step(x):
            each = distribution.run(step, args=(x,))
            return distribution.reduce("SUM", each, axis=None)

        self.assertFalse(optimizer.built)
        traced = micro_step.get_concrete_function(tf.TensorSpec((), tf.float32))
        big = 1e36  # finite, and infinite once it is scaled
        scaled = [float(traced(tf.constant(x))) for x in (1.0, big, 1.0, 3.0, 1.0)]
        # The window of the overflow is scaled alike, the next ones by half of it.
        self.assertEqual(scaled[0], INITIAL_SCALE)
        self.assertEqual(scaled[2:4], [INITIAL_SCALE / 2, 3 * INITIAL_SCALE / 2])
        # One update, with the mean of 1 and 3; then the loss follows the variable.
        self.assertAlmostEqual(float(variable.numpy()), 1.0 - 0.05 * 2.0, places=6)
        np.testing.assert_allclose(scaled[4], 0.9 * INITIAL_SCALE / 2, rtol=1e-6)
