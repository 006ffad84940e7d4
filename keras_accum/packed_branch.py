"""A branch whose variables enter it in one tensor, so that it costs little not to take.

`tf.cond` hands every variable that a branch touches to it, one by one, also when it is
not taken: with two slots per variable that is most of the time of a micro step. Here
a branch is one call of a function, and the handles of its variables enter it in one
tensor per device, a pack, which is made once, outside of the graph.

A function is in order because TensorFlow sees which variables each operation takes.
`_see_through_packs` tells it which ones an operation takes in a pack, of those that the
function has anyway; the others stay out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import control_flow_util


def cond(
    predicate: tf.Tensor, on_true: Callable[[], Any], on_false: Callable[[], Any]
) -> None:
    """Takes one of two branches, as `tf.cond`.

    Args:
        predicate: Scalar bool.
        on_true: Called, when it holds, without arguments; what it returns is not used.
        on_false: Called when it does not.
    """

    def that_tells(branch: Callable[[], Any], result: bool) -> Callable[[], tf.Tensor]:
        def taken() -> tf.Tensor:
            branch()
            return tf.constant(result)

        return _packed(taken) if _is_worth_while() else taken

    tf.cond(predicate, that_tells(on_true, True), that_tells(on_false, False))


def _is_worth_while() -> bool:
    """Whether a branch that is not taken costs anything, where this is called.

    Not in eager. Not under XLA, which compiles the branch.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return not control_flow_util.GraphOrParentsInXlaContext(graph)


def _packed(branch: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """In a graph: does what `branch` does, a function that returns a bool."""
    function = tf.function(
        branch, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()
    captured = function.captured_inputs
    if not captured:
        return branch
    places = _places_by_device(captured)
    packs = {device: _pack(captured, at) for device, at in places.items()}

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

    return call


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


def _pack(captured: Sequence[tf.Tensor], places: list[int]) -> Any:
    handles = [captured[place] for place in places]
    with tf.init_scope(), tf.device(handles[0].device):
        pack: Any = tf.raw_ops.Pack(values=handles)
    pack.packed_handles = handles
    return pack


@auto_control_deps.register_acd_resource_resolver
def _see_through_packs(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Tells the order of a function which variables an operation takes in a pack.

    TensorFlow calls it for each operation when a function has been traced, and so also
    in functions that only call one with a pack.

    Args:
        op: Any operation.
        reads: Set of handles that it only reads.
        writes: Set of handles that it may write; here those of packs are added.

    Returns:
        Whether any was added.
    """
    packs = [tensor for tensor in (*reads, *writes) if tensor.shape.rank == 1]
    if not packs:
        return False
    captures = op.graph.captures
    captured = {id(inside): outside for outside, inside in captures}
    packed = {
        id(handle)
        for pack in packs
        for handle in getattr(captured.get(id(pack)), "packed_handles", ())
    }
    num_writes = len(writes)
    writes.update(inside for outside, inside in captures if id(outside) in packed)
    return len(writes) > num_writes
