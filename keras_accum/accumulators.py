"""Replica-local storage of gradients: built once, added to in place, read, cleared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.known_variables import KnownVariables, is_overwritten, native
from keras_accum.platforms import tpu
from keras_accum.reduction import Gradient, Reduction, map_values, weighted
from keras_accum.window import NewVariable

DTypeOf = Callable[[Any], tf.DType]

# Elements up to which an accumulator shares a variable with others: to add to it costs
# more than the copy of a gradient into one tensor with the others'.
SMALL = 4096


class Accumulators:
    """One accumulator per variable and replica; small ones share a `tf.Variable`.

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
        new_shared: Makes the `tf.Variable` that small accumulators share, see
            `WindowState`. None: each has one of its own.
        kind_of: Of variables, whatever can be compared. Only those of one kind share:
            what is done with a window's sums must not tell them apart.
    """

    def __init__(
        self,
        variables: KnownVariables,
        dtype_of: DTypeOf,
        reduction: Reduction,
        new_variable: NewVariable,
        is_reduced: bool = False,
        new_shared: Any = None,
        kind_of: Callable[[Any], Any] = lambda variable: None,
    ) -> None:
        self._reduction = reduction
        # Which variables got a gradient in this window. Equal on all replicas: a
        # gradient is None by the shape of the program, not by its data.
        self._has_gradient = new_variable("has_gradient", shape=(len(variables),))
        # What is saved must not depend on how many replicas there are: a mean over
        # them needs no more than their mean, and what is reduced is equal on all.
        is_mean = reduction.replica == "mean" or is_reduced
        aggregation = "mean" if is_mean else "sum"
        shapes: list[Any] = [tuple(native(v).shape.as_list()) for v in variables]
        dtypes = [dtype_of(variable).name for variable in variables]
        kinds = list(zip(dtypes, map(kind_of, variables), strict=True))
        shared = _who_share(variables, shapes, kinds) if new_shared else []
        alone = sorted(set(range(len(variables))).difference(*shared))
        self._stores: list[_Alone | _Shared] = [
            _Alone(
                index,
                new_variable(
                    _name_of(index),
                    shape=shapes[index],
                    dtype=dtypes[index],
                    synchronization="on_read",
                    aggregation=aggregation,
                    keeps_largest=is_overwritten(variables[index]),
                ),
                is_overwritten(variables[index]),
            )
            for index in alone
        ]
        for indices in shared:
            its_shapes = [shapes[index] for index in indices]
            variable = new_shared(
                [_name_of(index) for index in indices],
                shapes=its_shapes,
                dtype=dtypes[indices[0]],
                aggregation=aggregation,
            )
            self._stores.append(_Shared(indices, its_shapes, variable))

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
        for store in self._stores:
            gradient = store.gradient(gradients)
            if store.takes_maximum:
                _take_maximum(store.variable, gradient, weight)
            elif self._reduction.is_running:
                _move_mean(store.variable, gradient, position)
            elif gradient is not None:
                _add_in_place(store.variable, gradient, weight)

    def note_present(self, gradients: Sequence[Gradient | None]) -> None:
        """Notes which variables have got a gradient in this window."""
        present = tf.constant([int(g is not None) for g in gradients])
        self._has_gradient.assign(tf.maximum(self._has_gradient.read_value(), present))

    def read(self, indices: Sequence[int]) -> tuple[list[int], list[tf.Tensor]]:
        """This replica's sums for some variables, fewer tensors than variables.

        Returns:
            The index of one variable for each tensor, and the tensors: those that share
            a variable are end to end in one of them, and all of one kind. `apart` takes
            them apart. They are not copied, where TensorFlow can do without.
        """
        held = self._held(indices)
        return [own[0] for _, own in held], [store.read(own) for store, own in held]

    def apart(
        self, indices: Sequence[int], tensors: Sequence[Gradient]
    ) -> list[Gradient]:
        """A gradient for each of the indices, from what `read` gave for them."""
        found: dict[int, Gradient] = {}
        for (store, own), tensor in zip(self._held(indices), tensors, strict=True):
            found |= zip(own, store.apart(own, tensor), strict=True)
        return [found[index] for index in indices]

    def _held(self, indices: Sequence[int]) -> list[tuple[_Alone | _Shared, list[int]]]:
        """The stores that hold some of the indices, and which."""
        wanted = set(indices)
        held = [(s, [i for i in s.indices if i in wanted]) for s in self._stores]
        return [(store, own) for store, own in held if own]

    def has_gradient(self) -> tf.Tensor:
        """Bool of shape (variables,): True where the window holds a gradient."""
        return self._has_gradient.read_value() > 0

    def clear(self) -> None:
        """Empties all of them. Assigned, not multiplied away: 0 x NaN is NaN."""
        stored = [store.variable for store in self._stores]
        for variable in (self._has_gradient, *stored):
            variable.assign(tf.zeros(variable.shape, variable.dtype))


@dataclasses.dataclass(frozen=True)
class _Alone:
    """An accumulator that has a variable of its own.

    Args:
        index: Of the variable that it accumulates for.
        variable: Of its shape.
        takes_maximum: Whether it keeps the largest value instead of a sum.
    """

    index: int
    variable: tf.Variable
    takes_maximum: bool

    @property
    def indices(self) -> list[int]:
        return [self.index]

    def gradient(self, gradients: Sequence[Gradient | None]) -> Gradient | None:
        return gradients[self.index]

    def read(self, indices: list[int]) -> tf.Tensor:
        return self.variable.read_value()

    def apart(self, indices: list[int], tensor: Gradient) -> list[Gradient]:
        return [tensor]


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Small accumulators, end to end in one variable.

    Args:
        indices: Of the variables that they accumulate for.
        shapes: Of these.
        variable: Flat, of as many elements as all have.
    """

    indices: list[int]
    shapes: list[tuple[int, ...]]
    variable: tf.Variable
    takes_maximum = False

    def gradient(self, gradients: Sequence[Gradient | None]) -> tf.Tensor | None:
        """Theirs end to end, zeros for None; None if there is none at all."""
        own = [gradients[index] for index in self.indices]
        if all(gradient is None for gradient in own):
            return None
        flat_shape = tf.constant([-1])  # one for all

        def flat(gradient: Gradient | None, shape: tuple[int, ...]) -> tf.Tensor:
            if gradient is None:
                return tf.zeros([math.prod(shape)], self.variable.dtype)
            dense = tf.cast(tf.convert_to_tensor(gradient), self.variable.dtype)
            return dense if dense.shape.rank == 1 else tf.reshape(dense, flat_shape)

        return tf.concat(list(map(flat, own, self.shapes)), axis=0)

    def read(self, indices: list[int]) -> tf.Tensor:
        """Those of some variables, end to end."""
        flat = self.variable.read_value()
        if indices == self.indices:
            return flat
        parts = tf.split(flat, [math.prod(shape) for shape in self.shapes])
        of_index = dict(zip(self.indices, parts, strict=True))
        return tf.concat([of_index[index] for index in indices], axis=0)

    def apart(self, indices: list[int], tensor: Any) -> list[Gradient]:
        """What was read for the same indices, in the shapes of their variables."""
        of_index = dict(zip(self.indices, self.shapes, strict=True))
        shapes = [of_index[index] for index in indices]
        parts = tf.split(tensor, [math.prod(shape) for shape in shapes])
        return [
            part if len(shape) == 1 else tf.reshape(part, shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]


def _name_of(index: int) -> str:
    return f"accumulator_{index}"


def _who_share(
    variables: Sequence[Any], shapes: list[tuple[int, ...]], kinds: list[Any]
) -> list[list[int]]:
    """The indices of small accumulators, in groups of two or more of one kind."""
    groups: dict[Any, list[int]] = {}
    for index, variable in enumerate(variables):
        if math.prod(shapes[index]) <= SMALL and not is_overwritten(variable):
            groups.setdefault(kinds[index], []).append(index)
    return [indices for indices in groups.values() if len(indices) > 1]


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
