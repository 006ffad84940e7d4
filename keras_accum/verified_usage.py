"""Whether accumulated gradients are used as they are meant to be."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.arguments import checked_accumulation_steps

# What SGD and momentum end in: TensorFlow's own updates, and Keras's.
UPDATES = (
    "ResourceApplyGradientDescent",
    "ResourceApplyMomentum",
    "ResourceApplyKerasMomentum",
    "AssignSubVariableOp",
    "AssignAddVariableOp",
)
# What a gradient may pass through on its way there.
PASSES = (
    "AddN",
    "Cast",
    "CollectiveReduce",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "Identity",
    "Mul",
    "Neg",
    "RealDiv",
    "Reshape",
)

_of_graph: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_loops = threading.local()


def expect_one_update(emitted: tf.Tensor) -> None:
    """Has a tensor of the graph that is being traced looked at by `check_usage`."""
    _of_graph.setdefault(tf.compat.v1.get_default_graph(), []).append(emitted)


def repeat(
    num_iterations: int, body: Callable[..., Any], inputs: Sequence[Any]
) -> list[tf.Tensor]:
    """A loop whose number of iterations is known, and can be checked.

    Args:
        num_iterations: An int >= 1.
        body: From tensors to as many of the same shapes.
        inputs: What the first iteration gets.

    Returns:
        What the last iteration returned.

    Raises:
        ValueError: See `stateful_gradient_accumulate`, `verify_usage`.

    Example:

    >>> def body(value):
    ...     return [value + 1.0]
    >>> looped = tf.function(lambda: repeat(10, body, [tf.constant(10.0)]))
    >>> float(looped()[0])
    20.0

    Source: Graphcore's `ipu.loops.repeat`.
    """
    graphs = []

    def step(i: tf.Tensor, *values: Any) -> list[Any]:
        with _in_loop(num_iterations):
            returned = body(*values)
        graphs.append(tf.compat.v1.get_default_graph())
        is_one = len(inputs) == 1 and not isinstance(returned, (list, tuple))
        return [i + 1, *([returned] if is_one else returned)]

    loop = [tf.constant(0), *[tf.convert_to_tensor(value) for value in inputs]]
    _, *values = tf.while_loop(lambda i, *_: i < num_iterations, step, loop)
    for graph in graphs:
        _check_usage(graph)
    return values


def check_usage(concrete_function: Any) -> None:
    """Checks what `verify_usage=True` asks for, in all of a function that is traced.

    Args:
        concrete_function: Of a `tf.function`, from `get_concrete_function`.

    Raises:
        ValueError: An accumulated gradient goes elsewhere than into one update.

    Example:

    >>> variable = tf.Variable(1.0)
    >>> @tf.function
    ... def step():
    ...     variable.assign_sub(keras_accum.ops.stateful_gradient_accumulate(
    ...         tf.constant(1.0), 2))
    >>> check_usage(step.get_concrete_function())
    """
    _check_usage(concrete_function.graph)


def _check_usage(graph: Any) -> None:
    for emitted in _of_graph.get(graph, []):
        updates, others, waiting = set(), set(), [emitted]
        while waiting:
            for operation in waiting.pop().consumers():
                if operation.type in UPDATES:
                    updates.add(operation.name)
                elif operation.type in PASSES:
                    waiting += operation.outputs
                else:
                    others.add(f"{operation.name} ({operation.type})")
        if others or len(updates) > 1:
            used = sorted(others or updates)
            raise ValueError(
                "An accumulated gradient must go into one update of SGD or momentum. "
                f"Received: {emitted.op.name}, which is used by {used}. Pass "
                "verify_usage=False if that is meant."
            )


@contextlib.contextmanager
def _in_loop(num_iterations: int) -> Iterator[None]:
    before = getattr(_loops, "num_iterations", None)
    _loops.num_iterations = num_iterations
    try:
        yield
    finally:
        _loops.num_iterations = before


def checked_steps(num_mini_batches: Any, verify_usage: bool) -> int:
    """An int >= 1 that, if it is to be verified, divides the iterations of `repeat`."""
    steps = checked_accumulation_steps(num_mini_batches, "num_mini_batches")
    num_iterations = getattr(_loops, "num_iterations", None)
    if verify_usage and num_iterations is not None and num_iterations % steps:
        raise ValueError(
            "`num_mini_batches` must divide the number of iterations of the loop. "
            f"Received: num_mini_batches={steps} in a loop of {num_iterations} "
            "iterations. Make one a multiple of the other."
        )
    return steps
