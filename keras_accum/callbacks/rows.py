"""How many rows a micro step has, over all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np


class Rows:
    """Counts rows, by what Keras's loss metric weighs its mean with.

    Keras tells callbacks nothing of the data; but its `train_step` weighs the loss of a
    batch by its rows, and keeps their sum over the epoch and the replicas.

    Args:
        micro_batch_size: Rows that one replica sees in one micro step; None for what
            the metric tells.
    """

    def __init__(self, micro_batch_size: int | None) -> None:
        self.micro_batch_size: int | None = None
        if micro_batch_size is not None:
            self.micro_batch_size = checked_rows("micro_batch_size", micro_batch_size)
        self.per_micro_step = self.mean_per_micro_step = float("nan")

    def quantities(self, model: keras.Model) -> Mapping[str, Callable[[], Any]]:
        """What is to be read, by name, for `read`."""
        if self.micro_batch_size is not None:
            replicas = model.distribute_strategy.num_replicas_in_sync
            self.per_micro_step = float(self.micro_batch_size * replicas)
            self.mean_per_micro_step = self.per_micro_step
            return {}
        for metric in model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return {"rows": functools.partial(getattr, metric, "count")}
        return {}

    def begin_epoch(self) -> None:
        """The metric starts from 0."""
        self._rows, self._batches = 0.0, 0

    def read(self, values: Mapping[str, float], batches: int) -> None:
        """Takes the rows of the batches done in the epoch, since the last call."""
        if "rows" not in values:
            return
        rows = values["rows"]
        if batches > self._batches and rows > self._rows:
            new = rows - self._rows
            self.per_micro_step = new / (batches - self._batches)
            self.mean_per_micro_step = rows / batches  # of the epoch, until now
        self._rows, self._batches = rows, batches


def checked_rows(name: str, rows: Any) -> int:
    """An int >= 1; NumPy integers are converted."""
    is_integer = isinstance(rows, (int, np.integer)) and not isinstance(rows, bool)
    if not is_integer or rows < 1:
        raise ValueError(
            f"`{name}` must be an integer >= 1, a number of rows. "
            f"Received: {name}={rows!r}. Pass the size of a batch."
        )
    return int(rows)
