"""The dynamic loss scale, against NumPy models, Keras's own and published numbers."""

import hypothesis
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

import keras_accum
from keras_accum import DynamicLossScale
from tests import engine, refusals, registry

GOOD, BAD = True, False
DEFAULT = tf.distribute.get_strategy()
PROPERTIES = hypothesis.settings(derandomize=True, deadline=None, max_examples=40)


def _scales(loss_scale, verdicts, strategy=DEFAULT):
    """The scale after each window."""
    scale = engine.built(loss_scale, strategy)
    return [engine.close_window(strategy, scale, verdict) for verdict in verdicts]


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


def _deepspeed_model(
    verdicts,
    initial,
    growth_interval,
    growth_factor,
    backoff_factor,
    minimum,
    maximum,
    hysteresis,
):
    """DeepSpeed's rule, as it is published, without consecutive hysteresis.

    An overflow uses up one of `hysteresis`, and the last one lowers the scale, as does
    every further one. The distance to the last overflow, in updates, is what makes the
    scale grow, and only then the hysteresis is what it was. The bounds are clipped to.
    """
    scale, left, last_overflow, scales = np.float32(initial), hysteresis, -1, []
    for iteration, is_good in enumerate(verdicts):
        if not is_good:
            last_overflow = iteration
            if left > 1:
                left -= 1
            else:
                scale = np.maximum(scale * np.float32(backoff_factor), minimum)
        elif (iteration - last_overflow) % growth_interval == 0:
            left = hysteresis
            scale = np.minimum(scale * np.float32(growth_factor), maximum)
        scale = np.float32(scale)
        scales.append(float(scale))
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


class DynamicLossScaleTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("four_infinities", 400, 2000, [BAD] * 4, 25),  # vector 32
        ("eight_good", 2, 2, [GOOD] * 8, 32),  # vector 32
        ("two_bad", 256, 2, [BAD, BAD], 64),  # vector 42
        ("two_bad_two_good", 256, 2, [BAD, BAD, GOOD, GOOD], 128),  # vector 42
        ("then_one_of_each", 128, 2, [GOOD, BAD], 64),  # vector 42
        ("all_of_it", 256, 2, [BAD, BAD, GOOD, GOOD, GOOD, BAD], 64),  # vector 42
    )
    def test_published_numbers(self, initial, growth_interval, verdicts, expected):
        scale = DynamicLossScale(initial, growth_interval)
        self.assertEqual(_scales(scale, verdicts)[-1], expected)

    @parameterized.product(strategy=["default", "mirrored"], growth_interval=[1, 3])
    def test_it_follows_the_numpy_model_and_keras(self, strategy, growth_interval):
        random = np.random.RandomState(growth_interval)
        verdicts = [bool(each) for each in random.rand(60) < 0.75]
        # Keras has no bound: none is met here.
        loss_scale = DynamicLossScale(64, growth_interval, maximum=2.0**100)
        scales = _scales(loss_scale, verdicts, registry.STRATEGIES[strategy]())
        self.assertEqual(scales, _numpy_model(64, growth_interval, verdicts))
        self.assertEqual(scales, _keras_scales(64, growth_interval, verdicts))

    def test_its_defaults_are_those_of_keras(self):
        of_keras = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        loss_scale = DynamicLossScale()
        self.assertEqual(loss_scale.initial, of_keras.initial_scale)
        self.assertEqual(loss_scale.growth_interval, of_keras.dynamic_growth_steps)

    def test_it_never_becomes_zero_and_comes_back(self):
        scales = _scales(DynamicLossScale(growth_interval=1), [BAD] * 200 + [GOOD])
        self.assertGreater(min(scales), 0)
        # Not a subnormal number either: those are flushed to zero on many devices.
        self.assertGreaterEqual(min(scales), np.finfo("float32").tiny)
        self.assertGreater(scales[-1], scales[-2])

    def test_it_never_becomes_infinite_and_comes_back(self):
        scales = _scales(DynamicLossScale(growth_interval=1), [GOOD] * 200 + [BAD])
        self.assertLess(max(scales), float("inf"))
        self.assertLess(scales[-1], scales[-2])

    @parameterized.parameters("default", "mirrored")
    def test_a_window_without_weight_changes_no_scale(self, strategy):
        # Nothing bad was in it, but no update was made of it: it counts for nothing.
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(DynamicLossScale(8, growth_interval=2), strategy)
        for is_good, expected in (
            (True, 8),
            (False, 8),
            (False, 8),
            (True, 16),
            (False, 16),
        ):
            value = engine.close_window(strategy, scale, is_clean=True, is_good=is_good)
            self.assertEqual(value, expected)

    def test_micro_steps_of_no_weight_change_no_scale(self):
        variable = keras.Variable(1.0)
        optimizer = keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(1.0), 2, loss_scale=DynamicLossScale(8, 1)
        )
        for _ in range(4):
            optimizer.apply_gradients([(tf.constant(1.0), variable)], weight=0.0)
        self.assertEqual(int(np.asarray(optimizer.iterations.numpy())), 0)
        self.assertEqual(float(optimizer.loss_scale), 8)

    def test_an_update_that_is_not_due_leaves_it(self):
        self.assertEqual(_scales(DynamicLossScale(8, 3), [GOOD] * 3), [8, 8, 16])

    def test_overflows_are_tolerated_again_only_once_the_scale_has_grown(self):
        verdicts = [BAD, GOOD, BAD, GOOD, BAD, BAD, GOOD, GOOD, BAD, BAD, BAD]
        expected = [64, 64, 64, 64, 32, 16, 16, 32, 32, 32, 16]
        loss_scale = DynamicLossScale(64, growth_interval=2, hysteresis=3)
        self.assertEqual(_scales(loss_scale, verdicts), expected)

    @parameterized.parameters("default", "mirrored")
    def test_a_scale_that_was_set_is_the_next_one_and_moved_from_there(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        scale = engine.built(DynamicLossScale(8, growth_interval=1), strategy)
        scale.request(128.0, tf.constant(True))
        self.assertEqual(float(scale.current()), 8)
        self.assertEqual(engine.close_window(strategy, scale, GOOD), 128)
        self.assertEqual(engine.close_window(strategy, scale, GOOD), 256)
        self.assertEqual(engine.close_window(strategy, scale, BAD), 128)

    def test_a_scale_out_of_its_bounds_cannot_be_set(self):
        strategy = registry.STRATEGIES["default"]()
        scale = engine.built(DynamicLossScale(8, minimum=2, maximum=64), strategy)
        for value in (1.0, 128.0):
            with self.assertRaisesRegex(ValueError, f"loss_scale={value}, minimum=2"):
                scale.request(value, tf.constant(False))
        self.assertEqual(float(scale.current()), 8)

    def test_a_scale_from_a_file_of_other_bounds_comes_inside(self):
        strategy = registry.STRATEGIES["default"]()
        scale = DynamicLossScale(512, minimum=256, maximum=1024)
        scale = engine.built(scale, strategy)
        for loaded, verdict, expected in (
            (16.0, BAD, 256),
            (2.0**20, GOOD, 1024),
            (2.0**20, BAD, 512),
        ):
            scale.value.assign(loaded)
            scale.next_value.assign(loaded)
            self.assertEqual(engine.close_window(strategy, scale, verdict), expected)


class PropertyTest(parameterized.TestCase):
    @PROPERTIES
    @hypothesis.given(
        verdicts=st.lists(st.integers(0, 3).map(bool), min_size=1, max_size=40),
        initial=st.sampled_from([3.0, 1024.0, 2.0**15]),
        growth_interval=st.integers(1, 4),
        growth_factor=st.sampled_from([1.5, 2.0, 2.0**10]),
        backoff_factor=st.sampled_from([0.3, 0.5, 2.0**-9]),
        minimum=st.sampled_from([2.0**-14, 1.0, 3.0]),
        maximum=st.sampled_from([2.0**15, 2.0**24, 2.0**100]),
        hysteresis=st.integers(1, 4),
    )
    def test_it_follows_deepspeed_within_its_bounds(self, verdicts, **arguments):
        scales = _scales(DynamicLossScale(**arguments), verdicts)
        self.assertEqual(scales, _deepspeed_model(verdicts, **arguments))
        self.assertGreaterEqual(min(scales), arguments["minimum"])
        self.assertLessEqual(max(scales), arguments["maximum"])

    @PROPERTIES
    @hypothesis.given(
        verdicts=st.lists(st.booleans(), max_size=20),
        growth_interval=st.integers(1, 3),
        hysteresis=st.integers(1, 3),
    )
    def test_it_comes_back_from_both_ends(self, verdicts, growth_interval, hysteresis):
        scales = _scales(
            DynamicLossScale(
                8.0, growth_interval, minimum=2.0, maximum=32.0, hysteresis=hysteresis
            ),
            # To the bottom, to the top, down again.
            [*verdicts, *[BAD] * 8, *[GOOD] * 5 * growth_interval, *[BAD] * hysteresis],
        )
        up = len(verdicts) + 8
        down = up + 5 * growth_interval
        self.assertEqual(scales[up - 1], 2)
        self.assertEqual(scales[down - 1], 32)
        self.assertEqual(scales[-1], 16)


class RefusedTest(refusals.RefusalCase):
    def test_counts_that_are_no_integers_of_at_least_one(self):
        for name in ("growth_interval", "hysteresis"):
            for value in (0, -1, 2.0, True, "2", None):
                self.assert_refused(
                    ValueError,
                    lambda n=name, v=value: DynamicLossScale(**{n: v}),
                    f"`{name}` must be an integer >= 1",
                    f"{name}={value!r}",
                    "Use 1 for every one",
                )

    def test_numbers_that_are_not_finite_and_above_zero(self):
        names = ("initial", "growth_factor", "backoff_factor", "minimum", "maximum")
        for name in names:
            for error, value in (
                (ValueError, 0),
                (ValueError, -1.0),
                (ValueError, float("inf")),
                (ValueError, float("nan")),
                (TypeError, "2"),
                (TypeError, True),
                (TypeError, None),
            ):
                self.assert_refused(
                    error,
                    lambda n=name, v=value: DynamicLossScale(**{n: v}),
                    f"`{name}` must be a finite number > 0",
                    f"{name}={value!r}",
                )

    def test_bounds_that_float32_cannot_hold(self):
        # A maximum of 1e39 is infinite there, and a minimum of 1e-46 is zero.
        for name, value in (("maximum", 1e39), ("minimum", 1e-46)):
            with self.subTest(name=name):
                self.assert_refused(
                    ValueError,
                    lambda n=name, v=value: DynamicLossScale(**{n: v}),
                    f"`{name}` must be a finite number > 0",
                    f"{name}={value!r}",
                )

    def test_a_growth_that_does_not_grow(self):
        for value in (1.0, 0.5, 1):
            self.assert_refused(
                ValueError,
                lambda v=value: DynamicLossScale(growth_factor=v),
                "`growth_factor` must be > 1",
                f"growth_factor={value}",
                "Use 2.0",
            )

    def test_a_backoff_that_does_not_shrink(self):
        for value in (1.0, 2.0):
            self.assert_refused(
                ValueError,
                lambda v=value: DynamicLossScale(backoff_factor=v),
                "`backoff_factor` must be < 1",
                f"backoff_factor={value}",
                "Use 0.5",
            )

    def test_an_initial_scale_outside_of_its_bounds(self):
        for initial, minimum, maximum in (
            (1.0, 2.0, 4.0),
            (8.0, 2.0, 4.0),
            (3, 4, 2),
        ):
            self.assert_refused(
                ValueError,
                lambda i=initial, low=minimum, high=maximum: DynamicLossScale(
                    i, minimum=low, maximum=high
                ),
                "`initial` must lie between `minimum` and `maximum`",
                f"initial={initial}, minimum={minimum}, maximum={maximum}",
                "Start inside the bounds",
            )

    def test_the_bounds_themselves_are_inside(self):
        for initial in (2.0, 4.0):
            loss_scale = DynamicLossScale(initial, minimum=2.0, maximum=4.0)
            self.assertEqual(loss_scale.initial, initial)
