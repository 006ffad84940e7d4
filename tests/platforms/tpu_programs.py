"""The program of each replica, out of what TPUStrategy traced for all of them.

TPUStrategy traces a step once. Inputs that differ between replicas come in through
`TPUReplicatedInput`, results leave through `TPUReplicatedOutput`; TensorFlow's runtime
makes of it one program per core. So does `replica_program`. What a collective becomes
is the caller's: an exchange between threads (`tpu_emulation.py`) or an operation of XLA
(`tpu_lowering.py`).
"""

import itertools
from collections.abc import Callable, Mapping

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context

# Called with a node, the path to it, and the name of the node of its kind that was
# replaced before it in the same body, if any; changes the node in place.
Replacement = Callable[[object, str, str | None], None]

_numbers = itertools.count()

# What only the TPU's own rewriting understands.
_TPU_ATTRIBUTES = (
    "_XlaCompile",
    "_class",
    "_pivot_for_cluster",
    "_tpu_compilation_status",
    "_tpu_input_identity",
    "_tpu_replicate",
    "_xla_outside_compilation",
)


def become(node, op: str, inputs, **attributes) -> None:
    """Makes another operation of a node. Control inputs must be among the inputs."""
    node.op = op
    del node.input[:]
    node.input.extend(inputs)
    for name in list(node.attr):
        del node.attr[name]
    for name, value in attributes.items():
        if isinstance(value, list):
            node.attr[name].list.type.extend(value)
        elif isinstance(value, (bytes, str)):
            node.attr[name].s = value.encode() if isinstance(value, str) else value
        else:
            node.attr[name].type = value


def data_and_control(node) -> tuple[list[str], list[str]]:
    """The inputs of a node, and those that are only waited for."""
    control = [name for name in node.input if name.startswith("^")]
    return [name for name in node.input if not name.startswith("^")], control


def replica_program(
    traced, replica: int, num_replicas: int, replacements: Mapping[str, Replacement]
) -> str:
    """Registers the program of one replica; returns the name of its function.

    Args:
        traced: The concrete function of `strategy.run`.
        replica: Which.
        num_replicas: Of how many.
        replacements: For types of operations, what becomes of them.
    """
    graph = traced.graph.as_graph_def()
    library = {f.signature.name: f for f in graph.library.function}
    suffix = f"_program_{next(_numbers)}_of_replica_{replica}"
    registered: set[str] = set()

    def rewritten(function: function_pb2.FunctionDef, path: str) -> str:
        name = function.signature.name + suffix
        if name in registered:
            return name
        registered.add(name)
        new = function_pb2.FunctionDef()
        new.CopyFrom(function)
        new.signature.name = name
        new.signature.is_stateful = True
        last: dict[str, str] = {}
        outputs: set[str] = set()
        for node in new.node_def:
            place = f"{path}/{node.name}"
            if node.op == "TPUReplicatedOutput":
                outputs.add(node.name)
            _without_tpu(node, replica, num_replicas)
            if node.op in replacements:
                op = node.op
                replacements[op](node, place, last.get(op))
                last[op] = node.name
            for attribute, value in node.attr.items():
                for called in (value.func, *value.list.func):
                    if called.name in library:
                        body = library[called.name]
                        called.name = rewritten(body, f"{place}.{attribute}")
        _rename_outputs(new, outputs)
        context.context().add_function_def(new)
        return name

    return rewritten(traced.function_def, "")


def _without_tpu(node, replica: int, num_replicas: int) -> None:
    """What TensorFlow's runtime does for one core."""
    node.device = ""
    for name in _TPU_ATTRIBUTES:
        if name in node.attr:
            del node.attr[name]
    inputs, control = data_and_control(node)
    if node.op == "TPUReplicatedInput":
        become(node, "Identity", [inputs[replica]], T=node.attr["T"].type)
    elif node.op == "TPUReplicatedOutput":
        dtype = node.attr["T"].type
        copies = inputs * num_replicas
        become(node, "IdentityN", copies + control, T=[dtype] * num_replicas)
    elif node.op == "TPUReplicateMetadata":
        become(node, "NoOp", control)
    elif node.op == "TPUCompilationResult":
        become(node, "Const", control, dtype=tf.string.as_datatype_enum)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(b""))


def _rename_outputs(function: function_pb2.FunctionDef, nodes: set[str]) -> None:
    """What `TPUReplicatedOutput` calls "outputs", `IdentityN` calls "output"."""

    def renamed(reference: str) -> str:
        node, _, rest = reference.partition(":")
        return f"{node}:output{rest[len('outputs') :]}" if node in nodes else reference

    for node in function.node_def:
        for place, reference in enumerate(node.input):
            if not reference.startswith("^") and ":" in reference:
                node.input[place] = renamed(reference)
    for name, reference in list(function.ret.items()):
        function.ret[name] = renamed(reference)


def replica_of_outputs(traced) -> list[int]:
    """For each flat output of the traced function, the replica that it comes from."""
    replicas = []
    for tensor in traced.graph.outputs:
        operation, index = tensor.op, tensor.value_index
        while operation.type == "Identity":
            index = operation.inputs[0].value_index
            operation = operation.inputs[0].op
        is_replicated = operation.type == "TPUReplicatedOutput"
        replicas.append(index if is_replicated else 0)
    return replicas
