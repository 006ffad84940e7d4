"""Claim f: what it takes to trace a micro step, and how large its graph is.

Each contender is traced in a process of its own, for what was traced before slows what
is traced next; and from some depths of Python's stack, of which the median counts. If a
chunk of the stack ends within a loop, CPython asks for the next one and frees it in
each pass, which alone can add a half.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import measuring, peers, processes

CONTENDERS = ("plain", "keras_accum", "keras", "by hand")
VARIABLES = 600
STEPS = 8  # per window
DEPTHS = (0, 40, 80)


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each contender, with Adam around variables of 64."""
    variables, contenders = VARIABLES, CONTENDERS
    if quick:
        variables, contenders = 60, CONTENDERS[:2]
    calls = [(name, str(variables)) for name in contenders]
    traces = processes.all_measured("tracing", calls)
    found = dict(zip(contenders, traces, strict=True))
    for name, (seconds, operations) in found.items():
        yield {
            "claim": "tracing",
            "variables": variables,
            "optimizer": "adam",
            "contender": name,
            "trace_s": round(seconds, 3),
            "times_plain": round(seconds / found["plain"][0], 3),
            "operations": operations,
        }


def _measure(contender: str, variables: int) -> tuple[float, int]:
    """In a process of its own: the seconds of a trace, and the operations of it."""
    way = peers.WAYS[contender]
    way([(64,)] * 2, "adam", STEPS).get_concrete_function()  # to be warm
    seconds, operations = [], 0
    for depth in DEPTHS:
        step = way([(64,)] * variables, "adam", STEPS)
        begin = time.perf_counter()
        function = _at_depth(depth, step.get_concrete_function)
        seconds.append(time.perf_counter() - begin)
        operations = _operations(function)
    return float(np.median(seconds)), operations


def _at_depth(depth: int, function: Callable[[], Any]) -> Any:
    return _at_depth(depth - 1, function) if depth else function()


def _operations(function: Any) -> int:
    """All nodes of a graph, those of its branches included."""
    graph = function.graph.as_graph_def()
    bodies = [graph.node, *(f.node_def for f in graph.library.function)]
    return sum(len(nodes) for nodes in bodies)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
