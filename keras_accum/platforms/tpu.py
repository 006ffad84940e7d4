"""What differs on a TPU: a window is reduced where no replica knows its own number.

In the boundary of a window TPUStrategy calls one function for all replicas, and tells
it that it is replica 0. So nothing there may go by the number of the replica: these
operations do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def is_tpu() -> bool:
    """Whether the strategy in whose context this is called is a TPUStrategy."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)


def sum_in_groups(value: tf.Tensor, assignment: Sequence[Sequence[int]]) -> Any:
    """Sums inside each group: of one collective, without a row for each group."""
    return tf.compat.v1.tpu.cross_replica_sum(value, [list(g) for g in assignment])


def gathered(value: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """The values of all replicas, with a new first axis of length `num_replicas`."""
    return tf.raw_ops.AllToAll(
        input=tf.repeat(value[tf.newaxis], num_replicas, axis=0),
        group_assignment=[list(range(num_replicas))],
        concat_dimension=0,
        split_dimension=0,
        split_count=num_replicas,
    )
