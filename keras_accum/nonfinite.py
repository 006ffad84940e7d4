"""What becomes of an infinity or a NaN: of a micro-batch, and of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_accum.reduction import Gradient, are_finite, combine_over_replicas
from keras_accum.replica_groups import ReplicaGroups
from keras_accum.window import Window

POLICIES = ("skip_window", "skip_micro_batch", "propagate")


def weight_if_finite(
    gradients: Sequence[Gradient | None], weight: tf.Tensor | None, window: Window
) -> tf.Tensor:
    """The weight of a micro-batch, 0 if a gradient of it is not finite.

    Runs in replica context. With its weight a micro-batch leaves the window and its
    divisor, on the replica where it is bad; the others keep theirs. Never a branch.
    """
    is_finite = are_finite(gradients)
    is_bad = tf.logical_not(is_finite)
    if weight is not None:  # an empty micro-batch is not in the window to begin with
        is_bad = tf.logical_and(is_bad, weight > 0)
    window.leave_out(is_bad)
    return tf.where(is_finite, 1.0 if weight is None else weight, 0.0)


def verdict(
    policy: str,
    reduced: Sequence[Gradient],
    totals: Mapping[str, tf.Tensor],
    riders: Mapping[str, tf.Tensor],
    groups: ReplicaGroups,
) -> dict[str, tf.Tensor]:
    """What is to be done with a reduced window.

    Args:
        policy: One of `POLICIES`.
        reduced: The gradients, equal on all replicas of a group.
        totals: What rode along with them, equal on all replicas of a group.
        riders: What is still to be summed over all replicas, of this one.
        groups: Whose replicas have summed among themselves.

    Returns:
        Scalar bools `is_good`: an update is to be made; `is_clean`: nothing in the
        window was infinite or NaN; and the totals.
    """
    is_finite = are_finite(reduced)
    if riders or not groups.is_one:  # one verdict for all groups
        flag = {"not_finite": tf.cast(tf.logical_not(is_finite), tf.float32)}
        all_replicas = ReplicaGroups(None, groups.num_replicas)
        _, summed = combine_over_replicas([], {**riders, **flag}, [], all_replicas)
        is_finite = tf.equal(summed.pop("not_finite"), 0.0)
        totals = {**totals, **summed}
    is_good = True if policy == "propagate" else is_finite
    return {
        "is_good": tf.logical_and(is_good, totals.get("weight", 1.0) > 0),
        "is_clean": tf.logical_and(is_finite, totals.get("bad_micro_batches", 0.0) < 1),
        **totals,
    }
