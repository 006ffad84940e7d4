"""Claim b: a whole window of eight micro steps, its update included."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import measuring, optimizer_alone


def run(quick: bool) -> Iterator[measuring.Record]:
    """Per micro step; without "floor", which never updates."""
    return optimizer_alone.records(
        "window", optimizer_alone.whole_window, "floor", quick
    )
