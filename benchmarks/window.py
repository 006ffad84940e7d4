"""Claim b: a whole window of eight micro steps, its update included."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import measuring, optimizer_alone, peers


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each set of variables, optimizer and contender: per micro step."""
    for which in peers.SETS:
        for optimizer in peers.OPTIMIZERS:
            data = optimizer_alone.measured(which, optimizer, quick)
            times = {
                name: optimizer_alone.whole_window(seconds)
                for name, seconds in data["seconds"].items()
                if name != "floor"  # it never updates
            }
            for name, numbers in measuring.summary(times, "keras").items():
                yield {
                    "claim": "window",
                    "set": which,
                    "variables": data["variables"],
                    "optimizer": optimizer,
                    "contender": name,
                    **numbers,
                }
