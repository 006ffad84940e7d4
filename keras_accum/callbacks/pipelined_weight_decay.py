"""Decays weights once per update, by a rate that follows a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keras_accum.callbacks.schedule import ScheduleCallback
from keras_accum.weight_decay import Filter, checked_rate


class PipelinedWeightDecay(ScheduleCallback):
    """Decays weights once per update: at the boundary, after the reduction.

    So it is exact under any number of replicas, workers and accumulation steps, and
    any loss scale. With w a variable, g its reduced gradient and lr the learning rate:

    - `decoupled=True` is the form of AdamW: `w <- w - lr * rate * w`;
    - with `times_learning_rate=False` the independent form: `w <- w - rate * w`;
    - `decoupled=False` is coupled, L2: `g <- g + rate * w`, before clipping.

    A variable that got no gradient in a window does not decay then. The rate is a
    variable: a schedule takes effect without a retrace. At the end of an epoch it is
    logged as `pipelined_weight_decay`. When training ends, so does the decay; if it
    ends by an exception, set `optimizer.pipelined_weight_decay = 0`.

    Without callbacks, `optimizer.decay_weights(...)` does the same.

    Args:
        weight_decay: The rate, a finite float >= 0, until the schedule has its first
            entry.
        schedule: None; a dict `{count: rate}`, in which a count without an entry keeps
            what there is; or a callable `count -> rate` or `(count, rate) -> rate`,
            where `count` is the epoch or the number of updates made, from 0.
        decoupled: Whether the variable decays, and not its gradient.
        filter: Which variables decay. None: all trainable ones. A callable from
            variable to bool: those for which it is True (Graphcore's
            `weight_decay_filter_fn`). A name, or several: all but those in whose path
            one is found (Keras's `exclude_from_weight_decay`).
        times_learning_rate: Whether a decoupled decay has the learning rate as factor.
        by: What the schedule counts, `"epoch"` or `"update"`.
        beside_inner: Whether the inner optimizer may decay by itself as well.
        verbose: 1 tells of each change, 0 does not.

    Raises:
        TypeError: An argument's type is wrong.
        ValueError: A rate or the schedule is wrong; in `fit`, the inner optimizer
            decays by itself.

    Example:

    >>> decay = keras_accum.callbacks.PipelinedWeightDecay(
    ...     0.01, schedule={30: 0.001, 60: 0.0}, filter=["bias", "gamma", "beta"])
    >>> decay.schedule
    {0: 0.01, 30: 0.001, 60: 0.0}

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization,
        arXiv:1711.05101; the coupled form is that of Graphcore's `IPUOptimizer`.
    """

    steers = quantity = "pipelined_weight_decay"

    def __init__(
        self,
        weight_decay: float,
        schedule: Callable[..., float] | Mapping[int, float] | None = None,
        decoupled: bool = True,
        filter: Filter = None,
        times_learning_rate: bool = True,
        by: str = "epoch",
        beside_inner: bool = False,
        verbose: int = 0,
    ) -> None:
        self.weight_decay = checked_rate("weight_decay", weight_decay)
        if schedule is None:
            schedule = {0: self.weight_decay}
        super().__init__(schedule, by, verbose)
        if isinstance(self.schedule, Mapping):
            self.schedule = {0: self.weight_decay, **self.schedule}
        self.decoupled = decoupled
        self.filter = filter
        self.times_learning_rate = times_learning_rate
        self.beside_inner = beside_inner

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Attaches the decay to the optimizer."""
        super().on_train_begin(logs)
        self._last_count = None  # the rate was given back when the last fit ended
        self.optimizer._lend_weight_decay()
        try:
            self._attach(self._decay)
        except BaseException:
            self.optimizer._end_lent_weight_decay()
            raise

    def _decay(self) -> None:
        self.optimizer.decay_weights(
            self.weight_decay,
            decoupled=self.decoupled,
            times_learning_rate=self.times_learning_rate,
            filter=self.filter,
            beside_inner=self.beside_inner,
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives back the rate that there was before."""
        self.optimizer._end_lent_weight_decay()

    def _checked(self, name: str, value: Any) -> float:
        return checked_rate(name, value)

    def _present(self) -> float:
        return float(self.optimizer.pipelined_weight_decay)

    def _set(self, value: float) -> None:
        self.optimizer.pipelined_weight_decay = value
