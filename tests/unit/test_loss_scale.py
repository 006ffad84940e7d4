"""Loss scales: what they multiply and divide, when they are set, what they refuse."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import loss_scale
from keras_accum.loss_scale import LossScale, NoLossScale
from tests import engine, refusals, registry
from tests.unit.test_arguments import make

DEFAULT = tf.distribute.get_strategy()
NOT_A_SCALE = (
    (ValueError, 0),
    (ValueError, -2.0),
    (ValueError, float("inf")),
    (ValueError, float("nan")),
    # Neither is one in float32, where the scale lives.
    (ValueError, 1e39),
    (ValueError, 1e-46),
    (TypeError, True),
    (TypeError, "8"),
    (TypeError, None),
    (TypeError, [8.0, 8.0]),
)


class StaticLossScaleTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_it_stays_as_it_is(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(LossScale(1024), strategy)
        for is_clean in (True, False, False, True):
            self.assertEqual(engine.close_window(strategy, scale, is_clean), 1024)

    def test_its_config_is_its_arguments(self):
        config = LossScale(1024).get_config()
        self.assertEqual(config, {"initial": 1024.0, "unscaled": None})

    @parameterized.parameters("default", "mirrored")
    def test_it_waits_while_the_window_is_open(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(LossScale(4), strategy)
        scale.request(8.0, tf.constant(True))
        scale.request(16.0, tf.constant(True))
        self.assertEqual(float(scale.current()), 4)
        self.assertEqual(engine.close_window(strategy, scale), 16)

    @parameterized.parameters("default", "mirrored")
    def test_it_is_taken_at_once_by_an_empty_window(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(LossScale(4), strategy)
        scale.request(8.0, tf.constant(False))
        self.assertEqual(float(scale.current()), 8)
        self.assertEqual(engine.close_window(strategy, scale), 8)


class NoLossScaleTest(refusals.RefusalCase):
    def test_it_multiplies_and_divides_nothing(self):
        scale = engine.built(NoLossScale(), DEFAULT)
        loss, divisor = tf.constant(3.0, tf.float16), tf.constant(4.0)
        variable = tf.Variable(1.0)
        self.assertIs(scale.scale(loss), loss)
        self.assertIs(scale.divisor(variable, divisor), divisor)
        self.assertIsNone(scale.divisor(variable, None))
        self.assertEqual(float(scale.current()), 1)
        self.assertEqual(scale.observed(), {})

    def test_it_cannot_be_set(self):
        scale = engine.built(NoLossScale(), DEFAULT)
        self.assert_refused(
            ValueError,
            lambda: scale.request(8.0, tf.constant(False)),
            "`loss_scale` can be set on an optimizer that was constructed with one",
            "loss_scale=8.0",
            "Construct the optimizer with loss_scale=8.0",
        )


class ScaleTest(parameterized.TestCase):
    @parameterized.parameters(
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    )
    def test_a_loss_is_scaled_in_float32_at_least(self, dtype, expected):
        # 4 x 2**15 is infinite in float16.
        scale = engine.built(keras_accum.DynamicLossScale(), DEFAULT)
        scaled = scale.scale(tf.constant(4.0, dtype))
        self.assertEqual(scaled.dtype, expected)
        self.assertEqual(float(scaled), 4 * 2**15)

    def test_a_number_is_scaled_too(self):
        self.assertEqual(float(engine.built(LossScale(3), DEFAULT).scale(2.0)), 6)

    def test_a_traced_step_sees_the_scale_of_its_day(self):
        scale = engine.built(keras_accum.DynamicLossScale(8), DEFAULT)
        traced = tf.function(scale.scale)
        self.assertEqual(float(traced(tf.constant(1.0))), 8)
        engine.close_window(DEFAULT, scale, is_clean=False)
        self.assertEqual(float(traced(tf.constant(1.0))), 4)


class UnscaledTest(refusals.RefusalCase):
    # Paths as Keras makes them, and whether their gradients carry the scale.
    NAMES = (
        ("dense/kernel", True),
        ("batch_normalization/gamma", True),
        ("batch_normalization/moving_mean", False),
        ("batch_normalization/moving_variance", False),
        ("batch_norm/moving_average", False),  # the original's name, vector 18
        ("removing/kernel", True),
    )

    def test_statistics_are_left_alone(self):
        scale = engine.built(LossScale(8), DEFAULT)
        for name, is_scaled in self.NAMES:
            variable = tf.Variable(1.0, name=name)
            divisors = (scale.divisor(variable, d) for d in (tf.constant(4.0), None))
            expected = (32, 8) if is_scaled else (4, None)
            for divisor, number in zip(divisors, expected, strict=True):
                self.assertEqual(None if divisor is None else float(divisor), number)

    def test_those_of_a_batch_normalization_of_keras(self):
        layer = keras.layers.BatchNormalization()
        layer.build((None, 2))
        scale = engine.built(LossScale(8), DEFAULT)
        unscaled = {v.name for v in layer.variables if not scale.is_scaled(v)}
        self.assertEqual(unscaled, {"moving_mean", "moving_variance"})

    def test_a_callable_chooses_others(self):
        scale = engine.built(
            LossScale(8, unscaled=lambda variable: "gate" in variable.name), DEFAULT
        )
        gate, mean = tf.Variable(1.0, name="gate"), tf.Variable(1.0, name="moving_mean")
        self.assertFalse(scale.is_scaled(gate))
        self.assertTrue(scale.is_scaled(mean))

    def test_what_is_overwritten_with_its_gradient_is_left_alone(self):
        for unscaled in (None, lambda _: False):
            scale = engine.built(LossScale(8, unscaled), DEFAULT)
            variable = keras.Variable(1.0)
            variable.overwrite_with_gradient = True
            self.assertFalse(scale.is_scaled(variable))

    def test_what_is_not_callable_is_refused(self):
        classes = (
            lambda unscaled: keras_accum.DynamicLossScale(unscaled=unscaled),
            lambda unscaled: keras_accum.AutomaticLossScale(unscaled=unscaled),
            lambda unscaled: keras_accum.ScheduledLossScale(lambda _: 8, unscaled),
        )
        for make_scale in classes:
            for value in ("moving_mean", ["moving_mean"], True):
                self.assert_refused(
                    TypeError,
                    lambda m=make_scale, v=value: m(v),
                    "`unscaled` must be None or a callable that takes a variable",
                    f"unscaled={value!r}",
                )


class CheckedScaleTest(refusals.RefusalCase):
    def test_what_is_no_finite_number_above_zero_is_refused(self):
        for error, value in NOT_A_SCALE:
            with self.subTest(value=value):
                self.assert_refused(
                    error,
                    lambda v=value: loss_scale.checked_scale("factor", v),
                    "`factor` must be a finite number > 0",
                    f"factor={value!r}",
                )

    @parameterized.parameters(8, 8.0, np.float32(8), np.int64(8), 2.0**-20)
    def test_numbers_are_floats(self, value):
        number = loss_scale.checked_scale("factor", value)
        self.assertIs(type(number), float)
        self.assertEqual(number, value)


class ScheduledLossScaleTest(refusals.RefusalCase):
    @parameterized.parameters("default", "mirrored")
    def test_it_is_a_function_of_the_updates(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(
            keras_accum.ScheduledLossScale(lambda updates: 8 * (updates + 1)), strategy
        )
        self.assertEqual(float(scale.current()), 8)
        # A window that is skipped makes no update, and leaves the scale.
        for is_clean, updates, expected in (
            (True, 1, 16),
            (False, 1, 16),
            (True, 2, 24),
            (True, 9, 80),
        ):
            value = engine.close_window(strategy, scale, is_clean, updates=updates)
            self.assertEqual(value, expected)

    def test_a_schedule_of_keras_sees_updates(self):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
            [2, 4], [64.0, 16.0, 4.0]
        )
        scale = engine.built(keras_accum.ScheduledLossScale(schedule), DEFAULT)
        values = [engine.close_window(DEFAULT, scale, updates=k) for k in range(1, 7)]
        self.assertEqual(values, [64, 64, 16, 16, 4, 4])

    def test_a_schedule_of_python_numbers_and_of_other_dtypes(self):
        for schedule in (lambda _: 8, lambda _: 8.0, lambda _: tf.constant(8)):
            scale = engine.built(keras_accum.ScheduledLossScale(schedule), DEFAULT)
            self.assertEqual(float(scale.current()), 8)
            self.assertEqual(engine.close_window(DEFAULT, scale, updates=1), 8)

    def test_what_is_not_callable_is_refused(self):
        for value in (8.0, {0: 8.0}, [8.0], None, "cosine"):
            self.assert_refused(
                TypeError,
                lambda v=value: keras_accum.ScheduledLossScale(v),
                "`schedule` must be a LearningRateSchedule or a callable",
                f"schedule={value!r}",
                "For a scale that stays, pass a number as loss_scale",
            )

    @parameterized.parameters(0.0, -1.0, float("inf"), float("nan"))
    def test_a_first_scale_that_is_none_is_refused(self, value):
        self.assert_refused(
            ValueError,
            lambda: keras_accum.ScheduledLossScale(lambda _: value),
            "a scalar, a finite number > 0",
            f"returned {value} for 0 updates",
        )

    def test_a_schedule_that_cannot_be_traced_is_named(self):
        def by_branch(updates):
            return 1024.0 if updates < 3 else 2048.0

        for schedule, received in (
            (by_branch, "by_branch"),
            (lambda _: None, "raised ValueError"),
            (lambda: 1.0, "raised TypeError"),
            (lambda _: [1.0, 2.0], "returned [1. 2.]"),
        ):
            self.assert_refused(
                ValueError,
                lambda s=schedule: keras_accum.ScheduledLossScale(s),
                "by TensorFlow or Keras operations",
                received,
            )

    def test_a_scale_that_is_none_is_passed_over(self):
        scales = [8.0, 4.0, 0.0, float("inf"), float("nan"), -1.0, 2.0]
        value = keras_accum.ScheduledLossScale(
            lambda updates: tf.gather(tf.constant(scales), updates)
        )
        optimizer = make("wrapper", 1, loss_scale=value)
        variable = keras.Variable(0.0)
        optimizer.build([variable])
        seen = []
        for _ in range(6):
            loss = optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply_gradients([(loss, variable)])
            seen.append(float(optimizer.loss_scale))
        self.assertEqual(seen, [4, 4, 4, 4, 4, 2])
        self.assertEqual(float(variable.numpy()), -6)

    def test_it_cannot_be_set(self):
        value = keras_accum.ScheduledLossScale(lambda _: 8.0)
        optimizer = make("wrapper", 2, loss_scale=value)
        self.assert_refused(
            ValueError,
            lambda: setattr(optimizer, "loss_scale", 4.0),
            "`loss_scale` cannot be set while it follows a schedule",
            "loss_scale=4.0",
            "Construct it with a number",
        )


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class SetterTest(refusals.RefusalCase):
    """`optimizer.loss_scale = ...`"""

    def _step(self, optimizer):
        loss = optimizer.scale_loss(tf.constant(1.0))  # the gradient of a variable
        optimizer.apply_gradients([(loss, self.variable)])

    def _built(self, surface, **options):
        self.variable = keras.Variable(0.0)
        optimizer = make(surface, loss_scale=8, **options)
        optimizer.build([self.variable])
        return optimizer

    def test_what_is_no_scale_is_refused(self, surface):
        optimizer = self._built(surface)
        for error, value in NOT_A_SCALE:
            with self.subTest(value=value):
                self.assert_refused(
                    error,
                    lambda v=value: setattr(optimizer, "loss_scale", v),
                    "`loss_scale` must be a finite number > 0",
                    f"loss_scale={value!r}",
                )
        self.assertEqual(float(optimizer.loss_scale), 8)

    def test_without_a_scale_it_cannot_be_set(self, surface):
        optimizer = make(surface)
        self.assert_refused(
            ValueError,
            lambda: setattr(optimizer, "loss_scale", 8.0),
            "`loss_scale` can be set on an optimizer that was constructed with one",
            "loss_scale=8.0",
            "Construct the optimizer with loss_scale=8.0",
        )

    def test_a_window_that_is_open_keeps_its_scale(self, surface):
        optimizer = self._built(surface)
        self._step(optimizer)
        optimizer.loss_scale = 32
        self.assertEqual(float(optimizer.loss_scale), 8)
        self._step(optimizer)
        self.assertEqual(float(optimizer.loss_scale), 32)
        self.assertEqual(float(self.variable.numpy()), -1)
        self._step(optimizer)
        self._step(optimizer)
        self.assertEqual(float(self.variable.numpy()), -2)

    def test_a_window_that_is_dropped_keeps_it_no_longer(self, surface):
        optimizer = self._built(surface)
        self._step(optimizer)
        optimizer.loss_scale = 32
        optimizer.reset()
        self.assertEqual(float(optimizer.loss_scale), 32)

    def test_a_window_that_is_flushed_keeps_it_no_longer(self, surface):
        optimizer = self._built(surface)
        self._step(optimizer)
        optimizer.loss_scale = 32
        optimizer.flush()
        self.assertEqual(float(optimizer.loss_scale), 32)
        self.assertEqual(float(self.variable.numpy()), -1)
