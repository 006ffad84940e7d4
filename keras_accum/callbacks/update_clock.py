"""Tells when a window has closed, with at most one transfer per update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

Quantity = Callable[[], Any]


class UpdateClock:
    """Counts micro steps in Python, and asks the device only when a window is due.

    Reading a variable waits for the step that writes it. Counting tells when there is
    something new to be read. A `flush`, a `reset` or another window length, from
    Python, is noticed too.

    Args:
        optimizer: An accumulating one.
        quantities: By name, what is read beside: each call gives a scalar tensor.
        every: How many windows pass from one reading to the next; `"epoch"` for all
            that an epoch has.
    """

    def __init__(
        self,
        optimizer: Any,
        quantities: Mapping[str, Quantity] | None = None,
        every: int | str = 1,
    ) -> None:
        self._optimizer = optimizer
        self._every = every
        self._quantities = {
            "updates": lambda: optimizer.iterations,
            "micro_steps_left": lambda: optimizer.micro_steps_left,
            **(quantities or {}),
        }
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Reads, and counts the batches of an epoch from 0."""
        self.num_done = 0
        self.read()

    def read(self) -> None:
        """Reads all quantities, in one transfer, into `values`."""
        scalars = [
            tf.cast(tf.convert_to_tensor(quantity()), tf.float64)
            for quantity in self._quantities.values()
        ]
        numbers = tf.stack(scalars).numpy().tolist()
        self.values: dict[str, float] = dict(
            zip(self._quantities, numbers, strict=True)
        )
        self.updates = int(self.values["updates"])
        self.micro_steps_left = int(self.values["micro_steps_left"])
        self._changes = self._optimizer.window_changes
        self._surplus = 0
        if isinstance(self._every, int):
            self._surplus = (self._every - 1) * self._optimizer.accumulation_steps

    def has_ticked(self, num_done: int) -> bool:
        """Counts micro steps; reads if a window has closed since.

        Args:
            num_done: Micro steps taken in this epoch until now.

        Returns:
            Whether there are new `values`.
        """
        self.micro_steps_left -= num_done - self.num_done
        self.num_done = num_done
        is_changed = self._changes != self._optimizer.window_changes
        is_due = self.micro_steps_left <= -self._surplus or is_changed
        if is_due and self._every != "epoch":
            self.read()
            return True
        return False
