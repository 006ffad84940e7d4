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
            verdict: `is_clean`, a scalar bool: no gradient was infinite or NaN; and
                `observed()`, summed over the replicas.
            updates: Scalar, updates made until now.
        """
        self._conclude(verdict, updates)
        self.value.assign(self.next_value.read_value())

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        """Assigns `next_value`."""

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


@keras.saving.register_keras_serializable(package="keras_accum")
class DynamicLossScale(LossScale):
    """A scale that grows while gradients are finite and shrinks when one is not.

    Counted in updates, not in micro steps, and judged on the gradient that is reduced
    over all replicas. The defaults are those of `keras.optimizers.LossScaleOptimizer`,
    bounded so that the scale can come back from both ends.

    Args:
        initial: The scale to start with.
        growth_interval: Finite updates in a row until the scale grows, an int >= 1.
        growth_factor: What it is multiplied by then, > 1.
        backoff_factor: What it is multiplied by after a window that was not finite,
            between 0 and 1.
        minimum: It never shrinks below, > 0.
        maximum: It never grows above.
        hysteresis: How many windows that are not finite it takes until the scale
            shrinks; the count starts again only when the scale has grown.
        unscaled: See `ScheduledLossScale`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is out of its range.

    Example:

    >>> scale = keras_accum.DynamicLossScale(initial=2.0**10, growth_interval=100)
    >>> optimizer = keras_accum.AccumulationOptimizer(
    ...     keras.optimizers.SGD(0.1), accumulation_steps=4, loss_scale=scale)
    >>> float(optimizer.loss_scale)
    1024.0

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740; the
        hysteresis is DeepSpeed's.
    """

    def __init__(
        self,
        initial: float = 2.0**15,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        minimum: float = 2.0**-14,
        maximum: float = 2.0**24,
        hysteresis: int = 1,
        unscaled: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(initial, unscaled)
        self.growth_interval = checked_count("growth_interval", growth_interval)
        self.growth_factor = checked_scale("growth_factor", growth_factor)
        self.backoff_factor = checked_scale("backoff_factor", backoff_factor)
        self.minimum = checked_scale("minimum", minimum)
        self.maximum = checked_scale("maximum", maximum)
        self.hysteresis = checked_count("hysteresis", hysteresis)
        if not self.growth_factor > 1:
            raise ValueError(
                "`growth_factor` must be > 1. "
                f"Received: growth_factor={growth_factor}. Use 2.0."
            )
        if not self.backoff_factor < 1:
            raise ValueError(
                "`backoff_factor` must be < 1. "
                f"Received: backoff_factor={backoff_factor}. Use 0.5."
            )
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                "`initial` must lie between `minimum` and `maximum`. Received: "
                f"initial={initial}, minimum={minimum}, maximum={maximum}. Start "
                "inside the bounds."
            )

    def _build(self, new_variable: NewVariable) -> None:
        super()._build(new_variable)
        self.finite_updates = new_variable("finite_updates")
        self.tolerated = new_variable("tolerated", initial=self.hysteresis - 1)

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        is_clean = verdict["is_clean"]
        scale = self.next_value.read_value()
        tolerated = self.tolerated.read_value()
        finite_updates = tf.where(is_clean, self.finite_updates.read_value() + 1, 0)
        grows = finite_updates >= self.growth_interval
        shrinks = tf.logical_and(tf.logical_not(is_clean), tolerated <= 0)
        forgives = tf.logical_and(tf.logical_not(is_clean), tolerated > 0)
        grown = tf.minimum(scale * self.growth_factor, self.maximum)
        shrunk = tf.maximum(scale * self.backoff_factor, self.minimum)
        self.next_value.assign(tf.where(grows, grown, tf.where(shrinks, shrunk, scale)))
        self.finite_updates.assign(tf.where(grows, 0, finite_updates))
        self.tolerated.assign(
            tf.where(
                grows,
                self.hysteresis - 1,
                tf.where(forgives, tolerated - 1, tolerated),
            )
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            **super().get_config(),
            "growth_interval": self.growth_interval,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "hysteresis": self.hysteresis,
        }


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

    >>> scale = keras_accum.ScheduledLossScale(lambda updates: 2.0 ** (updates + 3))
    >>> scale.initial
    8.0
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
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{expected}. A power of two scales without rounding.")
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
