"""Sets the loss scale by a schedule, as Keras's LearningRateScheduler does its rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_accum.callbacks.schedule import ScheduleCallback
from keras_accum.loss_scale import NoLossScale, checked_scale
from keras_accum.optimizer import Accumulation


class LossScaleScheduler(ScheduleCallback):
    """Sets the loss scale at the beginning of an epoch, or after an update.

    The compiled step reads the scale from a variable: it is not traced again. A window
    that is open keeps the scale it was begun with, and the next one has the new scale.
    At the end of an epoch the scale in use is logged as `loss_scale`.

    Args:
        schedule: A callable `count -> scale` or `(count, scale) -> scale`, where
            `count` is the epoch or the number of updates made, from 0, and `scale` is
            the present one; or a dict `{count: scale}`, in which a count without an
            entry keeps what there is.
        verbose: 1 tells of each change, 0 does not.
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

    steers = quantity = "loss_scale"

    def __init__(
        self,
        schedule: Callable[..., float] | Mapping[int, float],
        verbose: int = 0,
        by: str = "epoch",
    ) -> None:
        super().__init__(schedule, by, verbose)

    def _checked(self, name: str, value: Any) -> float:
        return checked_scale(name, value)

    def _present(self) -> float:
        return float(self.optimizer.next_loss_scale)

    def _logged(self) -> float:
        return float(self.optimizer.loss_scale)

    def _set(self, value: float) -> None:
        self.optimizer.loss_scale = value

    def _found(self, optimizer: Any) -> Accumulation:
        expected = (
            "LossScaleScheduler needs an optimizer of keras_accum with a loss scale."
        )
        if not isinstance(optimizer, Accumulation) and isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ):
            raise ValueError(
                f"{expected} Received: a LossScaleOptimizer of Keras, which owns the "
                "scale and moves it by itself. Compile with auto_scale_loss=False, and "
                "construct the accumulating optimizer with loss_scale=..."
            )
        accumulating = super()._found(optimizer)
        if isinstance(accumulating._loss_scale, NoLossScale):
            raise ValueError(
                f"{expected} Received: one that was not constructed with one, or that "
                "gave it up to a LossScaleOptimizer of Keras. Construct it with "
                'loss_scale="dynamic", or another number than 1.'
            )
        return accumulating
