"""What the monitor shows of a training, where, and at what cost."""

import csv
import io
import pathlib
import sys
import tempfile
from contextlib import redirect_stdout
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import AccumulationMonitor, AccumulationScheduler
from keras_accum.callbacks.update_clock import UpdateClock
from tests import registry
from tests.integration import stepping

RATES = [0.5, 0.25, 0.125, 0.0625]


def _schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], RATES)


def _model(strategy="default", steps=3, optimizer=None, **compile_arguments):
    """A loss whose gradient is the mean of the inputs, whatever the weight."""
    with registry.STRATEGIES[strategy]().scope():
        layer = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((1,)), layer])
        if optimizer is None:
            optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(_schedule()), steps
            )
        model.compile(optimizer, _mean_of_outputs, **compile_arguments)
    return model


def _mean_of_outputs(y, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


def _data(values, rows=4):
    """Batches, all rows of which have the same value."""
    x = np.repeat(np.float32(values), rows)[:, None]
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(rows, drop_remainder=True)


class Logs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


def _fit(model, monitor, values, *callbacks, **fit):
    logs = Logs()
    arguments = {"verbose": 0, "shuffle": False, **fit}
    history = model.fit(
        _data(values), callbacks=[monitor, *callbacks, logs], **arguments
    )
    return logs.batches, history.history


class AccumulationMonitorTest(parameterized.TestCase):
    @parameterized.product(strategy=["default", "mirrored"], mode=["graph", "eager"])
    def test_every_key_after_every_micro_step(self, strategy, mode):
        values = [1.0, 2.0, 6.0, -4.0, 1.0, -3.0, 5.0]
        model = _model(strategy, **registry.MODES[mode])
        monitor = AccumulationMonitor()
        batches, history = _fit(model, monitor, values)

        def of(key):
            return [each.get(key) for each in batches[2:]]

        self.assertNotIn("updates", batches[0])  # nothing is known yet
        self.assertEqual(of("updates"), [1, 1, 1, 2, 2])
        self.assertEqual(of("position"), [0, 1, 2, 0, 1])
        self.assertEqual(of("accumulation_steps"), [3] * 5)
        self.assertEqual(of("global_batch_size"), [12] * 5)
        self.assertEqual(of("loss_scale"), [1] * 5)
        self.assertEqual(of("skipped_windows"), [0] * 5)
        np.testing.assert_allclose(of("gradient_norm"), [3, 3, 3, 2, 2], rtol=1e-6)
        np.testing.assert_allclose(of("learning_rate"), [0.25] * 3 + [0.125] * 2)
        self.assertTrue(all(speed > 0 for speed in of("samples_per_second")))
        for key in AccumulationMonitor.KEYS:
            self.assertEqual(history[key], [batches[-1][key]], key)
        self.assertEqual(monitor.history["updates"], [1, 2])
        np.testing.assert_allclose(monitor.history["gradient_norm"], [3, 2], rtol=1e-6)

    def test_one_transfer_for_each_update(self):
        model, monitor = _model(steps=4), AccumulationMonitor()
        with mock.patch.object(UpdateClock, "read", autospec=True) as read:
            read.side_effect = _READ
            _fit(model, monitor, [1.0] * 12, epochs=2)
        # Six updates, and at the beginning and the end of two epochs.
        self.assertEqual(read.call_count, 6 + 4)

    def test_a_change_from_python_is_noticed(self):
        model, monitor = _model(steps=4), AccumulationMonitor()
        flush = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: (
                batch == 5 and model.optimizer.flush()
            )
        )
        batches, _ = _fit(model, monitor, [1.0] * 11, flush)
        # A window of four, one of two that is flushed, one of four, one micro step.
        self.assertEqual(
            [each["updates"] for each in batches[3:]], [1] * 3 + [2] * 3 + [3] * 2
        )
        self.assertEqual(
            [each["position"] for each in batches[3:]], [0, 1, 2, 1, 2, 3, 0, 1]
        )

    def test_another_length_is_shown_from_its_window_on(self):
        model, monitor = _model(steps=1), AccumulationMonitor()
        scheduler = AccumulationScheduler({0: 1, 2: 3}, by="update")
        batches, _ = _fit(model, monitor, [1.0] * 8, scheduler)
        # Seen when the next window closes, since the scheduler comes after it.
        self.assertEqual(
            [each["updates"] for each in batches], [1, 2, 2, 2, 3, 3, 3, 4]
        )

    def test_an_open_window_is_shown_with_its_own_length(self):
        model = _model(steps=4)

        def shorten(batch, logs):
            if batch == 1:
                model.optimizer.accumulation_steps = 2

        other = keras.callbacks.LambdaCallback(on_train_batch_end=shorten)
        batches, _ = _fit(model, AccumulationMonitor(), [1.0] * 6, other)
        lengths = [each.get("accumulation_steps") for each in batches]
        self.assertEqual(lengths, [None, None, 4, 2, 2, 2])
        self.assertEqual([each.get("position") for each in batches[2:]], [3, 0, 1, 0])

    @parameterized.parameters((2, [2, 4]), ("epoch", [5]))
    def test_it_looks_less_often(self, every, updates):
        model, monitor = _model(steps=2), AccumulationMonitor(every)
        batches, history = _fit(model, monitor, [1.0] * 10)
        self.assertEqual(history["updates"], [5])
        seen = [each["updates"] for each in batches if "updates" in each]
        if every == "epoch":
            self.assertEmpty(seen)
        else:
            self.assertEqual(sorted(set(seen)), updates)

    def test_executions_of_several_steps(self):
        model = _model(steps=3, steps_per_execution=2)
        batches, history = _fit(model, AccumulationMonitor(), [1.0] * 8)
        self.assertEqual([each.get("updates") for each in batches], [None, 1, 2, 2])
        self.assertEqual([each.get("position") for each in batches], [None, 1, 0, 2])
        self.assertEqual(history["global_batch_size"], [12])

    def test_a_second_fit_after_one_without(self):
        model = _model(steps=2)
        _fit(model, keras.callbacks.Callback(), [1.0] * 4)
        batches, _ = _fit(model, AccumulationMonitor(), [2.0, 4.0])
        self.assertEqual(batches[-1]["updates"], 3)
        np.testing.assert_allclose(batches[-1]["gradient_norm"], 3, rtol=1e-6)

    def test_a_mixin_inside_keras_loss_scale_optimizer(self):
        inner = stepping.AccumulatingSGD(0.1, accumulation_steps=2)
        surrounding = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
        model = _model(optimizer=surrounding)
        batches, _ = _fit(model, AccumulationMonitor(), [1.0, 3.0])
        self.assertEqual(batches[-1]["loss_scale"], 64)
        np.testing.assert_allclose(batches[-1]["gradient_norm"], 2, rtol=1e-6)

    def test_windows_that_are_skipped_are_counted_and_warned_of(self):
        nan = float("nan")
        model, monitor = _model(steps=1), AccumulationMonitor()
        with self.assertWarnsRegex(UserWarning, "5 windows in a row were skipped") as c:
            batches, _ = _fit(model, monitor, [1.0, *[nan] * 7, 1.0, *[nan] * 4])
        self.assertLen(c.warnings, 1)
        for cause in ("NaN or infinite data", "learning_rate=0.25", "loss_scale=1"):
            self.assertIn(cause, str(c.warning))
        counts = [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11]
        self.assertEqual([each["skipped_windows"] for each in batches], counts)

    def test_an_update_between_them_is_a_new_start(self):
        nan = float("nan")
        values = [1.0, *[nan] * 4, 1.0, *[nan] * 4]  # a warning would be an error
        batches, _ = _fit(_model(steps=1), AccumulationMonitor(), values)
        self.assertEqual(batches[-1]["skipped_windows"], 8)


_READ = UpdateClock.read


class ElsewhereTest(parameterized.TestCase):
    def test_the_speed_is_rows_over_time(self):
        clock = iter(range(0, 1000, 2))  # each look at the clock is two seconds later
        with mock.patch("time.perf_counter", side_effect=lambda: float(next(clock))):
            batches, _ = _fit(
                _model(steps=2, run_eagerly=True), AccumulationMonitor(), [1.0] * 4
            )
        # Keras does not look at it here: 2 micro steps of 4 rows, in two seconds.
        self.assertEqual(batches[-1]["samples_per_second"], 4)

    def test_the_csv_and_the_progress_bar(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "log.csv")
            printed = io.StringIO()
            with redirect_stdout(printed):
                _fit(
                    _model(steps=2),
                    AccumulationMonitor(),
                    [1.0] * 5,
                    keras.callbacks.CSVLogger(path),
                    verbose=1,
                )
            with open(path, newline="", encoding="utf-8") as file:
                (row,) = csv.DictReader(file)
        self.assertContainsSubset(AccumulationMonitor.KEYS, row)
        self.assertEqual((row["updates"], row["position"]), ("2", "1"))
        for key in AccumulationMonitor.KEYS:
            self.assertIn(f"{key}: ", printed.getvalue())

    def test_tensorboard_of_keras_and_its_own(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            _fit(
                _model(steps=2),
                AccumulationMonitor(tensorboard=folder / "own"),
                [2.0] * 6,
                keras.callbacks.TensorBoard(folder / "keras", write_graph=False),
            )
            own, of_keras = _scalars(folder / "own"), _scalars(folder / "keras")
        self.assertEqual(
            [step for step, _ in own["accumulation/gradient_norm"]], [1, 2, 3]
        )
        for _, norm in own["accumulation/gradient_norm"]:
            self.assertAlmostEqual(norm, 2, places=5)
        self.assertEqual(of_keras["epoch_updates"], [(0, 3.0)])

    def test_the_plot(self):
        monitor = AccumulationMonitor()
        _fit(_model(steps=2), monitor, [2.0] * 6)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "history.png")
            monitor.plot_history(path)
            self.assertEqual(path.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
            missing = mock.patch.dict(sys.modules, {"matplotlib.figure": None})
            with missing, self.assertRaisesRegex(ImportError, r"keras_accum\[plot\]"):
                monitor.plot_history(path)

    def test_a_size_that_is_given_needs_no_metric(self):
        monitor = AccumulationMonitor(micro_batch_size=2)
        _, history = _fit(_model("mirrored", steps=3), monitor, [1.0] * 3)
        replicas = registry.mirrored().num_replicas_in_sync
        self.assertEqual(history["global_batch_size"], [2 * replicas * 3])


def _scalars(folder):
    """By tag, the steps and values that event files hold."""
    found: dict = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                is_number = value.tensor.dtype in (1, 3, 9)  # float32, ints
                if is_number and not value.tensor.tensor_shape.dim:
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, []).append((event.step, number))
    return found
