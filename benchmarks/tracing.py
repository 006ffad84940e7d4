"""Claim f: what it takes to trace a micro step, and how large its graph is."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import measuring, optimizer_alone, peers


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each contender, with Adam around the most variables."""
    which, optimizer = next(iter(peers.SETS)), "adam"
    data = optimizer_alone.measured(which, optimizer, quick)
    for name, seconds in data["trace_s"].items():
        yield {
            "claim": "tracing",
            "variables": data["variables"],
            "optimizer": optimizer,
            "contender": name,
            "trace_s": round(seconds, 3),
            "times_plain": round(seconds / data["trace_s"]["plain"], 3),
            "operations": data["operations"][name],
        }
