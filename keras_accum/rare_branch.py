"""A branch that few micro steps take, so that the others pay next to nothing for it.

`tf.cond` hands every variable that a branch touches to it, one by one, also when it is
not taken: with two slots per variable that is most of the time of a micro step. Here
the branch is one call of a function, and the handles of its variables enter it in one
tensor per device, which is made once, outside of the graph.

In one tensor TensorFlow no longer sees which variables the branch touches, and would
make the update before the sums that it reads. So the order is kept here: the branch
waits for what has used its variables before it, and what uses them later waits for the
branch. Variables that only the branch touches stay out of the calling function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def is_worth_while() -> bool:
    """Whether a branch that is not taken costs anything, where this is called.

    Not in eager. Not under XLA, which compiles the branch.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return not control_flow_util.GraphOrParentsInXlaContext(graph)


def rarely(
    predicate: tf.Tensor, branch: Callable[[], Any], hidden: Iterable[tf.Variable]
) -> None:
    """In a graph: calls `branch` if `predicate` holds, and costs little if not.

    Args:
        predicate: Scalar bool.
        branch: Without arguments; what it returns is not used.
        hidden: Variables that nothing but the branch uses from here on, in the function
            that is being traced and in those that call it.
    """

    def taken() -> tf.Tensor:
        branch()
        return tf.constant(True)

    function = tf.function(
        taken, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()
    captured = function.captured_inputs
    places = _places_by_device(captured)
    packs = {device: _packed(captured, at) for device, at in places.items()}

    def call() -> tf.Tensor:
        arguments = list(captured)
        for device, at in places.items():
            with tf.device(device):
                handles = tf.raw_ops.Unpack(value=packs[device], num=len(at))
            for place, handle in zip(at, handles, strict=True):
                arguments[place] = handle
        return tf.raw_ops.StatefulPartitionedCall(
            args=arguments, Tout=[tf.bool], f=function
        )[0]

    in_sight = _in_sight(captured, places, hidden)
    users = [op for each in in_sight.values() for h in each for op in h.consumers()]
    with tf.control_dependencies(users):
        is_done = tf.cond(predicate, call, lambda: tf.constant(False))
    with tf.control_dependencies([is_done]):
        for device, handles in in_sight.items():
            if handles:
                with tf.device(device):
                    # It counts as a use of the variables, for which the next use
                    # waits; nothing reads it, and it is pruned before it runs.
                    tf.raw_ops.Pack(values=handles)


def _places_by_device(captured: Sequence[tf.Tensor]) -> dict[str, list[int]]:
    """Where the handles of variables are; none that is not on a CPU.

    What is not packed is captured one by one, in the order that TensorFlow keeps.
    """
    places: dict[str, list[int]] = {}
    for place, tensor in enumerate(captured):
        if tensor.dtype == tf.resource and hasattr(tensor, "numpy"):
            device = tf.DeviceSpec.from_string(tensor.device)
            if device.device_type == "CPU" and tensor.shape.rank == 0:
                places.setdefault(tensor.device, []).append(place)
    return places


def _packed(captured: Sequence[tf.Tensor], places: list[int]) -> tf.Tensor:
    with tf.init_scope(), tf.device(captured[places[0]].device):
        return tf.raw_ops.Pack(values=[captured[place] for place in places])


def _in_sight(
    captured: Sequence[tf.Tensor],
    places: dict[str, list[int]],
    hidden: Iterable[tf.Variable],
) -> dict[str, list[tf.Tensor]]:
    """By device, the handles that the function being traced has, or is to have."""
    graph = tf.compat.v1.get_default_graph()
    out_of_sight = {id(variable.handle) for variable in hidden}
    out_of_sight -= {id(outside) for outside, _ in graph.captures}
    return {
        device: [
            graph.capture(captured[place])
            for place in at
            if id(captured[place]) not in out_of_sight
        ]
        for device, at in places.items()
    }
