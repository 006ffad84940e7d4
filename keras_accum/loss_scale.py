"""Loss scales: what the loss is multiplied by, and the reduced gradient divided by.

A scale is a value for `loss_scale=`. An optimizer makes a copy with variables of its
own. The scale in use and the next one are two variables: whatever changes the scale
changes the next one, and it is taken up when a window closes, so that all micro-batches
of a window are scaled alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_accum.known_variables import display_name, is_overwritten
from keras_accum.reduction import Gradient
from keras_accum.window import NewVariable

STATISTICS = ("batch_norm/moving_", "moving_mean", "moving_variance")


def is_statistic(variable: Any) -> bool:
    """Whether a variable's "gradient" is a statistic, which no loss scale touched.

    Source: Graphcore's `IPUOptimizer` leaves variables alone whose name contains
        "batch_norm/moving_"; Keras 3 calls them moving_mean and moving_variance.
    """
    return any(part in display_name(variable) for part in STATISTICS)


class LossScale:
    """A scale that stays as it is until it is set.

    Args:
        initial: The scale, a finite float > 0.
        unscaled: A callable from variable to bool: whose gradients are left alone, as
            they do not come from the loss. None is `is_statistic`.
    """

    def __init__(
        self, initial: float, unscaled: Callable[[Any], bool] | None = None
    ) -> None:
        self.initial = checked_scale("initial", initial)
        if unscaled is not None and not callable(unscaled):
            raise TypeError(
                "`unscaled` must be None or a callable that takes a variable and "
                f"returns a bool. Received: unscaled={unscaled!r}"
            )
        self.unscaled = unscaled

    def built(self, new_variable: NewVariable) -> LossScale:
        """A copy with variables of its own, see `Window`."""
        scale = copy.copy(self)
        scale._build(new_variable)
        return scale

    def _build(self, new_variable: NewVariable) -> None:
        self.value = new_variable("loss_scale", dtype="float32", initial=self.initial)
        self.next_value = new_variable(
            "next_loss_scale", dtype="float32", initial=self.initial
        )

    def current(self) -> tf.Tensor:
        """The scale in use, float32 scalar."""
        return self.value.read_value()

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the scale, in float32 at least."""
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < 4:
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(self.value.read_value(), loss.dtype)

    def is_scaled(self, variable: Any) -> bool:
        """Whether a variable's gradient carries the scale."""
        is_exempt = (self.unscaled or is_statistic)(variable)
        return not (is_exempt or is_overwritten(variable))

    def divisor(self, variable: Any, divisor: Any) -> Any:
        """What the sum of a variable's scaled gradients is to be divided by.

        Args:
            variable: Whose gradients they are.
            divisor: What the sum of unscaled ones would be; None for nothing.
        """
        if not self.is_scaled(variable):
            return divisor
        scale = self.value.read_value()
        return scale if divisor is None else divisor * scale

    def request(self, scale: float, is_open: tf.Tensor) -> None:
        """Sets the scale: of the next window, if the present one `is_open`."""
        self.next_value.assign(scale)
        self.value.assign(tf.where(is_open, self.value.read_value(), scale))

    # All below is called in replica context, and moves every replica's copy alike.

    def observe(
        self, gradients: Sequence[Gradient | None], variables: Sequence[Any]
    ) -> None:
        """Sees a micro-batch's scaled gradients, on the replica that has them."""

    def observed(self) -> dict[str, tf.Tensor]:
        """float32 scalars of this replica, to be summed in the window's reduction."""
        return {}

    def close_window(
        self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor
    ) -> None:
        """Draws the conclusion of a window, once it is closed.

        Args:
            verdict: Scalar bools `is_clean`: no gradient was infinite or NaN, and
                `is_good`: there was an update; and `observed()`, summed over the
                replicas.
            updates: Scalar, updates made until now.
        """
        self._conclude(verdict, updates)
        self.value.assign(self.next_value.read_value())

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        """Assigns `next_value`."""

    def drop_window(self) -> None:
        """Called when a window is dropped: it says nothing, but the next one opens."""
        self.value.assign(self.next_value.read_value())

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"initial": self.initial, "unscaled": _serialized(self.unscaled)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LossScale:
        """The scale that `get_config` described."""
        return cls(**{name: _deserialized(value) for name, value in config.items()})


class NoLossScale(LossScale):
    """No scale: nothing is multiplied, nothing divided, and nothing can be set."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def _build(self, new_variable: NewVariable) -> None:
        self.value = self.next_value = None

    def current(self) -> tf.Tensor:
        """1."""
        return tf.constant(1.0)

    def scale(self, loss: Any) -> Any:
        """The loss as it is."""
        return loss

    def divisor(self, variable: Any, divisor: Any) -> Any:
        """The divisor as it is."""
        return divisor

    def request(self, scale: float, is_open: tf.Tensor) -> None:
        """Refused: a traced step multiplies by nothing."""
        raise ValueError(
            "`loss_scale` can be set on an optimizer that was constructed with one, "
            "and that stands inside no LossScaleOptimizer of Keras, which owns the "
            f"scale then. Received: loss_scale={scale}. Construct the optimizer with "
            f"loss_scale={scale}, and compile with auto_scale_loss=False."
        )

    def close_window(
        self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor
    ) -> None:
        """There is nothing to conclude."""

    def drop_window(self) -> None:
        """There is nothing to take up."""


@keras.saving.register_keras_serializable(package="keras_accum")
class ScheduledLossScale(LossScale):
    """A scale that is a function of the number of updates.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or a callable
            that takes the number of updates, an int64 scalar tensor, and returns the
            scale. It runs in the compiled step, so it must be made of TensorFlow or
            Keras operations.
        unscaled: A callable from variable to bool: whose gradients are left alone, as
            they do not come from the loss. None is those of moving statistics.

    Raises:
        TypeError: The schedule is not callable.
        ValueError: Its first scale is not a finite number > 0.

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
        super().__init__(float(self._scale_after(tf.constant(0, tf.int64))), unscaled)

    def _scale_after(self, updates: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.schedule(updates), tf.float32)

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        self.next_value.assign(self._scale_after(tf.cast(updates, tf.int64)))

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "schedule": _serialized(self.schedule),
            "unscaled": _serialized(self.unscaled),
        }


def checked_scale(name: str, value: Any) -> float:
    """A finite float > 0."""
    expected = f"`{name}` must be a finite number > 0. Received: {name}={value!r}"
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(expected) from error
    if isinstance(value, (bool, str)):
        raise TypeError(expected)
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(number))  # what the variable holds
    if not (math.isfinite(held) and held > 0):
        raise ValueError(
            f"{expected}, which float32 must hold. A power of two scales without "
            "rounding."
        )
    return number


def checked_count(name: str, value: Any) -> int:
    """An int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` must be an integer >= 1, a number of updates or windows. "
            f"Received: {name}={value!r}. Use 1 for every one."
        )
    return value


def _serialized(function: Any) -> Any:
    return None if function is None else keras.saving.serialize_keras_object(function)


def _deserialized(value: Any) -> Any:
    if isinstance(value, dict):
        return keras.saving.deserialize_keras_object(value)
    return value
