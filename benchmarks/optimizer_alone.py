"""Micro steps of an optimizer alone: what claims a, b and f are read from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import measuring, peers

STEPS = 8  # per window
QUICK = {"600 of 64": 60, "300 of 64x64": 30, "12 of 2048x2048": 2}


@functools.cache
def measured(which: str, optimizer: str, quick: bool) -> dict:
    """Traces each contender, and times whole windows of it, in rounds.

    Returns:
        `trace_s` and `operations` by contender; `seconds` of shape (rounds, STEPS) by
        contender, the last one of a window being the boundary.
    """
    shapes = peers.SETS[which][: QUICK[which] if quick else None]
    trace_s, operations, contenders = {}, {}, {}
    for name, way in peers.WAYS.items():
        micro_step = way(shapes, optimizer, STEPS)
        begin = time.perf_counter()
        function = micro_step.get_concrete_function()
        trace_s[name] = time.perf_counter() - begin
        operations[name] = _operations(function)
        contenders[name] = micro_step
    for _ in range(STEPS - 2):  # two are made to warm up
        for micro_step in contenders.values():
            micro_step()
    seconds = measuring.interleaved(contenders, 3 if quick else 15, STEPS)
    return {
        "trace_s": trace_s,
        "operations": operations,
        "seconds": seconds,
        "variables": len(shapes),
    }


def _operations(function: Any) -> int:
    """All nodes of a graph, those of its branches included."""
    graph = function.graph.as_graph_def()
    bodies = [graph.node, *(f.node_def for f in graph.library.function)]
    return sum(len(nodes) for nodes in bodies)


def records(
    claim: str, of_rounds: Callable[..., np.ndarray], without: str, quick: bool
) -> Iterator[measuring.Record]:
    """One record for each set of variables, optimizer and contender.

    Args:
        claim: Its name.
        of_rounds: From seconds of shape (rounds, STEPS) to those of each round.
        without: The contender that the claim says nothing of.
        quick: Few variables and rounds.
    """
    for which in peers.SETS:
        for optimizer in peers.OPTIMIZERS:
            data = measured(which, optimizer, quick)
            times = {
                name: of_rounds(seconds)
                for name, seconds in data["seconds"].items()
                if name != without
            }
            for name, numbers in measuring.summary(times, "keras").items():
                yield {
                    "claim": claim,
                    "set": which,
                    "variables": data["variables"],
                    "optimizer": optimizer,
                    "contender": name,
                    **numbers,
                }


def off_the_boundary(seconds: np.ndarray) -> np.ndarray:
    """Of each round, the median of the micro steps that make no update."""
    return np.median(seconds[:, :-1], axis=1)


def whole_window(seconds: np.ndarray) -> np.ndarray:
    """Of each round, the mean over the micro steps of a window."""
    return seconds.mean(axis=1)
