"""A loss scale that grows while gradients are finite, and shrinks when one is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_accum.loss_scale import LossScale, checked_count, checked_scale
from keras_accum.window import NewVariable


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

    def _check_request(self, scale: float) -> None:
        if not self.minimum <= scale <= self.maximum:
            raise ValueError(
                "`loss_scale` must lie between the bounds of the DynamicLossScale. "
                f"Received: loss_scale={scale}, minimum={self.minimum}, "
                f"maximum={self.maximum}. Set one between, or construct it with other "
                "bounds."
            )

    def _conclude(self, verdict: Mapping[str, tf.Tensor], updates: tf.Tensor) -> None:
        is_clean = verdict["is_clean"]
        # A file of other bounds may have a scale outside of these.
        scale = self.next_value.read_value()
        scale = tf.clip_by_value(scale, self.minimum, self.maximum)
        tolerated = self.tolerated.read_value()
        # A window of no weight is clean and makes no update: it counts for nothing.
        counts = tf.where(verdict["is_good"], 1, 0)
        so_far = self.finite_updates.read_value() + counts
        finite_updates = tf.where(is_clean, so_far, 0)
        is_due = finite_updates >= self.growth_interval
        grows = tf.logical_and(is_due, tf.logical_and(is_clean, counts > 0))
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
