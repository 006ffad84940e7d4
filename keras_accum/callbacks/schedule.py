"""Schedules by epoch or by update, and the callback that follows one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_accum.arguments import checked_choice
from keras_accum.callbacks.accumulation_callback import AccumulationCallback
from keras_accum.callbacks.update_clock import UpdateClock

COUNTS = ("epoch", "update")


class ScheduleCallback(AccumulationCallback):
    """Base class: sets one number of the optimizer at epochs or after updates.

    What a subclass gives: `quantity`, the name of the number, for messages and for the
    logs; `_checked(name, value)`, `_present()` and `_set(value)`.

    Args:
        schedule: A callable `count -> value` or `(count, value) -> value`, where
            `value` is the present one; or a dict `{count: value}`, in which a count
            without an entry keeps what there is.
        by: What is counted, from 0: `"epoch"` or `"update"`.
        verbose: 1 tells of each change, 0 does not.
    """

    quantity = ""

    def __init__(self, schedule: Any, by: str, verbose: int) -> None:
        super().__init__()
        self.by = checked_choice("by", by, COUNTS)
        self.verbose = verbose
        self.schedule = self._checked_schedule(schedule)
        self._last_count: int | None = None

    def _checked(self, name: str, value: Any) -> Any:
        raise NotImplementedError

    def _present(self) -> Any:
        raise NotImplementedError

    def _set(self, value: Any) -> None:
        raise NotImplementedError

    def _logged(self) -> Any:
        return self._present()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the optimizer. Nothing is set yet: a backup may be restored first."""
        super().on_train_begin(logs)
        self._last_key: int | None = None
        if self.by == "epoch" or isinstance(self.schedule, Mapping):
            self._last_count = None  # else an update that was served in the last fit
        self._clock: UpdateClock | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets what is due at the epoch."""
        if self.by == "epoch":
            self._follow(epoch)
        else:
            if self._clock is None:
                self._clock = UpdateClock(self.optimizer)
            else:
                self._clock.begin_epoch()
            self._follow(self._clock.updates)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets what is due after an update."""
        if self._clock is not None and self._clock.has_ticked(self._num_done(batch)):
            self._follow(self._clock.updates)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the present value."""
        if logs is not None:
            logs[self.quantity] = self._logged()

    def _follow(self, count: int) -> None:
        if count == self._last_count:
            return
        self._last_count = count
        if isinstance(self.schedule, Mapping):
            keys = [key for key in self.schedule if key <= count]
            key = max(keys, default=None)
            if key is None or key == self._last_key:
                return
            self._last_key = key
            value = self.schedule[key]
        elif _num_arguments(self.schedule) >= 2:
            value = self.schedule(count, self._present())
        else:
            value = self.schedule(count)
        value = self._checked(f"schedule({count})", value)
        self._set(value)
        if self.verbose > 0:
            self._say(
                f"{self.quantity} is {value} from {self.by} {count} on, counted from 0."
            )

    def _checked_schedule(self, schedule: Any) -> Any:
        if callable(schedule):
            return schedule
        if not isinstance(schedule, Mapping):
            raise TypeError(
                "`schedule` must be a callable or a dict {count: value}. Received: "
                f"schedule={schedule!r}. Write for example {{0: ..., 5: ...}}."
            )
        if not schedule:
            raise ValueError(
                "`schedule` must have an entry. Received: schedule={}. Write for "
                "example {0: ..., 5: ...}."
            )
        for count in schedule:
            is_integer = isinstance(count, (int, np.integer))
            if isinstance(count, bool) or not is_integer or count < 0:
                raise ValueError(
                    "`schedule` must have integers >= 0 as keys, epochs or updates "
                    f"counted from 0. Received: key {count!r} in schedule={schedule}"
                )
        return {
            int(count): self._checked(f"schedule[{count}]", value)
            for count, value in schedule.items()
        }


def _num_arguments(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(
        parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        for parameter in parameters
    )
