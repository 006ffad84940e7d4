"""Micro steps of an optimizer alone: what claims a and b are read from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import measuring, peers

STEPS = 8  # per window
QUICK = {"600 of 64": 60, "300 of 64x64": 30, "12 of 2048x2048": 2}


@functools.cache
def measured(which: str, optimizer: str, quick: bool) -> dict:
    """Times whole windows of each contender, in rounds.

    Returns:
        `seconds` of shape (rounds, STEPS) by contender, the last one of a window being
        the boundary; and the number of `variables`.
    """
    shapes = peers.SETS[which][: QUICK[which] if quick else None]
    contenders = {
        name: way(shapes, optimizer, STEPS) for name, way in peers.WAYS.items()
    }
    for _ in range(STEPS - 2):  # two are made to warm up
        for micro_step in contenders.values():
            micro_step()
    seconds = measuring.interleaved(contenders, 3 if quick else 10, STEPS)
    return {"seconds": seconds, "variables": len(shapes)}


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
