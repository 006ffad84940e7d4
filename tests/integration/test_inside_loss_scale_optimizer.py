"""The mixin inside Keras's LossScaleOptimizer, as `compile` puts it there.

Keras's optimizer scales then, and judges every micro step by its local gradients. What
is expected comes from a plain optimizer in the same place, on the large batch.
"""

import json
import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import LossScaleScheduler
from tests import registry, tolerances, training
from tests.integration import saving, stepping

STEPS = 2
RATE = 0.05
ROWS = training.ROWS
WINDOW = STEPS * ROWS
EXACT = tolerances.BY_DTYPE["float32"]
GIVES_UP = "auto_scale_loss=False"

# Every loss scale that a mixin can have of its own.
OWN_SCALES = {
    "static": lambda: 8.0,
    "dynamic": lambda: "dynamic",
    "scheduled": lambda: keras_accum.ScheduledLossScale(
        lambda updates: 2.0 ** (3.0 + tf.cast(updates, tf.float32))
    ),
    "automatic": lambda: keras_accum.AutomaticLossScale(8.0, period=1),
}


def momentum():
    return keras.optimizers.SGD(RATE, momentum=0.9)


def mixin(loss_scale=None):
    return stepping.AccumulatingSGD(
        RATE, momentum=0.9, accumulation_steps=STEPS, loss_scale=loss_scale
    )


def inside(optimizer, **arguments):
    """Keras's optimizer around one; 3 finite micro steps let its scale grow."""
    arguments = {"initial_scale": 64.0, "dynamic_growth_steps": 3, **arguments}
    return keras.optimizers.LossScaleOptimizer(optimizer, **arguments)


def network(optimizer, strategy="default", **arguments):
    with registry.STRATEGIES[strategy]().scope():
        return training.network(optimizer(), **arguments)


def fit(model, x, y, rows_per_step):
    """Fits in order; returns the logged loss."""
    data = training.batches(x, y, rows_per_step)
    return model.fit(data, shuffle=False, verbose=0).history["loss"]


def number(variable):
    return float(training.numbers(variable))


def quietly_given_up(function):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"(?s).*{GIVES_UP}")
        return function()


class AsTheLargeBatchTest(parameterized.TestCase):
    @parameterized.parameters("graph", "eager")
    def test_in_float32_while_the_scale_grows_inside_windows(self, mode):
        x, y = training.rows(6 * WINDOW)
        expected = network(lambda: inside(momentum()))
        loss = fit(expected, x, y, WINDOW)
        model = network(lambda: inside(mixin()), **registry.MODES[mode])
        np.testing.assert_allclose(fit(model, x, y, ROWS), loss, EXACT.rtol)
        surrounding = model.optimizer
        training.assert_same_variables(model.variables, expected.variables, EXACT)
        plain = expected.optimizer.inner_optimizer.variables
        training.assert_same_variables(
            surrounding.inner_optimizer.variables[: len(plain)], plain, EXACT
        )
        # Keras counts micro steps, of which 12 are four times 3; the mixin updates.
        self.assertEqual(number(surrounding.dynamic_scale), 64.0 * 2**4)
        self.assertEqual(number(surrounding.iterations), 6)

    @parameterized.parameters("graph", "eager")
    def test_under_mixed_float16_where_compile_puts_it(self, mode):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        x, y = training.rows(6 * WINDOW)
        expected = network(momentum)
        loss = fit(expected, x, y, WINDOW)
        with self.assertWarnsRegex(UserWarning, GIVES_UP):
            model = network(mixin, **registry.MODES[mode])
        for each in (model, expected):
            kind = keras.optimizers.LossScaleOptimizer
            self.assertIs(type(each.optimizer), kind)
        tolerance = tolerances.BY_DTYPE["float16"]
        np.testing.assert_allclose(fit(model, x, y, ROWS), loss, tolerance.rtol)
        training.assert_same_variables(model.variables, expected.variables, tolerance)
        self.assertEqual(number(model.optimizer.dynamic_scale), 2.0**15)
        self.assertEqual(number(model.optimizer.iterations), 6)


class GivesUpItsScaleTest(parameterized.TestCase):
    @parameterized.parameters(*OWN_SCALES)
    def test_it_says_so_and_gradients_are_unscaled_once(self, name):
        optimizer = mixin(OWN_SCALES[name]())
        with self.assertWarnsRegex(UserWarning, GIVES_UP):
            surrounding = inside(optimizer)
        self.assert_scaled_once(surrounding, keras.Variable(1.0))

    @parameterized.parameters(*OWN_SCALES)
    def test_it_does_so_after_it_was_built(self, name):
        optimizer, variable = mixin(OWN_SCALES[name]()), keras.Variable(1.0)
        optimizer.build([variable])
        with self.assertWarnsRegex(UserWarning, GIVES_UP):
            surrounding = inside(optimizer)
        self.assert_scaled_once(surrounding, variable)

    def assert_scaled_once(self, surrounding, variable):
        """Takes one window by hand; the scale grows after it."""
        optimizer = surrounding.inner_optimizer
        surrounding.build([variable])
        for gradient in (3.0, 5.0):
            scaled = surrounding.scale_loss(tf.constant(gradient))
            self.assertEqual(float(scaled), gradient * 64.0)
            surrounding.apply_gradients([(scaled, variable)])
        np.testing.assert_allclose(variable.numpy(), 1.0 - RATE * 4.0, rtol=1e-6)
        self.assertEqual(float(optimizer.loss_scale), 1.0)
        loss = tf.constant(3.0)
        self.assertEqual(float(optimizer.scale_loss(loss)), 3.0)
        with self.assertRaisesRegex(ValueError, GIVES_UP):
            optimizer.loss_scale = 4.0

    def test_what_comes_back_from_its_config_has_nothing_to_give_up(self):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        with self.assertWarnsRegex(UserWarning, GIVES_UP):
            surrounding = inside(mixin())
        serialized = json.loads(json.dumps(keras.optimizers.serialize(surrounding)))
        again = keras.optimizers.deserialize(serialized)  # a warning is an error
        self.assertEqual(again.get_config(), surrounding.get_config())
        self.assert_scaled_once(again, keras.Variable(1.0))


class OverflowTest(parameterized.TestCase):
    """Keras drops a micro step whose local gradients are not finite.

    The mixin does not see it: the window stays open, and the next finite micro step
    takes the place of the one that was dropped.
    """

    @parameterized.product(mode=["graph", "eager"], bad_step=[2, 3])
    def test_the_window_is_filled_by_the_next_finite_micro_step(self, mode, bad_step):
        x, y = training.rows(7 * ROWS)
        bad = range(bad_step * ROWS, (bad_step + 1) * ROWS)
        expected = network(lambda: inside(momentum()))
        fit(expected, np.delete(x, bad, axis=0), np.delete(y, bad, axis=0), WINDOW)
        x[bad.start, 0] = np.inf
        model = network(
            lambda: inside(mixin(), dynamic_growth_steps=100), **registry.MODES[mode]
        )
        surrounding = model.optimizer
        optimizer = surrounding.inner_optimizer
        end = bad.stop  # of the micro step that is dropped
        fit(model, x[:end], y[:end], ROWS)
        self.assertEqual(int(optimizer.position), bad_step % STEPS)
        self.assertEqual(number(surrounding.dynamic_scale), 32.0)
        fit(model, x[end:], y[end:], ROWS)
        training.assert_same_variables(model.variables, expected.variables, EXACT)
        self.assertEqual(int(optimizer.position), 0)
        self.assertEqual(number(optimizer.iterations), 3)
        # What it did not see it did not count.
        self.assertEqual(int(optimizer.skipped_windows), 0)
        self.assertEqual(number(surrounding.dynamic_scale), 32.0)


class SavedTest(saving.TestCase):
    @parameterized.parameters("keras", "weights", "checkpoint")
    def test_an_open_window_is_finished_by_the_restored_one(self, file_format):
        """Of a mixin that had a scale of its own until it was put inside."""

        def optimizer():
            scaled = mixin("dynamic")
            return quietly_given_up(lambda: inside(scaled, dynamic_growth_steps=1))

        steps = stepping.gradients(STEPS)
        model = stepping.layered("default", optimizer)
        stepping.micro_step(model, "default", steps[0], scale=64.0)
        suffix = saving.SUFFIXES[file_format]
        path = saving.save(model, self.path(f"open{suffix}"))
        model = saving.restore(path, "default", optimizer)
        self.assertEqual(number(model.optimizer.dynamic_scale), 128.0)
        stepping.micro_step(model, "default", steps[1], scale=128.0)
        expected = stepping.layered("default", momentum)
        stepping.apply_plain(expected, stepping.window_mean(steps))
        training.assert_same_variables(model.variables, expected.variables, EXACT)


class RefusedTest(parameterized.TestCase):
    @parameterized.parameters("epoch", "update")
    def test_the_loss_scale_scheduler_says_who_owns_the_scale(self, by):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        model = quietly_given_up(lambda: network(mixin))
        before = model.get_weights()
        owner = "Received: a LossScaleOptimizer of Keras, which owns the scale"
        with self.assertRaisesRegex(ValueError, f"(?s){owner}.*{GIVES_UP}"):
            model.fit(
                *training.rows(ROWS),
                callbacks=[LossScaleScheduler({0: 8.0}, by=by)],
                verbose=0,
            )
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)

    @parameterized.product(
        strategy=["default", "mirrored"], policy=["float32", "mixed_float16"]
    )
    def test_one_around_the_wrapper_is_refused_and_leaves_it_whole(
        self, strategy, policy
    ):
        keras.mixed_precision.set_dtype_policy(policy)
        with registry.STRATEGIES[strategy]().scope():
            wrapper = keras_accum.AccumulationOptimizer(
                momentum(), STEPS, loss_scale="dynamic"
            )
            for _ in range(2):
                with self.assertRaisesRegex(ValueError, "Put it outermost"):
                    inside(wrapper)
            self.assertEqual(float(wrapper.loss_scale), 2.0**15)
            self.assertEqual(float(wrapper.scale_loss(tf.constant(1.0))), 2.0**15)
            model = training.network(wrapper)
        self.assertIs(model.optimizer, wrapper)


class AutoScaleLossFalseTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        dtype=["float16", "bfloat16"],
        scale=["static", "dynamic", "scheduled", "automatic"],
    )
    def test_the_mixin_scales_by_itself(self, strategy, dtype, scale):
        keras.mixed_precision.set_dtype_policy(f"mixed_{dtype}")
        x, y = training.rows(6 * WINDOW)
        expected = network(momentum)
        loss = fit(expected, x, y, WINDOW)
        model = network(
            lambda: mixin(OWN_SCALES[scale]()), strategy, auto_scale_loss=False
        )
        self.assertIs(type(model.optimizer), stepping.AccumulatingSGD)
        tolerance = tolerances.BY_DTYPE[dtype]
        np.testing.assert_allclose(fit(model, x, y, ROWS), loss, tolerance.rtol)
        training.assert_same_variables(model.variables, expected.variables, tolerance)
        after = {
            "static": 8.0,
            "dynamic": 2.0**15,
            "scheduled": 2.0 ** (3 + 6),  # of 6 updates
            "automatic": 2.0 ** (3 + 6),  # doubled by each: nothing is near the edge
        }
        self.assertEqual(float(model.optimizer.loss_scale), after[scale])
        self.assertEqual(number(model.optimizer.iterations), 6)
