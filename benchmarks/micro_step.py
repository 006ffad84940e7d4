"""Claim a: off the boundary a micro step costs little more than the addition."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import measuring, optimizer_alone


def run(quick: bool) -> Iterator[measuring.Record]:
    """Per micro step; without "plain", which updates in each step."""
    return optimizer_alone.records(
        "micro_step", optimizer_alone.off_the_boundary, "plain", quick
    )
