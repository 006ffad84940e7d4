"""Tells whether a larger global batch would help."""

from __future__ import annotations

import warnings
from typing import Any

from keras_accum.callbacks.accumulation_callback import AccumulationCallback
from keras_accum.callbacks.rows import Rows
from keras_accum.callbacks.update_clock import UpdateClock


class GradientNoiseScale(AccumulationCallback):
    """Measures and logs the simple noise scale of the gradients.

    It is the global batch size, in rows, at which the noise in a gradient is as large
    as the gradient: well below it, twice the global batch makes nearly twice the
    progress per update; well above it, hardly any more.

    An accumulating optimizer has all that it takes: the norms of the micro-gradients
    and of their mean, the reduced gradient. It needs two or more of them per update,
    over micro steps and replicas, of equal size and without weights. It is averaged
    over updates, and logged as `gradient_noise_scale`: NaN until it is known. The
    averages are not saved.

    It costs one pass over each micro-gradient, from the first `fit` with it on; sparse
    gradients are made dense for it.

    Args:
        micro_batch_size: Rows that one replica sees in one micro step. None takes it
            from Keras's loss metric; a `train_step` that does not keep it needs this.
        momentum: Of the moving averages over updates, in [0, 1).

    Raises:
        ValueError: A momentum outside of [0, 1), or a size that is no int >= 1.

    Example:

    >>> noise = keras_accum.callbacks.GradientNoiseScale(momentum=0.99)
    >>> noise.momentum
    0.99

    Source: McCandlish et al., An Empirical Model of Large-Batch Training,
        arXiv:1812.06162.
    """

    steers = "the measurement of the gradient noise scale"

    def __init__(
        self, micro_batch_size: int | None = None, momentum: float = 0.95
    ) -> None:
        super().__init__()
        self.momentum = checked_momentum(momentum)
        self._rows = Rows(micro_batch_size)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Attaches the measurement to the optimizer."""
        super().on_train_begin(logs)
        self._attach(self._measure)
        self._clock: Any = None

    def _measure(self) -> None:
        self.optimizer.measure_gradients(noise=True, momentum=self.momentum)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's batches from 0."""
        if self._clock is None:
            self._warn_of_single_micro_batches()
            quantities = {"noise": lambda: self.optimizer.gradient_noise_scale}
            self._clock = UpdateClock(
                self.optimizer, {**quantities, **self._rows.quantities(self.model)}
            )
        else:
            self._clock.begin_epoch()
        self._rows.begin_epoch()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Logs the noise scale, which may be new after an update."""
        if self._clock.has_ticked(self._num_done(batch)):
            self._rows.read(self._clock.values, self._clock.num_done)
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs it once more, for what looks at epochs."""
        self._log(logs)

    def _log(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            replicas = self.model.distribute_strategy.num_replicas_in_sync
            rows = self._rows.mean_per_micro_step / replicas
            logs["gradient_noise_scale"] = self._clock.values["noise"] * rows

    def _warn_of_single_micro_batches(self) -> None:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        if self.optimizer.accumulation_steps * replicas == 1:
            warnings.warn(
                "GradientNoiseScale needs two or more micro-batches per update, over "
                "micro steps and replicas. Received: accumulation_steps=1 on one "
                "replica. It is NaN until there are more.",
                stacklevel=2,
            )


def checked_momentum(momentum: Any) -> float:
    """A float in [0, 1)."""
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
        raise TypeError(f"`momentum` must be a float. Received: momentum={momentum!r}")
    if not 0 <= momentum < 1:
        raise ValueError(
            "`momentum` must be in [0, 1). "
            f"Received: momentum={momentum!r}. Use for example 0.95."
        )
    return float(momentum)
