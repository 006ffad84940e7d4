"""Times that can be compared: medians of rounds, and ratios within a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np


def interleaved(
    contenders: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, np.ndarray]:
    """Runs each contender once a round, so that all meet the same disturbances.

    Args:
        contenders: By name. Each is run twice before, to be warm.
        rounds: How often.

    Returns:
        By name the seconds of each round, of shape (rounds,).
    """
    for _ in range(2):
        for run in contenders.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.asarray(each) for name, each in seconds.items()}


def ratio(seconds: np.ndarray, of: np.ndarray) -> float:
    """How many times longer than `of` it took: the median over the rounds."""
    return float(np.median(seconds / of))
