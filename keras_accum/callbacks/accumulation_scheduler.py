"""Sets the number of micro steps per update, by epoch or by update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from keras_accum.arguments import checked_accumulation_steps
from keras_accum.callbacks.rows import checked_rows
from keras_accum.callbacks.schedule import ScheduleCallback


class AccumulationScheduler(ScheduleCallback):
    """Sets `accumulation_steps` at the beginning of an epoch, or after an update.

    The compiled step reads it from a variable: it is not traced again. A window that
    is open keeps its length, and the next one has the new length. Until the schedule
    has its first entry, the optimizer's own number holds. At the end of an epoch the
    present number is logged as `accumulation_steps`.

    Args:
        schedule: A dict `{count: steps}`, in which a count without an entry keeps what
            there is; or a callable `count -> steps` or `(count, steps) -> steps`,
            where `count` is the epoch or the number of updates made, from 0.
        by: `"epoch"` or `"update"`. Within one call of a compiled step
            (`steps_per_execution` > 1) nothing is set, so that several windows of the
            old length may follow an update that was to change it.
        verbose: 1 tells of each change, 0 does not.

    Raises:
        TypeError: The schedule is neither a callable nor a dict.
        ValueError: A dict is empty, or has a count that is no int >= 0 or steps that
            are no int >= 1; in `fit`, steps that the callable returns are not.

    Example:

    >>> scheduler = keras_accum.callbacks.AccumulationScheduler({0: 1, 10: 4})
    >>> scheduler.schedule
    {0: 1, 10: 4}

    Source: Lightning's GradientAccumulationScheduler has the dict; a number of steps
        that grows with the updates is optax's `MultiSteps(every_k_schedule)`.
    """

    steers = quantity = "accumulation_steps"

    def __init__(
        self,
        schedule: Callable[..., int] | Mapping[int, int],
        by: str = "epoch",
        verbose: int = 0,
    ) -> None:
        super().__init__(schedule, by, verbose)

    @classmethod
    def for_global_batch(
        cls,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        accumulation_steps: int | None = None,
    ) -> AccumulationScheduler:
        """Keeps the global batch size, whatever the number of replicas.

        The steps are computed when training begins, from the replicas that there are
        then. If they do not come out even they are rounded, with a warning that names
        the global batch size that results.

        Args:
            global_batch_size: Rows per update, over all replicas; or None if the steps
                are given.
            micro_batch_size: Rows that one replica sees in one micro step.
            accumulation_steps: Or None if the global batch size is given.

        Raises:
            ValueError: Both or neither of the global batch size and the steps are
                given, or one of the numbers is no int >= 1.

        Example:

        >>> scheduler = keras_accum.callbacks.AccumulationScheduler.for_global_batch(
        ...     global_batch_size=12, micro_batch_size=3)
        >>> scheduler.steps_on(replicas=2)
        2
        """
        return _ForGlobalBatch(global_batch_size, micro_batch_size, accumulation_steps)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the optimizer, and sees to it that it has accumulators."""
        super().on_train_begin(logs)
        self._attach(self._reserve)

    def _reserve(self) -> None:
        """Windows of one have no accumulators, until more was once asked for."""
        own = self.optimizer.accumulation_steps
        is_dict = isinstance(self.schedule, Mapping)
        most = max(self.schedule.values()) if is_dict else max(own, 2)
        if most > own:
            self.optimizer.accumulation_steps = most
            self.optimizer.accumulation_steps = own

    def _checked(self, name: str, value: Any) -> int:
        return checked_accumulation_steps(value, name)

    def _present(self) -> int:
        return self.optimizer.accumulation_steps

    def _set(self, value: int) -> None:
        if value != self.optimizer.accumulation_steps:
            self.optimizer.accumulation_steps = value


class _ForGlobalBatch(AccumulationScheduler):
    """See `AccumulationScheduler.for_global_batch`."""

    def __init__(
        self,
        global_batch_size: int | None,
        micro_batch_size: int | None,
        accumulation_steps: int | None,
    ) -> None:
        super().__init__(self._planned)
        if (global_batch_size is None) == (accumulation_steps is None):
            raise ValueError(
                "Exactly one of `global_batch_size` and `accumulation_steps` must be "
                f"given. Received: global_batch_size={global_batch_size!r}, "
                f"accumulation_steps={accumulation_steps!r}. The other one follows."
            )
        self.micro_batch_size = checked_rows("micro_batch_size", micro_batch_size)
        self._steps = self._rows = None
        if accumulation_steps is None:
            self._rows = checked_rows("global_batch_size", global_batch_size)
        else:
            self._steps = checked_accumulation_steps(accumulation_steps)

    def steps_on(self, replicas: int) -> int:
        """Micro steps per update on a number of replicas; warns if it is rounded."""
        if self._rows is None:
            return self._steps or 1
        per_step = self.micro_batch_size * replicas
        steps = max(1, (2 * self._rows + per_step) // (2 * per_step))
        if steps * per_step != self._rows:
            warnings.warn(
                f"global_batch_size={self._rows} is no multiple of micro_batch_size="
                f"{self.micro_batch_size} x {replicas} replicas. accumulation_steps is "
                f"rounded to {steps}, and the global batch size is {steps * per_step}.",
                stacklevel=2,
            )
        return steps

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Computes the steps from the replicas there are."""
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        self.accumulation_steps = self.steps_on(replicas)
        self.global_batch_size = self.accumulation_steps * self.micro_batch_size
        self.global_batch_size *= replicas
        super().on_train_begin(logs)

    def _planned(self, count: int) -> int:
        return self.accumulation_steps
