"""Claim a: off the boundary a micro step costs little more than the addition."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import measuring, optimizer_alone, peers


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each set of variables, optimizer and contender."""
    for which in peers.SETS:
        for optimizer in peers.OPTIMIZERS:
            data = optimizer_alone.measured(which, optimizer, quick)
            times = {
                name: optimizer_alone.off_the_boundary(seconds)
                for name, seconds in data["seconds"].items()
                if name != "plain"  # it updates in each step
            }
            for name, numbers in measuring.summary(times, "keras").items():
                yield {
                    "claim": "micro_step",
                    "set": which,
                    "variables": data["variables"],
                    "optimizer": optimizer,
                    "contender": name,
                    **numbers,
                }
