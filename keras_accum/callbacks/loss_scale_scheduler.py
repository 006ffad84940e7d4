"""Sets the loss scale by a schedule, as Keras's LearningRateScheduler does its rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from absl import logging

from keras_accum.arguments import checked_choice
from keras_accum.loss_scale import checked_scale
from keras_accum.optimizer import Accumulation

COUNTS = ("epoch", "update")


class LossScaleScheduler(keras.callbacks.Callback):
    """Sets the loss scale at the beginning of an epoch, or after an update.

    The compiled step reads the scale from a variable: it is not traced again. A window
    that is open keeps the scale it was begun with, and the next one has the new scale.

    Args:
        schedule: A callable `count -> scale` or `(count, scale) -> scale`, where
            `count` is the epoch or the number of updates made, from 0, and `scale` is
            the present one; or a dict `{count: scale}`, in which a count without an
            entry keeps the last scale.
        verbose: 1 logs each change, 0 none.
        by: `"epoch"` or `"update"`. Within one call of a compiled step
            (`steps_per_execution` > 1) nothing is set.

    Raises:
        TypeError: The schedule is neither a callable nor a dict.
        ValueError: A dict is empty, or has a count that is no int >= 0 or a scale that
            is no finite number > 0; in `fit`, a scale that the callable returns is
            not one, or the optimizer has no loss scale of its own.

    Example:

    >>> scheduler = keras_accum.callbacks.LossScaleScheduler({0: 2.0**10, 5: 2.0**12})
    >>> scheduler.schedule
    {0: 1024.0, 5: 4096.0}
    """

    def __init__(
        self,
        schedule: Callable[..., float] | Mapping[int, float],
        verbose: int = 0,
        by: str = "epoch",
    ) -> None:
        super().__init__()
        self.schedule = _checked_schedule(schedule)
        self.verbose = verbose
        self.by = checked_choice("by", by, COUNTS)
        self._last_count: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the optimizer that has the scale."""
        self._optimizer = _accumulating_optimizer(self.model.optimizer)
        self._last_count = None
        if self.by == "update":
            self._set_after_update()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the scale of the epoch."""
        if self.by == "epoch":
            self._set(epoch)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the scale that is to follow an update."""
        if self.by == "update":
            self._set_after_update()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the scale in use."""
        if logs is not None:
            logs["loss_scale"] = float(self._optimizer.loss_scale)

    def _set_after_update(self) -> None:
        updates = int(np.asarray(self._optimizer.iterations.numpy()))
        if updates != self._last_count:
            self._last_count = updates
            self._set(updates)

    def _set(self, count: int) -> None:
        if isinstance(self.schedule, Mapping) and count < min(self.schedule):
            return
        scale = self._scale_at(count)
        self._optimizer.loss_scale = checked_scale(f"schedule({count})", scale)
        if self.verbose > 0:
            logging.info(
                "%s %d: LossScaleScheduler sets the loss scale to %s.",
                self.by.capitalize(),
                count,
                scale,
            )

    def _scale_at(self, count: int) -> float:
        if isinstance(self.schedule, Mapping):
            return self.schedule[max(key for key in self.schedule if key <= count)]
        if _num_arguments(self.schedule) >= 2:
            return self.schedule(count, float(self._optimizer.loss_scale))
        return self.schedule(count)


def _checked_schedule(schedule: Any) -> Any:
    if callable(schedule):
        return schedule
    if not isinstance(schedule, Mapping):
        raise TypeError(
            "`schedule` must be a callable or a dict {count: scale}. "
            f"Received: schedule={schedule!r}"
        )
    if not schedule:
        raise ValueError(
            "`schedule` must have an entry. Received: schedule={}. Write for example "
            "{0: 1024.0}."
        )
    for count in schedule:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(
                "`schedule` must have integers >= 0 as keys, epochs or updates counted "
                f"from 0. Received: key {count!r} in schedule={schedule}"
            )
    return {
        count: checked_scale(f"schedule[{count}]", scale)
        for count, scale in schedule.items()
    }


def _num_arguments(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(
        parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        for parameter in parameters
    )


def _accumulating_optimizer(optimizer: Any) -> Any:
    """The model's optimizer, if it has a loss scale of its own to be set."""
    expected = "LossScaleScheduler needs an optimizer of keras_accum with a loss scale."
    if isinstance(optimizer, Accumulation):
        accumulating: Any = optimizer
        if accumulating.get_config()["loss_scale"] == 1.0:
            raise ValueError(
                f"{expected} Received: one that was not constructed with one, or that "
                "gave it up to a LossScaleOptimizer of Keras. Construct it with "
                'loss_scale="dynamic", or another number than 1.'
            )
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{expected} Received: a LossScaleOptimizer of Keras, which owns the scale "
            "and moves it by itself. Compile with auto_scale_loss=False, and construct "
            "the accumulating optimizer with loss_scale=..."
        )
    raise ValueError(
        f"{expected} Received: optimizer={type(optimizer).__name__}. Wrap it in "
        "keras_accum.AccumulationOptimizer(..., loss_scale=...)."
    )
