"""A table and a plot of what was measured."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import matplotlib as mpl

mpl.use("agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

from benchmarks.measuring import Record

COLOURS = {"keras": "tab:orange", "by hand": "tab:gray", "keras_accum": "tab:blue"}


def say(text: str) -> None:
    """Prints a line: progress, and what was found."""
    print(text, flush=True)


def table(records: Sequence[Record], environment: Record) -> str:
    """A table of each claim, in Markdown."""
    lines = [", ".join(f"{key} {value}" for key, value in environment.items()), ""]
    for claim in dict.fromkeys(record["claim"] for record in records):
        own = [record for record in records if record["claim"] == claim]
        columns = list(dict.fromkeys(key for record in own for key in record))
        columns.remove("claim")
        lines += [f"## {claim}", "", "| " + " | ".join(columns) + " |"]
        lines.append("|" + "---|" * len(columns))
        for record in own:
            cells = [str(record.get(column, "")) for column in columns]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws how long a micro step takes, off the boundary and over a window."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, claim, title in zip(
        axes,
        ("micro_step", "window"),
        ("off the boundary", "mean of a window of 8"),
        strict=True,
    ):
        own = [
            record
            for record in records
            if record["claim"] == claim and record["optimizer"] == "adam"
        ]
        sets = list(dict.fromkeys(record["set"] for record in own))
        for place, (name, colour) in enumerate(COLOURS.items()):
            times = [
                next(
                    (r["ms"] for r in own if r["set"] == s and r["contender"] == name),
                    float("nan"),
                )
                for s in sets
            ]
            positions = [i + 0.27 * (place - 1) for i in range(len(sets))]
            axis.bar(positions, times, 0.25, label=name, color=colour)
        axis.set_xticks(range(len(sets)), sets)
        axis.set_title(f"Adam, micro step, {title}")
        axis.set_ylabel("ms")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
