"""Replica-local storage of gradients: built once, added to in place, read, cleared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.known_variables import KnownVariables, is_overwritten, native
from keras_accum.platforms import tpu
from keras_accum.reduction import Gradient, Reduction, map_values, weighted
from keras_accum.window import NewVariable

DTypeOf = Callable[[Any], tf.DType]


class Accumulators:
    """One accumulator per variable and replica.

    An accumulator is a variable that is synchronised on read: each replica adds to its
    own copy without any traffic, while a checkpoint sees the sum over the replicas (or
    the mean, if that is what they are reduced to) and a restore gives each of them its
    share. So a window that was saved half full can be finished on another number of
    replicas.

    Variables that are overwritten with their gradient (float8 statistics) keep the
    largest value seen instead of a sum, as Keras does.

    All methods run in replica context.

    Args:
        variables: What gradients are accumulated for.
        dtype_of: The dtype of a variable's accumulator.
        reduction: How micro-batches combine.
        new_variable: Makes the `tf.Variable` of an accumulator, see `Window`.
        is_reduced: Whether what is added is reduced over the replicas already.
    """

    def __init__(
        self,
        variables: KnownVariables,
        dtype_of: DTypeOf,
        reduction: Reduction,
        new_variable: NewVariable,
        is_reduced: bool = False,
    ) -> None:
        self._reduction = reduction
        self._takes_maximum = [is_overwritten(v) for v in variables]
        # Which variables got a gradient in this window. Equal on all replicas: a
        # gradient is None by the shape of the program, not by its data.
        self._has_gradient = new_variable("has_gradient", shape=(len(variables),))
        # What is saved must not depend on how many replicas there are: a mean over
        # them needs no more than their mean, and what is reduced is equal on all.
        is_mean = reduction.replica == "mean" or is_reduced
        aggregation = "mean" if is_mean else "sum"
        self._accumulators = [
            new_variable(
                f"accumulator_{index}",
                shape=native(variable).shape,
                dtype=dtype_of(variable).name,
                synchronization="on_read",
                aggregation=aggregation,
                keeps_largest=is_overwritten(variable),
            )
            for index, variable in enumerate(variables)
        ]

    def add(
        self,
        gradients: Sequence[Gradient | None],
        weight: tf.Tensor | None,
        position: tf.Tensor,
    ) -> None:
        """Adds one micro-batch, in place and without any traffic between replicas.

        Args:
            gradients: One per accumulator. None adds nothing and takes nothing away.
            weight: float32 scalar; None means 1. A weight of 0 adds nothing, whatever
                the gradient holds.
            position: int32 scalar, micro steps already taken in this window.
        """
        for accumulator, gradient, takes_maximum in zip(
            self._accumulators, gradients, self._takes_maximum, strict=True
        ):
            if takes_maximum:
                _take_maximum(accumulator, gradient, weight)
            elif self._reduction.is_running:
                _move_mean(accumulator, gradient, position)
            elif gradient is not None:
                _add_in_place(accumulator, gradient, weight)

    def note_present(self, gradients: Sequence[Gradient | None]) -> None:
        """Notes which variables have got a gradient in this window."""
        present = tf.constant([int(g is not None) for g in gradients])
        self._has_gradient.assign(tf.maximum(self._has_gradient.read_value(), present))

    def read(self, indices: Sequence[int]) -> list[tf.Tensor]:
        """This replica's accumulated gradients, without a copy where TensorFlow can."""
        return [self._accumulators[index].read_value() for index in indices]

    def has_gradient(self) -> tf.Tensor:
        """Bool of shape (variables,): True where the window holds a gradient."""
        return self._has_gradient.read_value() > 0

    def clear(self) -> None:
        """Empties all of them. Assigned, not multiplied away: 0 x NaN is NaN."""
        for accumulator in (self._has_gradient, *self._accumulators):
            accumulator.assign(tf.zeros(accumulator.shape, accumulator.dtype))


def _add_in_place(
    accumulator: tf.Variable, gradient: Gradient, weight: tf.Tensor | None
) -> None:
    gradient = weighted(gradient, weight, accumulator.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        accumulator.assign_add(gradient)
    elif not tpu.is_tpu():
        # `scatter_add` refuses a variable that is synchronised on read; the operation
        # on this replica's handle does what is meant. Repeated rows are summed.
        tf.raw_ops.ResourceScatterAdd(
            resource=accumulator.handle,
            indices=gradient.indices,
            updates=gradient.values,
        )
    else:
        accumulator.assign_add(tf.convert_to_tensor(gradient))


def _move_mean(
    accumulator: tf.Variable, gradient: Gradient | None, position: tf.Tensor
) -> None:
    taken = tf.cast(position, tf.float32)
    kept = tf.cast(taken / (taken + 1.0), accumulator.dtype)
    share = tf.cast(1.0 / (taken + 1.0), accumulator.dtype)
    accumulator.assign(accumulator.read_value() * kept)
    if gradient is not None:
        scaled = map_values(
            lambda values: tf.cast(values, accumulator.dtype) * share, gradient
        )
        _add_in_place(accumulator, scaled, weight=None)


def _take_maximum(
    accumulator: tf.Variable, gradient: Gradient | None, weight: tf.Tensor | None
) -> None:
    if gradient is not None:
        is_in = None if weight is None else tf.cast(weight > 0, tf.float32)
        seen = weighted(tf.convert_to_tensor(gradient), is_in, accumulator.dtype)
        largest = tf.maximum(accumulator.read_value(), tf.convert_to_tensor(seen))
        accumulator.assign(largest)
