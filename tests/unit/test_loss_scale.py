"""Loss scales, against a NumPy model, Keras's own optimizer and published numbers."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.loss_scale import DynamicLossScale, LossScale
from tests import engine, registry

GOOD, BAD = True, False


class ScaleCase(parameterized.TestCase):
    def _make(self, loss_scale, strategy="default", growth_interval=None):
        self.strategy = registry.STRATEGIES[strategy]()
        self.loss_scale = loss_scale
        if growth_interval is not None:
            loss_scale.growth_interval = growth_interval
        with self.strategy.scope():
            loss_scale.build(engine.new_variable)

    def _value(self):
        values = engine.copies(self.strategy, self.loss_scale.value)
        self.assertLen({float(value) for value in values}, 1)
        return float(values[0])

    def _close(self, verdict):
        """Closes a window; returns the scale that the next one has."""
        if verdict:
            engine.on_replicas(self.strategy, self.loss_scale.record_update)
        else:
            self._skip(is_finite=False)
        return self._value()

    def _skip(self, is_finite):
        engine.on_replicas(
            self.strategy,
            lambda: self.loss_scale.record_skip(tf.constant(is_finite)),
        )


def _numpy_model(initial, growth_interval, verdicts):
    """The rule of dynamic loss scaling: the scales after each window."""
    scale, good, scales = initial, 0, []
    for verdict in verdicts:
        good = good + 1 if verdict else 0
        if not verdict:
            scale /= 2
        elif good == growth_interval:
            scale, good = scale * 2, 0
        scales.append(scale)
    return scales


def _keras_scales(initial, growth_interval, verdicts):
    """What Keras's own optimizer has for its scale after each step."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0),
        initial_scale=initial,
        dynamic_growth_steps=growth_interval,
    )
    variable = keras.Variable(0.0)
    optimizer.build([variable])
    scales = []
    for verdict in verdicts:
        gradient = tf.constant(1.0 if verdict else float("inf"))
        optimizer.apply_gradients([(gradient, variable)])
        scales.append(float(optimizer.dynamic_scale.numpy()))
    return scales


class DynamicLossScaleTest(ScaleCase):
    @parameterized.named_parameters(
        ("four_infinities", 400, 2000, [BAD] * 4, 25),  # vector 32
        ("eight_good", 2, 2, [GOOD] * 8, 32),  # vector 32
        ("two_bad", 256, 2, [BAD, BAD], 64),  # vector 42
        ("two_bad_two_good", 256, 2, [BAD, BAD, GOOD, GOOD], 128),  # vector 42
        ("then_one_of_each", 128, 2, [GOOD, BAD], 64),  # vector 42
    )
    def test_published_numbers(self, initial, growth_interval, verdicts, expected):
        self._make(DynamicLossScale(initial), growth_interval=growth_interval)
        for verdict in verdicts:
            self._close(verdict)
        self.assertEqual(self._value(), expected)

    @parameterized.product(strategy=["default", "mirrored"], growth_interval=[1, 3])
    def test_it_follows_the_numpy_model_and_keras(self, strategy, growth_interval):
        random = np.random.RandomState(growth_interval)
        verdicts = [bool(each) for each in random.rand(60) < 0.75]
        self._make(DynamicLossScale(64), strategy, growth_interval)
        scales = [self._close(verdict) for verdict in verdicts]
        self.assertEqual(scales, _numpy_model(64, growth_interval, verdicts))
        self.assertEqual(scales, _keras_scales(64, growth_interval, verdicts))

    def test_its_defaults_are_those_of_keras(self):
        self._make(DynamicLossScale())
        of_keras = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        self.assertEqual(self._value(), of_keras.initial_scale)
        self.assertEqual(self.loss_scale.growth_interval, of_keras.dynamic_growth_steps)

    def test_it_never_becomes_zero_and_comes_back(self):
        self._make(DynamicLossScale(2.0**-100), growth_interval=1)
        scales = [self._close(BAD) for _ in range(80)]
        self.assertGreater(min(scales), 0)
        # Not a subnormal number either: those are flushed to zero on many devices.
        self.assertGreaterEqual(min(scales), np.finfo("float32").tiny)
        self.assertGreater(self._close(GOOD), scales[-1])

    def test_it_never_becomes_infinite_and_comes_back(self):
        self._make(DynamicLossScale(2.0**100), growth_interval=1)
        scales = [self._close(GOOD) for _ in range(80)]
        self.assertLess(max(scales), float("inf"))
        self.assertLess(self._close(BAD), scales[-1])

    def test_a_window_without_weight_changes_no_scale(self):
        self._make(DynamicLossScale(8), growth_interval=100)
        self._skip(is_finite=True)
        self.assertEqual(self._value(), 8)

    def test_an_update_that_is_not_due_leaves_it(self):
        self._make(DynamicLossScale(8), growth_interval=3)
        self.assertEqual([self._close(GOOD) for _ in range(3)], [8, 8, 16])

    def test_its_config_names_it(self):
        self.assertEqual(DynamicLossScale().get_config(), "dynamic")


class StaticLossScaleTest(ScaleCase):
    def test_it_stays_as_it_is(self):
        self._make(LossScale(1024))
        self.assertEqual({self._close(v) for v in (GOOD, BAD, BAD, GOOD)}, {1024})

    def test_its_config_is_its_value(self):
        self.assertEqual(LossScale(1024).get_config(), 1024.0)


class ScaleTest(ScaleCase):
    @parameterized.parameters(
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    )
    def test_a_loss_is_scaled_in_float32_at_least(self, dtype, expected):
        # 4 x 2**15 is infinite in float16.
        self._make(DynamicLossScale())
        scaled = self.loss_scale.scale(tf.constant(4.0, dtype))
        self.assertEqual(scaled.dtype, expected)
        self.assertEqual(float(scaled), 4 * 2**15)

    def test_a_number_is_scaled_too(self):
        self._make(LossScale(3))
        self.assertEqual(float(self.loss_scale.scale(2.0)), 6)

    def test_a_traced_step_sees_the_scale_of_its_day(self):
        self._make(DynamicLossScale(8))
        scale = tf.function(self.loss_scale.scale)
        self.assertEqual(float(scale(tf.constant(1.0))), 8)
        self._close(BAD)
        self.assertEqual(float(scale(tf.constant(1.0))), 4)
