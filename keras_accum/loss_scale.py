"""Loss scales: what the loss is multiplied by, and the reduced gradient divided by.

A scale is a value for `loss_scale=`. An optimizer makes a copy with variables of its
own. The scale in use and the next one are two variables: whatever changes the scale
changes the next one, and it is taken up when a window closes, so that all micro-batches
of a window are scaled alike.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_accum.known_variables import display_name, is_overwritten
from keras_accum.reduction import Gradient
from keras_accum.window import NewVariable

STATISTICS = ("moving_mean", "moving_variance")


def is_statistic(variable: Any) -> bool:
    """Whether a variable's "gradient" is a statistic, which no loss scale touched.

    Source: Graphcore's `IPUOptimizer` leaves variables alone whose name contains
        "batch_norm/moving_"; Keras 3 calls them moving_mean and moving_variance.
    """
    path = display_name(variable)
    own_name = path.split("/")[-1].split(":")[0]
    return own_name in STATISTICS or "batch_norm/moving_" in path


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

    def next(self) -> tf.Tensor:
        """The scale of the next window, as far as it is known, float32 scalar."""
        return self.next_value.read_value()

    def request(self, scale: float, is_open: tf.Tensor) -> None:
        """Sets the scale: of the next window, if the present one `is_open`."""
        self._check_request(scale)
        self.next_value.assign(scale)
        self.value.assign(tf.where(is_open, self.value.read_value(), scale))

    def _check_request(self, scale: float) -> None:
        """Raises ValueError if the scale cannot be set to that."""

    # All below is called in replica context, and moves every replica's copy alike.

    def observe(
        self,
        gradients: Sequence[Gradient | None],
        variables: Sequence[Any],
        weight: tf.Tensor | None,
    ) -> None:
        """Sees a micro-batch's scaled gradients, on the replica that has them.

        Args:
            gradients: One or None for each of the variables.
            variables: All that the optimizer was built for.
            weight: What the user gave it; one of 0 is empty and says nothing.
        """

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
        asked_for = self.next_value.read_value()
        is_set = tf.not_equal(asked_for, self.value.read_value())
        self._conclude(verdict, updates)
        # What was set while the window was open is what the next one has.
        taken_up = tf.where(is_set, asked_for, self.next_value.read_value())
        self.next_value.assign(taken_up)
        self.value.assign(taken_up)

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        """Assigns `next_value`."""

    def drop_window(self) -> None:
        """Called when a window is dropped: it says nothing, but the next one opens."""
        self.value.assign(self.next_value.read_value())

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"initial": self.initial, "unscaled": serialized(self.unscaled)}

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({arguments})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LossScale:
        """The scale that `get_config` described."""
        return cls(**{name: deserialized(value) for name, value in config.items()})


class NoLossScale(LossScale):
    """No scale: nothing is multiplied, nothing divided, and nothing can be set."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def _build(self, new_variable: NewVariable) -> None:
        self.value = self.next_value = None

    def current(self) -> tf.Tensor:
        """1."""
        return tf.constant(1.0)

    def next(self) -> tf.Tensor:
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
            "`loss_scale` can be set on an optimizer that was constructed with one "
            "other than 1, and that stands inside no LossScaleOptimizer of Keras, "
            f"which owns the scale then. Received: loss_scale={scale}. Construct the "
            f"optimizer with loss_scale={scale}; compile a mixin with "
            "auto_scale_loss=False."
        )

    def close_window(
        self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor
    ) -> None:
        """There is nothing to conclude."""

    def drop_window(self) -> None:
        """There is nothing to take up."""


def checked_scale(name: str, value: Any) -> float:
    """A finite float > 0, far enough from the ends of float32 to be reckoned with."""
    expected = f"`{name}` must be a finite number > 0. Received: {name}={value!r}"
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(expected) from error
    if isinstance(value, (bool, str)):
        raise TypeError(expected)
    if not (math.isfinite(number) and 2.0**-100 <= number <= 2.0**100):
        raise ValueError(
            f"{expected}. Between 2**-100 and 2**100 float32 holds it and its products."
        )
    return number


def checked_count(name: str, value: Any) -> int:
    """An int >= 1; NumPy integers are converted."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < 1:
        raise ValueError(
            f"`{name}` must be an integer >= 1, a number of updates or windows. "
            f"Received: {name}={value!r}. Use 1 for every one."
        )
    return int(value)


def serialized(function: Any) -> Any:
    """What `get_config` says of an argument that is a function, or None."""
    return None if function is None else keras.saving.serialize_keras_object(function)


def deserialized(value: Any) -> Any:
    """The argument that `get_config` described."""
    if isinstance(value, dict):
        return keras.saving.deserialize_keras_object(value)
    return value
