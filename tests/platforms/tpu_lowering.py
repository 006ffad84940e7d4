"""The program of a replica, lowered by XLA: what a TPU's compiler would be given.

`CrossReplicaSum` becomes XLA's all-reduce. The text that comes back is read, not run.
"""

import dataclasses
import re

from tensorflow.python.eager import context

from tests.platforms import tpu_programs

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

# A dynamic dimension shows in a shape, as in f32[<=4,3], or in what sets its size.
DYNAMIC = re.compile(r"\[[^\]]*<=[^\]]*\]|set-dimension-size|set_dimension_size")


def program(traced, num_replicas: int) -> str:
    """Registers the program of replica 0 with collectives of XLA; returns its name."""
    replacements = {"CrossReplicaSum": _all_reduce, "AllToAll": _stay}
    return tpu_programs.replica_program(traced, 0, num_replicas, replacements)


def lowered(traced, num_replicas: int, arguments=(), stage: str = "hlo") -> str:
    """The text of XLA's program.

    Args:
        traced: The concrete function of `strategy.run`.
        num_replicas: Of the strategy.
        arguments: Flat inputs, beside what is captured.
        stage: "hlo" or "stablehlo".
    """
    text = context.context().get_compiler_ir(
        device_name=CPU,
        platform_name=None,
        function_name=program(traced, num_replicas),
        flat_args=list(arguments),
        captured_inputs=traced.captured_inputs,
        stage=stage,
    )
    return text.decode("utf-8", "replace")


def _all_reduce(node, place: str, previous: str | None) -> None:
    inputs, control = tpu_programs.data_and_control(node)
    dtype = node.attr["T"].type
    # Its second input says who belongs together: all, as the operation was made.
    tpu_programs.become(node, "XlaAllReduce", [*inputs, *control], T=dtype)
    node.attr["reduce_op"].s = b"Add"
    node.attr["mode"].s = b"CrossReplica"


def _stay(node, place: str, previous: str | None) -> None:
    """A counter that is equal on all replicas comes back as it was."""
    inputs, control = tpu_programs.data_and_control(node)
    dtype = node.attr["T"].type
    tpu_programs.become(node, "Identity", [inputs[0], *control], T=dtype)


@dataclasses.dataclass(frozen=True)
class Hlo:
    """A program in HLO text: its computations, and who calls whom.

    Args:
        text: As `lowered` returns it.
    """

    text: str

    def computations(self) -> dict[str, list[str]]:
        """The lines of each computation by its name; the first one's is "ENTRY"."""
        found: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in self.text.splitlines():
            if line.endswith("{") and not line.startswith((" ", "HloModule")):
                is_entry = line.startswith("ENTRY")
                name = "ENTRY" if is_entry else line.split()[0].lstrip("%")
                lines = found.setdefault(name, [])
            elif line.startswith(" "):
                lines.append(line)
        return found

    def placed(self, operation: str) -> list[tuple[str, ...]]:
        """For each operation of that name: the operations that it stands in."""
        computations = self.computations()
        found: list[tuple[str, ...]] = []

        def walk(name, inside):
            for line in computations[name]:
                instruction = line.partition(" = ")[2]
                opcode = re.search(r"\s([a-z][a-z-]*)\(", f" {instruction}")
                if opcode is None:
                    continue
                if opcode[1] == operation:
                    found.append(inside)
                for called in re.findall(r"[\w.%-]+", _callees(instruction)):
                    called = called.lstrip("%")
                    if called in computations:
                        walk(called, (*inside, opcode[1]))

        walk("ENTRY", ())
        return found


def _callees(instruction: str) -> str:
    """The names of the computations that an instruction calls."""
    named = re.findall(
        r"(?:to_apply|condition|body|true_computation|false_computation|calls|"
        r"branch_computations)=(\{[^}]*\}|[\w.%-]+)",
        instruction,
    )
    return " ".join(named)
