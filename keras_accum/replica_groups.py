"""Groups of replicas that sum among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_accum.platforms import tpu

GROUPS_DIVERGE = (
    "Replicas sum inside their groups only: the copies of a variable part ways from "
    "one group to the next. What reads or evaluates one sees the copy of replica 0; "
    "nothing can be saved."
)


class ReplicaGroups:
    """Which replicas sum with which.

    Args:
        assignment: For each group the ids of its replicas: a permutation of
            `range(num_replicas)` in lists of equal length. None is one group of all.
        num_replicas: How many there are.
        said: The argument that was passed for them, to be said again in a config.
    """

    def __init__(
        self,
        assignment: Sequence[Sequence[int]] | None,
        num_replicas: int,
        said: Any = None,
    ) -> None:
        if assignment is None:
            assignment = [list(range(num_replicas))]
        self.assignment = [list(group) for group in assignment]
        self.num_replicas = num_replicas
        self.said = said

    @property
    def size(self) -> int:
        """Replicas in a group."""
        return len(self.assignment[0])

    @property
    def is_one(self) -> bool:
        """Whether all replicas are in one group."""
        return len(self.assignment) == 1

    def all_reduce_sum(self, values: Sequence[Any]) -> list[Any]:
        """Sums inside each group; runs in replica context.

        One group is one all-reduce of all values of a dtype. Of several groups each has
        a row of its own in what is all-reduced: as many times the traffic as there are
        groups, except on a TPU, which knows groups. Groups of one send nothing.

        Args:
            values: Tensors, and IndexedSlices, which become dense with several groups.
        """
        if not values or self.size == 1:
            return list(values)
        if self.is_one:
            return _all_reduce(values)
        if tpu.is_tpu():
            dense = [tf.convert_to_tensor(value) for value in values]
            return [tpu.sum_in_groups(value, self.assignment) for value in dense]
        context = tf.distribute.get_replica_context()
        group_of = np.zeros(self.num_replicas, "int32")
        for group, replicas in enumerate(self.assignment):
            group_of[replicas] = group
        own_group = tf.gather(group_of, context.replica_id_in_sync_group)
        rows = [self._in_row(tf.convert_to_tensor(v), own_group) for v in values]
        return [total[own_group] for total in _all_reduce(rows)]

    def _in_row(self, value: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        is_row = tf.equal(tf.range(len(self.assignment)), row)
        is_row = tf.reshape(is_row, [-1, *[1] * len(value.shape)])
        # Chosen, not multiplied: another group's row must not become NaN.
        return tf.where(is_row, value[tf.newaxis], tf.zeros_like(value)[tf.newaxis])


def _all_reduce(values: Sequence[Any]) -> list[Any]:
    """Sums over all replicas, in one batched call for each dtype."""
    context = tf.distribute.get_replica_context()
    totals: list[Any] = [None] * len(values)
    for dtype in sorted({value.dtype for value in values}, key=lambda each: each.name):
        of_dtype = [i for i, value in enumerate(values) if value.dtype == dtype]
        # One tensor that all replicas share would be taken for one value, not summed.
        batch = [_of_this_replica(values[i]) for i in of_dtype]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, batch)
        for i, total in zip(of_dtype, reduced, strict=True):
            totals[i] = total
    return totals


def _of_this_replica(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(value.values), value.indices, value.dense_shape
        )
    return tf.identity(value)


def checked_groups(name: str, groups: Any, num_replicas: int) -> ReplicaGroups:
    """The groups that a size, or a list of lists, or None says.

    Args:
        name: Of the argument, for messages.
        groups: None for one group; an int, the size of groups of consecutive replicas;
            or a list of lists of replica ids.
        num_replicas: How many there are.

    Raises:
        ValueError: It is something else; the size does not divide the number of
            replicas; the lists are no permutation of `range(num_replicas)`, or not of
            equal length.
    """
    if groups is None:
        return ReplicaGroups(None, num_replicas)
    if isinstance(groups, (int, np.integer)) and not isinstance(groups, bool):
        if groups < 1 or num_replicas % groups:
            raise ValueError(
                f"`{name}` must divide the number of replicas. Received: "
                f"{name}={groups} for {num_replicas} replicas. Use one of "
                f"{[n for n in range(1, num_replicas + 1) if num_replicas % n == 0]}."
            )
        consecutive = np.arange(num_replicas).reshape(-1, groups).tolist()
        return ReplicaGroups(consecutive, num_replicas, int(groups))
    expected = (
        f"`{name}` must be a list of lists of equal length, which together hold each "
        f"replica of 0 to {num_replicas - 1} once. Received: {name}={groups!r}. Write "
        f"for example {[[2 * i, 2 * i + 1] for i in range(max(1, num_replicas // 2))]}."
    )
    lists: Any = groups
    is_list = isinstance(lists, (list, tuple)) and len(lists) > 0
    if not is_list or not all(isinstance(group, (list, tuple)) for group in lists):
        raise ValueError(expected)
    ids = [replica for group in lists for replica in group]
    is_ints = all(isinstance(i, (int, np.integer)) for i in ids)
    is_permutation = is_ints and sorted(ids) == list(range(num_replicas))
    if not is_permutation or len({len(group) for group in lists}) != 1:
        raise ValueError(expected)
    said = [list(group) for group in lists]
    return ReplicaGroups(lists, num_replicas, said)
