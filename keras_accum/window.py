"""The window: how far it is filled, when it is full, what it weighs."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

NewVariable = Callable[..., tf.Variable]


class Window:
    """Counts the micro steps between two updates.

    Every counter is an int32 scalar that all replicas move alike, so each replica
    can read its own copy and still come to the verdict of all the others. Only
    `weight` and `bad_micro_batches` differ from replica to replica: they are sums over
    what each has seen, and are reduced with the gradients.

    The length is latched: a change of `next_length` is seen by the window that
    opens next, never by one that is half full. All methods but `request_length`
    run in replica context.

    Args:
        length: Micro steps per window, an int >= 1.
        new_variable: Makes the `tf.Variable` that a counter lives in. Called with
            a name and, where they differ from an int32 scalar that is equal on
            all replicas, `dtype`, `initial`, `synchronization`, `aggregation`.
        is_reduced: Whether each micro step is reduced over the replicas, so that all
            of them have the whole weight.

    Source: optax keeps the same two counters apart, the place in the window and the
        updates done (`optax.MultiStepsState`).
    """

    def __init__(
        self, length: int, new_variable: NewVariable, is_reduced: bool = False
    ) -> None:
        self.position = new_variable("position")
        self.length = new_variable("length", initial=length)
        self.next_length = new_variable("next_length", initial=length)
        self.skipped_windows = new_variable("skipped_windows")
        self.skipped_micro_batches = new_variable("skipped_micro_batches")
        self.last_window_updated = new_variable("last_window_updated")
        self.batches_seen = new_variable("batches_seen")
        self.is_weighted = new_variable("is_weighted")
        self.weight = new_variable(
            "weight",
            dtype="float32",
            synchronization="on_read",
            aggregation="mean" if is_reduced else "sum",
        )
        self.bad_micro_batches = new_variable(
            "bad_micro_batches",
            dtype="float32",
            synchronization="on_read",
            aggregation="sum",
        )

    def mark_weighted(self) -> None:
        """Notes that the window holds a weight that the user gave, such as rows."""
        self.is_weighted.assign(1)

    def advance(self, share: tf.Tensor | float) -> None:
        """Takes one micro step.

        Args:
            share: This replica's in the weight, as `share_of` gives it; or that of all
                replicas, if micro steps are reduced.
        """
        self.weight.assign_add(share)
        self.position.assign_add(1)

    def is_full(self) -> tf.Tensor:
        """Scalar bool: the micro step just taken was the window's last."""
        return self.position.read_value() >= self.length.read_value()

    def is_open(self) -> tf.Tensor:
        """Scalar bool: the window holds at least one micro step."""
        return self.position.read_value() > 0

    def has_updated(self) -> tf.Tensor:
        """Scalar bool: the last micro step closed a window with an update."""
        return tf.logical_and(
            tf.equal(self.position.read_value(), 0),
            tf.equal(self.last_window_updated.read_value(), 1),
        )

    def leave_out(self, is_bad: tf.Tensor) -> None:
        """Notes whether this replica's micro-batch was left out; a scalar bool."""
        self.bad_micro_batches.assign_add(tf.cast(is_bad, tf.float32))

    def record_update(self) -> None:
        """Notes that the window ended in an update."""
        self.last_window_updated.assign(1)

    def record_skip(self, is_clean: tf.Tensor) -> None:
        """Notes that the window ended without one; counts it unless it was clean.

        Args:
            is_clean: Scalar bool: nothing in it was infinite or NaN. Without an update
                it was then empty, of no weight.
        """
        self.last_window_updated.assign(0)
        self.skipped_windows.assign_add(tf.where(is_clean, 0, 1))

    def restart(self, bad_micro_batches: tf.Tensor | float = 0.0) -> None:
        """Opens the next window, with the length that was asked for last.

        Args:
            bad_micro_batches: float32 scalar, how many were left out of the window
                that was closed, on all replicas.
        """
        self.skipped_micro_batches.assign_add(tf.cast(bad_micro_batches, tf.int32))
        self.bad_micro_batches.assign(0.0)
        self.position.assign(0)
        self.is_weighted.assign(0)
        self.weight.assign(0.0)
        self.length.assign(self.next_length.read_value())

    def request_length(self, length: int) -> None:
        """Sets the length of the next window: the present one if it is still empty."""
        self.next_length.assign(length)
        self.length.assign(tf.where(self.is_open(), self.length.read_value(), length))


def share_of(weight: tf.Tensor | None) -> tf.Tensor | float:
    """A replica's share in the weight of a micro step; runs in replica context.

    The shares add up to the mean over the replicas, which is 1 without weights. So the
    weight of a window that was saved half full says nothing of how many replicas there
    were, and the window can be finished on another number.

    Args:
        weight: float32 scalar; None means 1.
    """
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return (1.0 if weight is None else weight) / replicas
