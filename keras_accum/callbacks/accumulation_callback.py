"""What the callbacks have in common: the optimizer they find, the words they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from absl import logging

from keras_accum.arguments import StepIsTraced
from keras_accum.optimizer import Accumulation


class AccumulationCallback(keras.callbacks.Callback):
    """Base class: has the model's accumulating `optimizer` once training has begun."""

    steers: str | None = None  # what only one callback of a `fit` may steer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the optimizer.

        Raises:
            ValueError: The model's optimizer does not accumulate, or another callback
                of this `fit` steers the same.
        """
        self.optimizer: Any = self._found(self.model.optimizer)
        self._claim()

    def _found(self, optimizer: Any) -> Accumulation:
        """The accumulating optimizer, also from inside Keras's LossScaleOptimizer."""
        if not isinstance(optimizer, Accumulation):
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not isinstance(optimizer, Accumulation):
            raise ValueError(
                f"{type(self).__name__} needs an optimizer of keras_accum. "
                f"Received: optimizer={type(optimizer).__name__}. Wrap it in "
                "keras_accum.AccumulationOptimizer(..., accumulation_steps=...)."
            )
        return optimizer

    def _claim(self) -> None:
        if self.steers is None or not self.params:
            return
        # Keras hands all callbacks of one `fit` the same dict.
        claims = self.params.setdefault("keras_accum", {})
        other = claims.setdefault(self.steers, self)
        if other is not self:
            raise ValueError(
                f"At most one callback of a `fit` may steer {self.steers}. Received: "
                f"{type(other).__name__} and {type(self).__name__}. Leave one out."
            )

    def _num_done(self, batch: int) -> int:
        """Batches of the epoch that are done at `on_train_batch_end`.

        Of several steps in one execution Keras 3.15 gives the last one's index, Keras
        3.10 the first one's.
        """
        steps = self.model.steps_per_execution
        num_done = batch - batch % steps + steps
        num_batches = (self.params or {}).get("steps")
        return num_done if num_batches is None else min(num_done, num_batches)

    def _attach(self, attach: Callable[[], None]) -> None:
        """Attaches to the optimizer, with a retrace if the model was fitted before."""
        try:
            attach()
        except StepIsTraced:
            self.model.make_train_function(force=True)
            self.optimizer.forget_traces()
            attach()

    def _say(self, message: str) -> None:
        """Tells of a change, as Keras's callbacks do."""
        message = f"{type(self).__name__}: {message}"
        if keras.config.is_interactive_logging_enabled():
            print(f"\n{message}", flush=True)
        else:
            logging.info(message)
