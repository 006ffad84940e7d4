"""A loss scale that follows how large the scaled gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum.loss_scale import LossScale, checked_count, checked_scale
from keras_accum.reduction import Gradient
from keras_accum.window import NewVariable


@keras.saving.register_keras_serializable(package="keras_accum")
class AutomaticLossScale(LossScale):
    """Graphcore's automatic loss scaling, on stock TensorFlow.

    The elements of all scaled gradients fall into two bins, by their magnitude. At the
    end of a period the scale is divided by `factor` if the share of large ones is above
    `ratio`, else multiplied by it. So it shrinks before anything overflows.

    Elements are counted where they arise, in a pass over each micro-gradient, and the
    counts are summed over the replicas in the window's one reduction. The original
    counts float16 gradients only; under `mixed_float16` Keras 3 hands over float32
    gradients, so all are counted. What is not finite counts as large, and a window
    that was skipped counts for the period, or the scale could not come down. If
    nothing was counted, the scale stays.

    Args:
        initial: The scale to start with, a power of two.
        factor: What it is multiplied or divided by, a power of two > 1.
        maximum: It stays below, a power of two.
        period: Windows between two decisions, an int >= 1.
        edge: Magnitudes above are large.
        ratio: The share of large ones that is too much, between 0 and 1.
        unscaled: See `ScheduledLossScale`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is out of its range, or no power of two; `initial`
            cannot grow once below `maximum`.

    Example:

    >>> scale = keras_accum.AutomaticLossScale(initial=64.0, maximum=2.0**16)
    >>> scale.period
    8

    Source: Graphcore's documentation of automatic loss scaling for Keras.
    """

    def __init__(
        self,
        initial: float = 1.0,
        factor: float = 2.0,
        maximum: float = 2.0**15,
        period: int = 8,
        edge: float = 2.0**13,
        ratio: float = 1e-5,
        unscaled: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(_power_of_two("initial", initial), unscaled)
        self.factor = _power_of_two("factor", factor)
        self.maximum = _power_of_two("maximum", maximum)
        self.period = checked_count("period", period)
        self.edge = checked_scale("edge", edge)
        self.ratio = checked_scale("ratio", ratio)
        if self.factor <= 1:
            raise ValueError(
                f"`factor` must be > 1. Received: factor={factor}. Use 2.0."
            )
        if self.ratio >= 1:
            raise ValueError(
                "`ratio` must lie between 0 and 1, a share of all elements. "
                f"Received: ratio={ratio}. Use 1e-5."
            )
        if self.initial * self.factor >= self.maximum:
            raise ValueError(
                "`initial` times `factor` must be less than `maximum`. Received: "
                f"initial={initial}, factor={factor}, maximum={maximum}. Raise the "
                "maximum or start lower."
            )

    def _build(self, new_variable: NewVariable) -> None:
        super()._build(new_variable)
        local = {"dtype": "float32", "synchronization": "on_read", "aggregation": "sum"}
        self.num_large_here = new_variable("num_large_here", **local)
        self.num_counted_here = new_variable("num_counted_here", **local)
        self.num_large = new_variable("num_large", dtype="float32")
        self.num_counted = new_variable("num_counted", dtype="float32")
        self.windows_in_period = new_variable("windows_in_period")

    def _check_request(self, scale: float) -> None:
        _power_of_two("loss_scale", scale)
        if scale >= self.maximum:
            raise ValueError(
                "`loss_scale` must be less than the maximum of the AutomaticLossScale. "
                f"Received: loss_scale={scale}, maximum={self.maximum}. Set a smaller "
                "one."
            )

    def observe(
        self,
        gradients: Sequence[Gradient | None],
        variables: Sequence[Any],
        weight: tf.Tensor | None,
    ) -> None:
        """Counts the elements of the gradients that are scaled."""
        is_in = 1.0 if weight is None else tf.cast(weight > 0, tf.float32)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None or not self.is_scaled(variable):
                continue
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            values = tf.convert_to_tensor(gradient.values if is_sparse else gradient)
            # Not `not (... <= edge)`: a graph rewrites that as if no value were NaN.
            is_above = tf.abs(values) > tf.cast(self.edge, values.dtype)
            is_bad = tf.logical_not(tf.math.is_finite(values))
            is_large = tf.logical_or(is_above, is_bad)
            num_large = tf.math.count_nonzero(is_large, dtype=tf.float32)
            self.num_large_here.assign_add(num_large * is_in)
            num_counted = tf.cast(tf.size(values), tf.float32)
            with tf.control_dependencies([num_large]):  # which waits for the batch
                self.num_counted_here.assign_add(num_counted * is_in)

    def observed(self) -> dict[str, tf.Tensor]:
        """How many elements were large, and how many there were, on this replica."""
        return {
            "num_large": self.num_large_here.read_value(),
            "num_counted": self.num_counted_here.read_value(),
        }

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        num_large = self.num_large.read_value() + verdict["num_large"]
        num_counted = self.num_counted.read_value() + verdict["num_counted"]
        windows = self.windows_in_period.read_value() + 1
        is_due = windows >= self.period
        scale = self.next_value.read_value()
        grown = scale * self.factor
        grown = tf.where(grown < self.maximum, grown, scale)
        shrunk = tf.maximum(scale / self.factor, min(1.0, self.initial))
        decided = tf.where(num_large > self.ratio * num_counted, shrunk, grown)
        is_decided = tf.logical_and(is_due, num_counted > 0.0)
        self.next_value.assign(tf.where(is_decided, decided, scale))
        self.num_large.assign(tf.where(is_due, 0.0, num_large))
        self.num_counted.assign(tf.where(is_due, 0.0, num_counted))
        self.windows_in_period.assign(tf.where(is_due, 0, windows))
        self._forget_here()

    def drop_window(self) -> None:
        """Forgets what was counted in the window that is dropped."""
        super().drop_window()
        self._forget_here()

    def _forget_here(self) -> None:
        self.num_large_here.assign(0.0)
        self.num_counted_here.assign(0.0)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            **super().get_config(),
            "factor": self.factor,
            "maximum": self.maximum,
            "period": self.period,
            "edge": self.edge,
            "ratio": self.ratio,
        }


def _power_of_two(name: str, value: Any) -> float:
    number = checked_scale(name, value)
    if math.frexp(number)[0] != 0.5:
        raise ValueError(
            f"`{name}` must be a power of two, so that scaling does not round. "
            f"Received: {name}={value!r}. Use for example "
            f"{2.0 ** round(math.log2(number))}."
        )
    return number
