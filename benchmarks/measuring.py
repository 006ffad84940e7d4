"""Times that can be compared: medians of rounds, and ratios within a round."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_accum

Record = dict[str, Any]


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1
) -> dict[str, np.ndarray]:
    """Runs each contender once a round, so that all meet the same disturbances.

    Args:
        contenders: By name. Each is called twice before, to be warm.
        rounds: How often.
        calls: Of each contender in a round.

    Returns:
        By name the seconds of each call, of shape (rounds, calls).
    """
    for call in contenders.values():
        call()
        call()
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times = []
            for _ in range(calls):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            seconds[name].append(times)
    return {name: np.asarray(times) for name, times in seconds.items()}


def summary(by_round: Mapping[str, np.ndarray], against: str) -> dict[str, Record]:
    """For each contender its milliseconds, and how many times as fast it is.

    Args:
        by_round: By name the seconds of each round, of shape (rounds,).
        against: Whose time is divided by the contender's, round by round.
    """
    return {
        name: {
            "ms": round(float(np.median(seconds)) * 1e3, 4),
            f"times_as_fast_as_{against}": round(
                float(np.median(by_round[against] / seconds)), 3
            ),
        }
        for name, seconds in by_round.items()
    }


def environment() -> Record:
    """What the numbers were measured on."""
    return {
        "keras_accum": keras_accum.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "machine": platform.machine(),
    }
