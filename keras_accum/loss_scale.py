"""Loss scales: what the loss is multiplied by, and the reduced gradient divided by."""

from __future__ import annotations

import tensorflow as tf

from keras_accum.window import NewVariable


class LossScale:
    """A scale that stays as it is.

    The scale lives in a variable, made with the optimizer, so that a step that was
    traced before the optimizer was built reads it all the same. It changes only when
    a window closes: every micro-batch of a window is scaled alike.

    Args:
        initial: The scale, a finite float > 0.
    """

    def __init__(self, initial: float) -> None:
        self.initial = float(initial)

    def build(self, new_variable: NewVariable) -> None:
        """Makes the variables, see `Window`."""
        self.value = new_variable("loss_scale", dtype="float32", initial=self.initial)

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the scale, in float32 at least."""
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < 4:
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(self.value.read_value(), loss.dtype)

    def times(self, divisor: tf.Tensor | float | None) -> tf.Tensor:
        """What a sum of scaled gradients is to be divided by, float32 scalar.

        Args:
            divisor: What a sum of unscaled ones would be; None for nothing.
        """
        scale = self.value.read_value()
        return scale if divisor is None else divisor * scale

    def record_update(self) -> None:
        """Called in replica context when a window ended in an update."""

    def record_skip(self, is_finite: tf.Tensor) -> None:
        """Called in replica context when a window ended without an update.

        Args:
            is_finite: Scalar bool; False when a gradient was not finite, True when
                the window held nothing (a total weight of 0).
        """

    def get_config(self) -> float | str:
        """The value of `loss_scale=` that makes this scale."""
        return self.initial


class DynamicLossScale(LossScale):
    """A scale that grows while gradients are finite and shrinks when one is not.

    Counted in updates, not in micro steps, and judged on the gradient that is reduced
    over all replicas, so that every replica moves its copy alike. The numbers are the
    defaults of `keras.optimizers.LossScaleOptimizer`.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
    """

    growth_interval = 2000
    growth_factor = 2.0
    backoff_factor = 0.5
    # Where float32 ends, less the factor: a scale that became infinite or 0 could
    # never come back.
    maximum = 2.0**126
    minimum = 2.0**-126

    def __init__(self, initial: float = 2.0**15) -> None:
        super().__init__(initial)

    def build(self, new_variable: NewVariable) -> None:
        """Makes the variables, and a counter of finite updates."""
        super().build(new_variable)
        self.finite_updates = new_variable("finite_updates")

    def record_update(self) -> None:
        """Grows the scale when `growth_interval` updates in a row were finite."""
        finite_updates = self.finite_updates.read_value() + 1
        is_due = finite_updates >= self.growth_interval
        scale = self.value.read_value()
        grown = tf.minimum(scale * self.growth_factor, self.maximum)
        self.value.assign(tf.where(is_due, grown, scale))
        self.finite_updates.assign(tf.where(is_due, 0, finite_updates))

    def record_skip(self, is_finite: tf.Tensor) -> None:
        """Shrinks the scale if the gradient was not finite."""
        scale = self.value.read_value()
        shrunk = tf.maximum(scale * self.backoff_factor, self.minimum)
        self.value.assign(tf.where(is_finite, scale, shrunk))
        self.finite_updates.assign(0)

    def get_config(self) -> float | str:
        """As in `LossScale`."""
        return "dynamic"
