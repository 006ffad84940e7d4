"""Claim d: the memory that accumulation takes, in a process for each contender."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks import measuring

TIME_LIMIT_S = 180
CONTENDERS = ("plain", "keras", "keras_accum")


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each contender, as the median of some processes."""
    repeats = 1 if quick else 3
    peaks: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for _ in range(repeats):
        for name in CONTENDERS:
            finished = subprocess.run(  # which kills it when the time is over
                [sys.executable, "-m", "benchmarks.memory", name, str(int(quick))],
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
                check=True,
            )
            peaks[name].append(json.loads(finished.stdout.splitlines()[-1]))

    def median(name: str, key: str) -> float:
        values = sorted(record[key] for record in peaks[name])
        return values[len(values) // 2]

    for name in CONTENDERS:
        over_plain = median(name, "peak_mb") - median("plain", "peak_mb")
        accumulators = median(name, "accumulators_mb")
        yield {
            "claim": "memory",
            "model": "transformer",
            "contender": name,
            "peak_mb": round(median(name, "peak_mb"), 1),
            "over_plain_mb": round(over_plain, 1),
            "accumulators_mb": round(accumulators, 1),
            "times_accumulators": round(over_plain / accumulators, 2)
            if name != "plain"
            else None,
        }


def _resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _measure(contender: str, quick: bool) -> None:
    """In a process of its own: the peak while windows are trained."""
    from benchmarks import end_to_end, models, peers

    plain = peers.OPTIMIZERS["adam"]
    optimizer = end_to_end.WAYS.get(contender, lambda make: make())(plain)
    model, batch = models.transformer(quick)
    step = end_to_end._step(model, batch, optimizer)
    step()
    peak, is_done = _resident_mb(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, _resident_mb())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3 * end_to_end.STEPS):
        step()
    is_done.set()
    watcher.join()
    accumulators = 4 * sum(v.shape.num_elements() for v in _natives(model)) / 2**20
    print(json.dumps({"peak_mb": peak, "accumulators_mb": accumulators}))


def _natives(model: object) -> list:
    return [variable.value for variable in model.trainable_variables]


if __name__ == "__main__":
    _measure(sys.argv[1], bool(int(sys.argv[2])))
