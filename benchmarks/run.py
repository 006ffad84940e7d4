"""Runs the benchmarks, and writes what they found: lines of JSON, a table, a plot.

python -m benchmarks.run [--quick] [--only=micro_step,window] [--output=folder]
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

# Set before TensorFlow is imported, also in the processes that are started.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import app, flags

from benchmarks import (
    communication,
    end_to_end,
    growth,
    measuring,
    memory,
    micro_step,
    report,
    tracing,
    window,
)

_QUICK = flags.DEFINE_bool("quick", False, "Few variables and rounds: under 2 minutes.")
_ONLY = flags.DEFINE_list("only", [], "Claims to measure; none for all.")
_OUTPUT = flags.DEFINE_string(
    "output", str(pathlib.Path(__file__).parent / "results"), "Where results go."
)
_PEERS = flags.DEFINE_string(
    "peers_python", None, "A Python that has GradientAccumulator (see the Makefile)."
)

TIME_LIMIT_S = 300


def gradient_accumulator(quick: bool) -> Iterator[measuring.Record]:
    """GradientAccumulator's windows, in its own environment, if there is one."""
    if _PEERS.value is None:
        return
    script = pathlib.Path(__file__).parent / "peer_gradient_accumulator.py"
    finished = subprocess.run(  # which kills it when the time is over
        [_PEERS.value, str(script), *(["--quick"] if quick else [])],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if finished.returncode:
        report.say(f"GradientAccumulator failed: {finished.stderr[-300:]}")
        return
    for line in finished.stdout.splitlines():
        yield json.loads(line)


CLAIMS = {
    "micro_step": micro_step.run,
    "window": window.run,
    "gradient_accumulator": gradient_accumulator,
    "tracing": tracing.run,
    "communication": communication.run,
    "memory": memory.run,
    "end_to_end": end_to_end.run,
    "growth": growth.run,
}


def main(argv: Sequence[str]) -> None:
    """Measures, and shows each record as it is found."""
    if len(argv) > 1:
        raise app.UsageError(f"Flags only. Received: {argv[1:]}")
    unknown = set(_ONLY.value) - set(CLAIMS)
    if unknown:
        raise app.UsageError(
            f"`--only` must name claims of {sorted(CLAIMS)}. Received: {unknown}."
        )
    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**measuring.environment(), "quick": _QUICK.value}
    begin = time.monotonic()
    records: list[measuring.Record] = []
    path = folder / ("quick.jsonl" if _QUICK.value else "results.jsonl")
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"claim": "environment", **environment}) + "\n")
        for name, claim in CLAIMS.items():
            if _ONLY.value and name not in _ONLY.value:
                continue
            for record in claim(_QUICK.value):
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                report.say(json.dumps(record))
            report.say(f"{name}: {time.monotonic() - begin:.0f} s")
    table = report.table(records, environment)
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    report.plot(records, path.with_suffix(".png"))
    report.say(table)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore
    app.run(main)
