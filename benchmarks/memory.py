"""Claim d: the memory that accumulation takes, in a process for each contender.

Of the 4 M parameter transformer, whose accumulators are 16 MB, and of 12 variables of
2048x2048, whose are 192 MB: what is there once, such as a larger graph, shows in the
first, and what grows with the variables in the second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator

import keras

from benchmarks import end_to_end, measuring, models, peers, processes

CONTENDERS = ("plain", "keras", "keras_accum")
SUBJECTS = ("transformer", "12 of 2048x2048")
# Freed memory is given back to the system, so that the peak is of what lives.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each subject and contender, as the median of some processes."""
    for subject in SUBJECTS[:1] if quick else SUBJECTS:
        names = CONTENDERS * (1 if quick else 3)
        calls = [(subject, name, f"{quick:d}") for name in names]
        measured = processes.all_measured("memory", calls, ENVIRONMENT)
        peaks: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
        for name, record in zip(names, measured, strict=True):
            peaks[name].append(record)

        def median(name: str, key: str, peaks: dict = peaks) -> float:
            values = sorted(record[key] for record in peaks[name])
            return values[len(values) // 2]

        accumulators = median("plain", "variables_mb")
        for name in CONTENDERS:
            over = {
                key: round(median(name, key) - median("plain", key), 1)
                for key in ("built_mb", "traced_mb", "peak_mb")
            }
            yield {
                "claim": "memory",
                "subject": subject,
                "contender": name,
                "peak_mb": round(median(name, "peak_mb"), 1),
                "accumulators_mb": round(accumulators, 1),
                "built_over_plain_mb": over["built_mb"],
                "traced_over_plain_mb": over["traced_mb"],
                "peak_over_plain_mb": over["peak_mb"],
                "times_accumulators": round(over["peak_mb"] / accumulators, 2),
            }


def _resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _measure(subject: str, contender: str, quick: bool) -> None:
    """In a process of its own: the peak while windows are trained."""
    make = end_to_end.WAYS.get(contender, lambda plain: plain())
    optimizer = make(peers.OPTIMIZERS["adam"])
    if subject == "transformer":
        model, batch = models.transformer(quick)
        variables, before = model.trainable_variables, _resident_mb()
        optimizer.build(variables)
        built = _resident_mb()
        step = end_to_end.step_of(model, batch, optimizer)
    else:
        shapes = peers.SETS[subject][: 2 if quick else None]
        variables = [keras.Variable("zeros", shape=shape) for shape in shapes]
        before = _resident_mb()
        optimizer.build(variables)
        built = _resident_mb()
        step = peers.step_of(optimizer, variables, computed=True)
    step.get_concrete_function()
    traced = _resident_mb()
    peak, is_done = traced, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, _resident_mb())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3 * end_to_end.STEPS):
        step()
    is_done.set()
    watcher.join()
    elements = sum(variable.value.shape.num_elements() for variable in variables)
    record = {
        "variables_mb": 4 * elements / 2**20,
        "built_mb": built - before,
        "traced_mb": traced - built,
        "peak_mb": peak,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    _measure(sys.argv[1], sys.argv[2], bool(int(sys.argv[3])))
