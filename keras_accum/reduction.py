"""How gradients combine: over the micro-batches of a window, then over the replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.platforms import tpu
from keras_accum.replica_groups import ReplicaGroups

Gradient = tf.Tensor | tf.IndexedSlices

MICRO_REDUCTIONS = ("mean", "sum", "running_mean")
REPLICA_REDUCTIONS = ("sum", "mean")
REDUCE_EVERY = ("window", "micro_step")


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient
) -> Gradient:
    """Applies `function` to a dense gradient, or to the values of IndexedSlices."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def weighted(gradient: Gradient, weight: tf.Tensor | None, dtype: tf.DType) -> Gradient:
    """A gradient times its micro-batch's weight, in `dtype`; None means 1.

    A weight of 0 gives zeros, whatever the gradient holds: the mean over an empty
    micro-batch is 0/0, and must not poison the others.
    """

    def times_weight(values: tf.Tensor) -> tf.Tensor:
        values = tf.cast(values, dtype)
        if weight is None:
            return values
        return tf.math.multiply_no_nan(values, tf.cast(weight, dtype))

    return map_values(times_weight, gradient)


def combine_over_replicas(
    gradients: Sequence[Gradient],
    riders: Mapping[str, tf.Tensor],
    takes_maximum: Sequence[bool],
    groups: ReplicaGroups,
) -> tuple[list[Gradient], dict[str, tf.Tensor]]:
    """Combines local gradients and riders over the replicas, in one batched call.

    Runs in replica context. On one replica nothing is copied and no collective is
    made. A batch holds one dtype, so that gradients of several take a call for each.

    Args:
        gradients: This replica's.
        riders: This replica's weight and counts, float32 scalars, which ride along.
        takes_maximum: Where True, the elementwise maximum of the gradient is wanted,
            over all replicas, not the sum.
        groups: Whose replicas sum among themselves.

    Returns:
        The combined gradients and the summed riders, equal on all replicas of a group.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients), dict(riders)
    combined = [_as_gradient(gradient) for gradient in gradients]
    summed = [i for i, is_maximum in enumerate(takes_maximum) if not is_maximum]
    addends = [combined[i] for i in summed]
    # Riders go with the gradients, if these can hold a count.
    dtypes = {addend.dtype for addend in addends}
    is_wide = tf.float64 in dtypes and tf.float32 not in dtypes
    rider_dtype = tf.float64 if is_wide else tf.float32
    addends += [tf.cast(rider, rider_dtype) for rider in riders.values()]
    totals = groups.all_reduce_sum(addends)
    for i, total in zip(summed, totals, strict=False):
        combined[i] = total
    for i, is_maximum in enumerate(takes_maximum):
        if is_maximum:
            local = tf.convert_to_tensor(combined[i])
            combined[i] = tf.reduce_max(_of_each_replica(local), axis=0)
    of_riders = [tf.cast(total, tf.float32) for total in totals[len(summed) :]]
    return combined, dict(zip(riders, of_riders, strict=True))


def _of_each_replica(local: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if tpu.is_tpu():
        return tpu.gathered(local, context.num_replicas_in_sync)
    return context.all_gather(local[tf.newaxis], axis=0)


def _as_gradient(gradient: Any) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The two reductions of a window, and what its sum is to be divided by.

    With A[r] the local sum of weighted gradients and W[r] the local weight:

    | micro        | replica "sum"                       | replica "mean"              |
    |--------------|-------------------------------------|-----------------------------|
    | mean         | sum(A) / (sum(W) / R)               | sum(A) / sum(W)             |
    | sum          | sum(A)                              | sum(A) / R                  |
    | running_mean | sum of the local means              | mean of the local means     |

    "sum" over replicas is right for Keras losses, which already carry 1/R.

    Args:
        micro: One of `MICRO_REDUCTIONS`.
        replica: One of `REPLICA_REDUCTIONS`.
    """

    micro: str
    replica: str

    @property
    def of_reduced(self) -> Reduction:
        """What is left to be done with sums that are reduced over the replicas."""
        return Reduction(self.micro, "sum")

    @property
    def is_running(self) -> bool:
        """Whether the accumulators hold a mean while the window fills."""
        return self.micro == "running_mean"

    def divisor(
        self, total_weight: tf.Tensor | None, replicas: int
    ) -> tf.Tensor | float | None:
        """What the sum over replicas is divided by; None when by nothing.

        Args:
            total_weight: float32 scalar, sum(W) / R; None when every micro-batch in a
                window of one weighs 1.
            replicas: R, those that were summed.
        """
        is_mean = self.replica == "mean"
        if self.micro == "mean" and total_weight is not None:
            # A window of no weight holds zeros, and no NaN is to come of them.
            total_weight = tf.where(total_weight > 0, total_weight, 1.0)
            return total_weight * replicas if is_mean else total_weight
        return float(replicas) if is_mean and replicas > 1 else None


def divide(
    gradient: Gradient, divisor: tf.Tensor | float | None, dtype: tf.DType
) -> Gradient:
    """Divides in float32 at least, and returns `dtype`.

    A float16 sum is divided outside float16: there a loss scale times the length of
    a window is itself infinite.

    Args:
        gradient: Dense, or IndexedSlices.
        divisor: Scalar; None divides by nothing, without a pass.
        dtype: Of the result.
    """

    def divided(values: tf.Tensor) -> tf.Tensor:
        if divisor is None:
            return tf.cast(values, dtype)
        wide = tf.float32 if values.dtype.size < 4 else values.dtype
        return tf.cast(tf.cast(values, wide) / tf.cast(divisor, wide), dtype)

    return map_values(divided, gradient)


def are_finite(gradients: Sequence[Gradient | None]) -> tf.Tensor:
    """Scalar bool: no gradient holds an infinity or a NaN. One pass over each."""
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g in gradients
        if g is not None
    ]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])


def divide_all(
    gradients: Sequence[Gradient],
    divisors: Sequence[tf.Tensor | float | None],
    dtypes: Sequence[tf.DType],
) -> list[Gradient]:
    """Divides each gradient by its own divisor; see `divide`."""
    return [
        divide(gradient, divisor, dtype)
        for gradient, divisor, dtype in zip(gradients, divisors, dtypes, strict=True)
    ]


def reduce_micro_batch(
    gradients: Sequence[Gradient],
    share: tf.Tensor | float,
    takes_maximum: Sequence[bool],
    reduction: Reduction,
    groups: ReplicaGroups,
) -> tuple[list[Gradient], tf.Tensor]:
    """Reduces one micro-batch over the replicas, before it is accumulated.

    Args:
        gradients: This replica's, times their weight.
        share: This replica's in the weight of the micro step, see `share_of`.
        takes_maximum: As in `combine_over_replicas`.
        reduction: Of it the part over replicas.
        groups: Whose replicas sum among themselves.

    Returns:
        The reduced gradients, and the mean weight in the group.
    """
    riders = {"weight": tf.convert_to_tensor(share)}
    combined, totals = combine_over_replicas(gradients, riders, takes_maximum, groups)
    if reduction.replica == "mean" and groups.size > 1:
        size = float(groups.size)
        combined = [
            g if is_maximum else divide(g, size, g.dtype)
            for g, is_maximum in zip(combined, takes_maximum, strict=True)
        ]
    return combined, totals["weight"] * float(len(groups.assignment))


def reduce_window(
    gradients: Sequence[Gradient],
    riders: dict[str, tf.Tensor],
    takes_maximum: Sequence[bool],
    groups: ReplicaGroups,
    is_reduced: bool,
) -> tuple[Sequence[Gradient], dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Reduces a window over the replicas, unless its micro steps were.

    Returns:
        The combined gradients, the totals of a group, and the riders that are still to
        be summed over all replicas.
    """
    if is_reduced:
        totals = {"weight": riders["weight"]}
        others = {name: r for name, r in riders.items() if name != "weight"}
        return gradients, totals, others if groups.is_one else riders
    combined, totals = combine_over_replicas(gradients, riders, takes_maximum, groups)
    if groups.is_one:
        return combined, totals, {}
    if "weight" in totals:
        totals["weight"] *= float(len(groups.assignment))
    return combined, totals, riders
