"""The loss scale's scheduler in `fit`: the compiled step follows, untraced.

Whether the scale is in use shows in what overflows: 1e30 times 2**40 does, and is
skipped; 1e30 times 2**4 does not.
"""

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import LossScaleScheduler
from tests import registry, tolerances, training

STEPS = 2
WINDOWS = 2  # of an epoch
LOW, HIGH = 2.0**4, 2.0**40


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def scaled(**arguments):
    arguments = {"loss_scale": 2.0, **arguments}
    return keras_accum.AccumulationOptimizer(momentum(), STEPS, **arguments)


class Recorder(keras.callbacks.Callback):
    """What stands after each batch and epoch."""

    def __init__(self):
        super().__init__()
        self.skipped, self.scales, self.traces = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.scales.append(float(self.model.optimizer.loss_scale))

    def on_epoch_end(self, epoch, logs=None):
        self.skipped.append(int(self.model.optimizer.skipped_windows))
        self.traces.append(getattr(self.model, "traces", None))


class Traced(keras.Model):
    """One weight per feature, the loss linear in it: its gradient is the input."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.traces = 0

    def call(self, inputs):
        self.traces += 1
        return self.dense(inputs)


def linear(optimizer, strategy):
    """A compiled `Traced`, and a dataset of an epoch whose gradients are large."""
    with registry.STRATEGIES[strategy]().scope():
        model = Traced()
        model.compile(optimizer(), loss=lambda y_true, y_pred: y_pred)
    x = np.full((WINDOWS * STEPS * training.ROWS, 2), 1e30, "float32")
    x[:, 1] = 1.0
    return model, training.batches(x, np.zeros((len(x), 1)), training.ROWS)


def fit(model, rows, scheduler, epochs, **arguments):
    recorder = Recorder()
    history = model.fit(
        rows,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[scheduler, recorder],
        **arguments,
    )
    return recorder, history.history


@parameterized.parameters("default", "mirrored")
class InFitTest(parameterized.TestCase):
    def test_each_epoch_has_its_scale_without_another_trace(self, strategy):
        model, rows = linear(scaled, strategy)
        scheduler = LossScaleScheduler({0: LOW, 1: HIGH, 2: 2.0, 3: HIGH})
        recorder, history = fit(model, rows, scheduler, epochs=4)
        self.assertEqual(recorder.skipped, [0, WINDOWS, WINDOWS, 2 * WINDOWS])
        self.assertEqual(history["loss_scale"], [LOW, HIGH, 2.0, HIGH])
        self.assertLen(set(recorder.traces), 1)
        iterations = training.numbers(model.optimizer.iterations)
        self.assertEqual(int(iterations), 2 * WINDOWS)

    def test_a_function_of_the_epoch_and_the_scale(self, strategy):
        model, rows = linear(scaled, strategy)
        scheduler = LossScaleScheduler(lambda epoch, scale: scale * (HIGH, 1)[epoch])
        recorder, history = fit(model, rows, scheduler, epochs=2)
        self.assertEqual(history["loss_scale"], [2 * HIGH] * 2)
        self.assertEqual(recorder.skipped, [WINDOWS, 2 * WINDOWS])

    def test_updates_have_theirs(self, strategy):
        model, rows = linear(scaled, strategy)
        scheduler = LossScaleScheduler({0: LOW, 1: 8.0, 3: HIGH}, by="update")
        recorder, history = fit(model, rows, scheduler, epochs=3)
        windows = [8.0, 8.0, HIGH, HIGH, HIGH, HIGH]  # after each
        ends = recorder.scales[STEPS - 1 :: STEPS]
        self.assertEqual(ends, windows)
        self.assertEqual(recorder.scales[0], LOW)
        self.assertEqual(recorder.skipped, [0, 1, 1 + WINDOWS])
        self.assertEqual(history["loss_scale"], [8.0, HIGH, HIGH])
        self.assertLen(set(recorder.traces), 1)

    def test_the_training_is_that_of_the_large_batch(self, strategy):
        x, y = training.rows(12 * STEPS * training.ROWS)
        expected = training.network(momentum())
        large = training.batches(x, y, STEPS * training.ROWS)
        expected.fit(large, shuffle=False, verbose=0)
        for by in ("epoch", "update"):
            with registry.STRATEGIES[strategy]().scope():
                model = training.network(scaled())
            scheduler = LossScaleScheduler(lambda k: 4.0 ** (k + 1), by=by)
            rows = training.batches(x, y, training.ROWS)
            # 3 batches an epoch: the scale changes while a window is open.
            arguments = {"steps_per_epoch": 3, "epochs": 8, "shuffle": False}
            model.fit(rows, verbose=0, callbacks=[scheduler], **arguments)
            training.assert_same_variables(
                model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
            )

    def test_a_bad_scale_stops_the_epoch_it_is_for(self, strategy):
        model, rows = linear(scaled, strategy)
        scheduler = LossScaleScheduler(lambda epoch: (LOW, 0.0)[epoch])
        with self.assertRaisesRegex(ValueError, r"`schedule\(1\)` must be a finite"):
            fit(model, rows, scheduler, epochs=2)
        iterations = training.numbers(model.optimizer.iterations)
        self.assertEqual(int(iterations), WINDOWS)
        self.assertEqual(float(model.optimizer.loss_scale), LOW)


class RefusedTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_it_says_why_when_keras_scales(self, strategy):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        model, rows = linear(momentum, strategy)
        self.assertIsInstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        with self.assertRaisesRegex(ValueError, "auto_scale_loss=False"):
            fit(model, rows, LossScaleScheduler({0: LOW}), epochs=1)

    @parameterized.named_parameters(
        ("plain", momentum, "Wrap it in keras_accum"),
        (
            "unscaled",
            lambda: keras_accum.AccumulationOptimizer(momentum(), STEPS),
            "constructed with one",
        ),
    )
    def test_it_says_why_when_nothing_scales(self, optimizer, message):
        model, rows = linear(optimizer, "default")
        with self.assertRaisesRegex(ValueError, message):
            fit(model, rows, LossScaleScheduler({0: LOW}), epochs=1)

    def test_under_mixed_float16_the_wrapper_has_a_scale(self):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        model = training.network(keras_accum.AccumulationOptimizer(momentum(), STEPS))
        x, y = training.rows(2 * STEPS * training.ROWS)
        rows = training.batches(x, y, training.ROWS)
        _, history = fit(model, rows, LossScaleScheduler({0: 64.0}), epochs=1)
        self.assertEqual(history["loss_scale"], [64.0])
