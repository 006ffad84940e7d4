"""Draws the history of an `AccumulationMonitor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_accum.optional_imports import imported

# One panel each; the counts as steps, the rest as lines.
PANELS = (
    ("loss", "loss, mean of the epoch", False),
    ("learning_rate", "learning rate", False),
    ("gradient_norm", "norm of the reduced gradient", False),
    ("global_batch_size", "global batch size, rows", True),
    ("loss_scale", "loss scale", True),
    ("skipped_windows", "skipped windows", True),
)
LOGARITHMIC = ("loss_scale", "gradient_norm")


def draw(history: Mapping[str, Sequence[float]], path: str | Path) -> None:
    """Draws a history over its updates.

    Args:
        history: Equally long lists, among them `updates`.
        path: Of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw.
    """
    if not history["updates"]:
        raise ValueError(
            "There must be an update to draw. Received: a history without one. Pass "
            "the monitor to `fit(callbacks=[...])` first."
        )
    figure = imported("matplotlib.figure", "plot").Figure(
        figsize=(10, 7), layout="constrained"
    )
    noise = history["gradient_noise_scale"]
    marker = "." if len(noise) < 100 else ""
    panels = figure.subplots(3, 2, sharex=True).flat
    for axes, (key, title, is_count) in zip(panels, PANELS, strict=True):
        style = "steps-post" if is_count else "default"
        axes.plot(history["updates"], history[key], drawstyle=style, marker=marker)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if key in LOGARITHMIC and min(history[key]) > 0:
            axes.set_yscale("log", base=2 if is_count else 10)
        if key == "global_batch_size" and not all(map(math.isnan, noise)):
            axes.plot(history["updates"], noise, label="gradient noise scale")
            axes.set_yscale("log", base=2)
            axes.legend()
    for axes in figure.axes[-2:]:
        axes.set_xlabel("updates")
    figure.savefig(path, dpi=120)
