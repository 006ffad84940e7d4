"""What a traced function is made of, and in which branches it stands."""

import collections
import dataclasses
from collections.abc import Callable, Iterator

COLLECTIVES = (
    "AllToAll",
    "CollectiveAllToAllV2",
    "CollectiveGatherV2",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "CrossReplicaSum",
    "NcclAllReduce",
    "XlaAllReduce",
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a traced function.

    Args:
        type: Such as "CrossReplicaSum".
        branches: From the outside in, what it stands in: "If.then_branch" and so on. A
            function that is called is entered, and adds nothing.
        name: In the body that it stands in.
    """

    type: str
    branches: tuple[str, ...]
    name: str


def operations(function) -> Iterator[Operation]:
    """All operations of a concrete function, those of its branches included."""
    graph = function.graph.as_graph_def()
    library = {f.signature.name: f.node_def for f in graph.library.function}

    def walk(nodes, branches, entered):
        for node in nodes:
            yield Operation(node.op, branches, node.name)
            for attribute, value in node.attr.items():
                for called in (value.func, *value.list.func):
                    if called.name not in library or called.name in entered:
                        continue
                    is_call = "PartitionedCall" in node.op
                    inside = () if is_call else (f"{node.op}.{attribute}",)
                    yield from walk(
                        library[called.name],
                        (*branches, *inside),
                        (*entered, called.name),
                    )

    yield from walk(graph.node, (), ())


def count(
    function, is_wanted: Callable[[Operation], bool]
) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    """How many operations there are, by type and branches."""
    wanted = filter(is_wanted, operations(function))
    return collections.Counter((each.type, each.branches) for each in wanted)


def collectives(function) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    """How many collectives there are, by type and branches."""
    return count(function, lambda each: each.type in COLLECTIVES)
