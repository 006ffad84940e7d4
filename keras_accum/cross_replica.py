"""Sums over replicas, as operations on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.platforms.ipu import program_of
from keras_accum.replica_groups import ReplicaGroups, checked_groups


def cross_replica_sum(
    x: Any,
    group_assignment: Sequence[Sequence[int]] | None = None,
    replica_group_size: int | None = None,
) -> Any:
    """The sum of every replica's `x`, on all of them.

    Args:
        x: A tensor, or IndexedSlices, of the same shape on each replica.
        group_assignment: A list of lists of replica ids, that sum among themselves.
        replica_group_size: The size of groups of consecutive replicas; it divides their
            number. Of the two one is given at most; without them all replicas sum.

    Returns:
        The sum, of the dtype of `x`.

    Raises:
        ValueError: Both kinds of groups, or bad ones; not in replica context; in a loop
            or a branch of a strategy that allows no collective there.

    Example:

    >>> float(cross_replica_sum(tf.constant(2.0)))
    2.0

    Source: TPU's and Graphcore's `cross_replica_sum`.
    """
    if group_assignment is not None and replica_group_size is not None:
        raise ValueError(
            "At most one of `group_assignment` and `replica_group_size` must be given. "
            f"Received: group_assignment={group_assignment!r}, "
            f"replica_group_size={replica_group_size!r}. Leave one out."
        )
    program = program_of(tf.distribute.get_strategy())
    if program is None:
        return _summed(x, _groups(group_assignment, replica_group_size))
    _check_groups_of_a_program(group_assignment)
    total = program.sum(tf.convert_to_tensor(x), replica_group_size)
    if replica_group_size is not None:
        return total
    return _summed(total, _groups(None, None))  # over the workers


def cross_replica_mean(
    x: Any,
    group_assignment: Sequence[Sequence[int]] | None = None,
    replica_group_size: int | None = None,
) -> Any:
    """The mean of every replica's `x`, on all of them. See `cross_replica_sum`.

    Example:

    >>> float(cross_replica_mean(tf.constant(2.0)))
    2.0
    """
    total = cross_replica_sum(x, group_assignment, replica_group_size)
    if program_of(tf.distribute.get_strategy()) is not None:
        if replica_group_size is None:
            return replication_normalise(total)
        return total / tf.cast(replica_group_size, total.dtype)
    size = _groups(group_assignment, replica_group_size).size
    return tf.convert_to_tensor(total) / tf.cast(size, total.dtype)


def replication_normalise(x: Any) -> tf.Tensor:
    """`x` divided by the number of replicas; `x` keeps its value.

    Args:
        x: A tensor of a floating dtype.

    Example:

    >>> float(replication_normalise(tf.constant(2.0)))
    2.0

    Source: Graphcore's `replication_normalise`.
    """
    x = tf.convert_to_tensor(x)
    program = program_of(tf.distribute.get_strategy())
    if program is not None:
        x = program.normalise(x)
    return x / tf.cast(_context().num_replicas_in_sync, x.dtype)


def replication_index() -> tf.Tensor:
    """int32 scalar: which replica this is, from 0.

    Example:

    >>> int(replication_index())
    0

    Source: Graphcore's `replication_index`.
    """
    return tf.cast(_context().replica_id_in_sync_group, tf.int32)


def merged(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` once for all replicas; clearly refused in a loop or a branch.

    Args:
        function: Runs in cross-replica context, takes the strategy first.
        *args: Of which each replica has its own.
    """
    return _allowed(lambda: _context().merge_call(function, args=args))


def _check_groups_of_a_program(group_assignment: Any) -> None:
    if group_assignment is not None:
        raise ValueError(
            "`group_assignment` must be None on an IPU, where groups are of "
            "consecutive replicas. Received: "
            f"group_assignment={group_assignment!r}. Pass replica_group_size."
        )


def _groups(group_assignment: Any, replica_group_size: Any) -> ReplicaGroups:
    replicas = _context().num_replicas_in_sync
    if replica_group_size is not None:
        return checked_groups("replica_group_size", replica_group_size, replicas)
    return checked_groups("group_assignment", group_assignment, replicas)


def _context() -> Any:
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "An operation over replicas must be called in replica context. Received: a "
            "call in cross-replica context. Call it inside `strategy.run(...)`."
        )
    return tf.distribute.get_replica_context()


def _summed(x: Any, groups: ReplicaGroups) -> Any:
    value = x if isinstance(x, tf.IndexedSlices) else tf.convert_to_tensor(x)
    (total,) = _allowed(lambda: groups.all_reduce_sum([value]))
    return total


@tf.autograph.experimental.do_not_convert
def _allowed(collective: Callable[[], Any]) -> Any:
    try:
        return collective()
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        strategy = type(tf.distribute.get_strategy()).__name__
        raise ValueError(
            f"{strategy} allows no collective inside a loop, a branch or a nested "
            "tf.function that is traced in replica context. Received: a collective "
            "inside one. Make the loop one of `strategy.run(...)` calls, each of which "
            "takes one step; TPUStrategy allows it as it is."
        ) from error
