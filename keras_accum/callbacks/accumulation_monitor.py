"""A clear view of accumulated training: in Keras's logs, in TensorBoard, as a plot."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_accum.callbacks.accumulation_callback import AccumulationCallback
from keras_accum.callbacks.history_plot import draw
from keras_accum.callbacks.rows import Rows
from keras_accum.callbacks.update_clock import UpdateClock

SKIPS_TO_WARN = 5  # in a row; a dynamic loss scale may need a few to come down


class AccumulationMonitor(AccumulationCallback):
    """Puts what accumulation does into Keras's logs.

    So the progress bar, `History`, `CSVLogger`, `TensorBoard` and your own callbacks
    see it, if they come later in the list. The keys:

    | key | what |
    |---|---|
    | `updates` | changes of the variables: `optimizer.iterations` |
    | `position` | micro steps taken in the open window |
    | `accumulation_steps` | micro steps per window, of the open one |
    | `global_batch_size` | rows per update: of a micro step on all replicas, x steps |
    | `loss_scale` | in use; 1 without one |
    | `skipped_windows` | windows without an update, for a gradient was not finite |
    | `gradient_norm` | L2, of the reduced gradient of the last window, not clipped |
    | `learning_rate` | of the next update |
    | `samples_per_second` | rows, since the last update that was looked at |

    There is one transfer from the device per update that is looked at; the position
    between is counted. The gradient's norm costs one pass per window, from the first
    `fit` with a monitor on. Within one call of a compiled step (`steps_per_execution`
    > 1) nothing is looked at: several updates may pass from one entry to the next.

    It warns when windows are skipped again and again, with what may cause it.

    Args:
        log_every: Which updates are looked at: `"update"`, every one; an int, every so
            many; `"epoch"`, those that an epoch ends after, and no batch is logged.
        tensorboard: None, or a folder to write scalars to, by update.
        micro_batch_size: Rows that one replica sees in one micro step. None takes it
            from Keras's loss metric; a `train_step` that does not keep it needs this
            for `global_batch_size` and `samples_per_second`.

    Raises:
        TypeError: `log_every` is of another type.
        ValueError: It is below 1, or another word.

    Example:

    >>> monitor = keras_accum.callbacks.AccumulationMonitor(log_every=10)
    >>> sorted(monitor.history)[:2]
    ['accumulation_steps', 'global_batch_size']
    """

    KEYS = (
        "updates",
        "position",
        "accumulation_steps",
        "global_batch_size",
        "loss_scale",
        "skipped_windows",
        "gradient_norm",
        "learning_rate",
        "samples_per_second",
    )
    ALSO = ("loss", "gradient_noise_scale")  # of the logs, if they are there
    COUNTS = ("updates", "position", "accumulation_steps", "skipped_windows")

    def __init__(
        self,
        log_every: int | str = "update",
        tensorboard: str | Path | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.log_every = _checked_log_every(log_every)
        self.tensorboard = tensorboard
        self._rows = Rows(micro_batch_size)
        self.history: dict[str, list[float]] = {key: [] for key in self.KEYS}
        self.history |= {key: [] for key in self.ALSO}
        self._writer: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Has the gradient's norm measured; the history goes on."""
        super().on_train_begin(logs)
        self._attach(self.optimizer.measure_gradients)
        self._clock: Any = None
        self._values: dict[str, float] = {}
        self._speed = float("nan")
        self._skips_in_a_row = 0
        if self.tensorboard is not None:
            self._writer = tf.summary.create_file_writer(str(self.tensorboard))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's batches from 0."""
        self._rows.begin_epoch()
        self._batches, self._time = 0, time.perf_counter()
        if self._clock is None:
            self._clock = UpdateClock(
                self.optimizer, self._quantities(), self.log_every
            )
            self._closed = self._num_closed()
        else:
            self._clock.begin_epoch()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Looks, if an update is due to be looked at, and logs."""
        if self._clock.has_ticked(self._num_done(batch)):
            self._look(logs, is_in_epoch=True)
        elif self._values:
            length = int(self._values["accumulation_steps"])
            self._values["position"] = -self._clock.micro_steps_left % length
        if logs is not None and self.log_every != "epoch":
            logs.update(self._values)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks once more, for what looks at epochs."""
        self._clock.read()
        self._look(logs, is_in_epoch=False)
        if logs is not None:
            logs.update(self._values)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the file of TensorBoard."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def plot_history(self, path: str | Path) -> None:
        """Draws what was logged, over the updates, into a file.

        With a `GradientNoiseScale` before the monitor in the list, its scale is drawn
        beside the global batch size.

        Args:
            path: Of the picture; its suffix says which format, `.png` or `.svg`.

        Raises:
            ImportError: matplotlib is not installed (`keras_accum[plot]`).
            ValueError: There is no update to draw.
        """
        draw(self.history, path)

    def _quantities(self) -> dict[str, Any]:
        optimizer = self.optimizer
        return {
            "position": lambda: optimizer.position,
            "loss_scale": lambda: self._loss_scale(),
            "skipped_windows": lambda: optimizer.skipped_windows,
            "gradient_norm": lambda: optimizer.gradient_norm,
            "learning_rate": self._rate,
            **self._rows.quantities(self.model),
        }

    def _loss_scale(self) -> Any:
        surrounding = self.model.optimizer
        if surrounding is not self.optimizer:  # Keras's, which owns the scale
            return getattr(surrounding, "dynamic_scale", surrounding.initial_scale)
        return self.optimizer.loss_scale

    def _rate(self) -> Any:
        try:
            return self.optimizer.learning_rate
        except AttributeError:  # a MultiOptimizer has none
            return float("nan")

    def _num_closed(self) -> tuple[float, float]:
        values = self._clock.values
        return values["updates"], values["skipped_windows"]

    def _look(self, logs: dict[str, Any] | None, is_in_epoch: bool) -> None:
        values, num_done = dict(self._clock.values), self._clock.num_done
        steps, now = num_done - self._batches, time.perf_counter()
        length = values["position"] + values.pop("micro_steps_left")
        # At an epoch's end other callbacks have been at work, unless none is timed.
        is_timed = is_in_epoch or self.log_every == "epoch"
        if steps > 0 and is_timed:
            self._rows.read(values, num_done)
            self._speed = self._rows.per_micro_step * steps / (now - self._time)
            self._batches, self._time = num_done, now
        values.pop("rows", None)
        rows = self._rows.per_micro_step
        values["accumulation_steps"] = length
        values["global_batch_size"] = round(rows * length) if rows > 0 else rows
        values["samples_per_second"] = self._speed
        for key in self.COUNTS:
            values[key] = int(values[key])
        self._values = {key: values[key] for key in self.KEYS}
        if self._closed != self._num_closed():
            self._warn_of_skips()
            self._closed = self._num_closed()
            self._record(logs or {})

    def _record(self, logs: dict[str, Any]) -> None:
        others = {key: logs.get(key, float("nan")) for key in self.ALSO}
        for key, value in {**self._values, **others}.items():
            self.history[key].append(value)
        if self._writer is not None:
            with self._writer.as_default(step=int(self._values["updates"])):
                for key, value in self._values.items():
                    if key != "updates":
                        tf.summary.scalar(f"accumulation/{key}", value)

    def _warn_of_skips(self) -> None:
        updates, skipped = self._num_closed()
        updates_before, skipped_before = self._closed
        if updates > updates_before:
            self._skips_in_a_row = 0
            return
        before = self._skips_in_a_row
        self._skips_in_a_row += int(skipped - skipped_before)
        if before < SKIPS_TO_WARN <= self._skips_in_a_row:
            warnings.warn(
                f"{self._skips_in_a_row} windows in a row were skipped, for a gradient "
                "was infinite or NaN. Likely causes: a batch with NaN or infinite "
                "data; a loss that takes the logarithm of 0 or divides by 0; a "
                "learning rate that is too high "
                f"(learning_rate={self._values['learning_rate']:.3g}); variables that "
                "are not finite; in float16, a layer that overflows or a loss scale "
                f"that is too large (loss_scale={self._values['loss_scale']:.6g}) and "
                'is not "dynamic".',
                stacklevel=2,
            )


def _checked_log_every(log_every: Any) -> int | str:
    expected = (
        '`log_every` must be "update", "epoch" or an integer >= 1, a number of '
        f"updates. Received: log_every={log_every!r}"
    )
    if isinstance(log_every, str):
        if log_every not in ("update", "epoch"):
            raise ValueError(expected)
        return 1 if log_every == "update" else log_every
    if isinstance(log_every, bool) or not isinstance(log_every, int):
        raise TypeError(expected)
    if log_every < 1:
        raise ValueError(expected)
    return log_every
