"""What can be known of the gradients of a window on their way: norms, and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.known_variables import is_overwritten
from keras_accum.loss_scale import LossScale
from keras_accum.reduction import Gradient, Reduction
from keras_accum.window import Window


class NoMeasurements:
    """Nothing is measured, and nothing is computed for it."""

    is_noise_measured = False

    def observe(
        self,
        gradients: Sequence[Gradient | None],
        weight: tf.Tensor | None,
        variables: Sequence[Any],
        loss_scale: LossScale,
    ) -> None:
        """Sees a micro-batch's scaled gradients, on the replica that has them."""

    def observed(self) -> dict[str, tf.Tensor]:
        """float32 scalars of this replica, to be summed in the window's reduction."""
        return {}

    def of_reduced(
        self,
        reduced: Sequence[Gradient],
        variables: Sequence[Any],
        totals: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """What is known of the reduced gradients, for `close_window`."""
        return {}

    def close_window(self, verdict: Mapping[str, tf.Tensor], window: Window) -> None:
        """Keeps what the window has shown, and forgets its micro-batches."""

    def drop_window(self) -> None:
        """Forgets the micro-batches of a window that is dropped."""


class GradientMeasurements(NoMeasurements):
    """The norm of the reduced gradient and, if asked for, the simple noise scale.

    The norm is the global L2 norm of what the plain optimizer is handed, before it
    clips: of the last window that was closed. It costs one pass per window.

    The simple noise scale is tr(S) / |G|^2, with G the true gradient and S the
    covariance of the gradient of one micro-batch on one replica: it is counted in such
    micro-batches. From n of them, with m the mean of their squared norms and M the
    squared norm of their mean,

        |G|^2 ~ (n M - m) / (n - 1)        tr(S) ~ (m - M) / (1 - 1/n)

    are unbiased. Both are averaged over the updates, and the ratio taken of the
    averages. It costs one pass over each micro-gradient. Windows that were skipped,
    that have one micro-batch only, or weights of the user's, say nothing.

    Its variables are made in the scope of the strategy, and are not saved.

    Args:
        reduction: How the gradients combine.
        replicas: Their number.
        is_noise_measured: Whether the noise scale is wanted.
        momentum: Of the moving averages, in [0, 1).

    Source: McCandlish et al., An Empirical Model of Large-Batch Training,
        arXiv:1812.06162, appendix A.1.
    """

    def __init__(
        self,
        reduction: Reduction,
        replicas: int,
        is_noise_measured: bool = False,
        momentum: float = 0.95,
    ) -> None:
        self._reduction = reduction
        self._replicas = replicas
        self.is_noise_measured = is_noise_measured
        self.momentum = momentum
        self.gradient_norm = _scalar(float("nan"))
        if is_noise_measured:
            self._squares = _local_sum()  # of this replica's micro-gradients
            self._measured = _local_sum()  # how many they are
            self._trace = _scalar(0.0)
            self._square = _scalar(0.0)
            self._share = _scalar(0.0)  # of the averages that is data, not zeros

    def observe(
        self,
        gradients: Sequence[Gradient | None],
        weight: tf.Tensor | None,
        variables: Sequence[Any],
        loss_scale: LossScale,
    ) -> None:
        """Adds up squared norms, of what the loss scale is taken away from."""
        if not self.is_noise_measured:
            return
        scaled, unscaled = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None and not is_overwritten(variable):
                is_scaled = loss_scale.is_scaled(variable)
                (scaled if is_scaled else unscaled).append(gradient)
        squares = square_norm(scaled) / tf.square(loss_scale.current())
        squares += square_norm(unscaled)
        # An empty replica has a gradient of zeros, and is no micro-batch.
        is_in = tf.cast(squares > 0, tf.float32)
        if weight is not None:
            is_in *= tf.cast(weight > 0, tf.float32)
        self._squares.assign_add(tf.math.multiply_no_nan(squares, is_in))
        with tf.control_dependencies([squares]):  # which waits for the batch
            self._measured.assign_add(is_in)

    def observed(self) -> dict[str, tf.Tensor]:
        """The sum of squared norms, and of how many micro-batches it is."""
        if not self.is_noise_measured:
            return {}
        return {
            "micro_squares": self._squares.read_value(),
            "measured": self._measured.read_value(),
        }

    def of_reduced(
        self,
        reduced: Sequence[Gradient],
        variables: Sequence[Any],
        totals: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """The squared norm of the reduced gradient: the one pass over it."""
        gradients = [
            gradient
            for gradient, variable in zip(reduced, variables, strict=True)
            if not is_overwritten(variable)
        ]
        return {"reduced_square": square_norm(gradients)}

    def close_window(self, verdict: Mapping[str, tf.Tensor], window: Window) -> None:
        """Takes up the norm, and moves the averages by what the window has shown."""
        square = verdict["reduced_square"]
        self.gradient_norm.assign(tf.sqrt(square))
        if self.is_noise_measured:
            self._move_averages(square, verdict, window)
            self.drop_window()

    def _move_averages(
        self, square: tf.Tensor, verdict: Mapping[str, tf.Tensor], window: Window
    ) -> None:
        number = verdict["measured"]
        left_out = verdict.get("bad_micro_batches", 0.0)
        mean_square = verdict["micro_squares"] / number
        if self._reduction.replica == "sum":  # local gradients carry 1/R
            mean_square *= self._replicas**2
        if self._reduction.micro == "sum":
            square /= tf.square(verdict.get("weight", 1.0))
        true_square = (number * square - mean_square) / (number - 1.0)
        trace = (mean_square - square) / (1.0 - 1.0 / number)
        # A window of one has no position: it is closed where it is begun.
        steps = tf.maximum(window.position.read_value(), 1)
        in_window = tf.cast(steps * self._replicas, tf.float32)
        says_something = tf.reduce_all(
            [
                verdict["is_good"],
                number > 1.0,
                # Not measured from its start, it has more micro-batches than these.
                tf.equal(number + left_out, in_window),
                tf.equal(window.is_weighted.read_value(), 0),
                tf.math.is_finite(true_square),
                tf.math.is_finite(trace),
            ]
        )
        for average, value in (
            (self._trace, trace),
            (self._square, true_square),
            (self._share, 1.0),
        ):
            kept = average.read_value()
            moved = self.momentum * kept + (1.0 - self.momentum) * value
            average.assign(tf.where(says_something, moved, kept))

    def drop_window(self) -> None:
        """Forgets the micro-batches of the window."""
        if self.is_noise_measured:
            self._squares.assign(0.0)
            self._measured.assign(0.0)

    def noise_scale(self) -> tf.Tensor:
        """float32 scalar, in micro-batches of one replica; NaN while not known."""
        trace, square = self._trace.read_value(), self._square.read_value()
        is_known = tf.logical_and(self._share.read_value() > 0, square > 0)
        return tf.where(is_known, trace / square, float("nan"))

    def noise_averages(self) -> dict[str, tf.Tensor]:
        """float32 scalars: the averages that the noise scale is the ratio of."""
        share = self._share.read_value()
        return {
            "gradient_variance": self._trace.read_value() / share,
            "squared_gradient": self._square.read_value() / share,
        }


def square_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """float32 scalar: the sum of all squared elements, in float32 at least.

    Repeated rows of IndexedSlices are summed first: they are one row's gradient.
    """
    if not gradients:
        return tf.constant(0.0)
    sums = []
    for gradient in gradients:
        dense = tf.convert_to_tensor(gradient)
        wide = tf.cast(dense, tf.float32) if dense.dtype.size < 4 else dense
        sums.append(tf.cast(tf.reduce_sum(tf.square(wide)), tf.float32))
    return tf.add_n(sums)


def _scalar(initial: float) -> tf.Variable:
    return tf.Variable(tf.constant(initial, tf.float32), trainable=False)


def _local_sum() -> tf.Variable:
    return tf.Variable(
        tf.constant(0.0),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
