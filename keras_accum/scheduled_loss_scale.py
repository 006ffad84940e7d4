"""A loss scale that is a function of the number of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_accum.loss_scale import LossScale, serialized


@keras.saving.register_keras_serializable(package="keras_accum")
class ScheduledLossScale(LossScale):
    """A scale that is a function of the number of updates.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or a callable
            that takes the number of updates, an int64 scalar tensor, and returns the
            scale. It runs in the compiled step, so it must be made of TensorFlow or
            Keras operations. A scale that is no finite number > 0 is passed over, and
            the one before stays. Register a function of yours with
            `keras.saving.register_keras_serializable` to load a model with it.
        unscaled: A callable from variable to bool: whose gradients are left alone, as
            they do not come from the loss. None is those of moving statistics.

    Raises:
        TypeError: The schedule is not callable.
        ValueError: It cannot be traced, gives no scalar, or its first scale is not a
            finite number > 0.

    Example:

    >>> schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
    ...     [1000], [1024.0, 4096.0])
    >>> keras_accum.ScheduledLossScale(schedule).initial
    1024.0
    """

    def __init__(
        self,
        schedule: Callable[[tf.Tensor], Any],
        unscaled: Callable[[Any], bool] | None = None,
    ) -> None:
        if not callable(schedule):
            raise TypeError(
                "`schedule` must be a LearningRateSchedule or a callable that takes "
                f"the number of updates. Received: schedule={schedule!r}. For a scale "
                "that stays, pass a number as loss_scale."
            )
        self.schedule = schedule
        super().__init__(self._first_scale(), unscaled)

    def _first_scale(self) -> float:
        """Traces the schedule, as a compiled step will."""
        expected = (
            "`schedule` must take a scalar tensor, the number of updates, and return a "
            "scalar, a finite number > 0, by TensorFlow or Keras operations. Received: "
            f"schedule={self.schedule!r}, "
        )
        try:
            traced = tf.function(lambda k: self._scale_after(k), autograph=False)
            first = np.asarray(traced(tf.constant(0, tf.int64)))
        except Exception as error:
            raise ValueError(
                f"{expected}which raised {type(error).__name__}: {error}"
            ) from error
        if first.shape or not (np.isfinite(first) and first > 0):
            raise ValueError(f"{expected}which returned {first} for 0 updates.")
        return float(first)

    def _scale_after(self, updates: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.schedule(updates), tf.float32)

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        scale = self._scale_after(tf.cast(updates, tf.int64))
        is_scale = tf.logical_and(tf.math.is_finite(scale), scale > 0)
        self.next_value.assign(tf.where(is_scale, scale, self.value.read_value()))

    def _check_request(self, scale: float) -> None:
        raise ValueError(
            "`loss_scale` cannot be set while it follows a schedule. Received: "
            f"loss_scale={scale}, of an optimizer with {self!r}. Construct it with a "
            'number or "dynamic" to set it.'
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "schedule": serialized(self.schedule),
            "unscaled": serialized(self.unscaled),
        }
