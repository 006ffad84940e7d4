"""What becomes of a window that is open when an epoch or the training ends."""

from __future__ import annotations

import warnings
from typing import Any

from keras_accum.already_reduced import leaf_optimizers
from keras_accum.arguments import checked_choice
from keras_accum.callbacks.accumulation_callback import AccumulationCallback

POLICIES = ("apply", "carry", "drop")
ENDS = ("epoch", "train")


class PartialWindow(AccumulationCallback):
    """Applies, carries over or drops the window that is open at an end.

    Applied at the end of an epoch, it is so before validation, and before the
    `on_epoch_end` of the callbacks that come later in the list: put it before
    `ModelCheckpoint` and the like. With `at="train"` it is so at the end of the last
    epoch, since Keras finishes moving averages before `on_train_end`; put it after
    `EarlyStopping` then.

    It warns once when an epoch is shorter than a window.

    Args:
        policy: `"apply"` updates with the micro-batches that the window holds, and
            divides by their number; the next window begins at position 0. `"carry"`
            leaves it open: the next epoch, or the next `fit`, goes on with it.
            `"drop"` forgets it; the next window begins at position 0.
        at: `"epoch"` or `"train"`, at whose end.

    Raises:
        ValueError: A policy or an end that there is not.

    Example:

    >>> leftovers = keras_accum.callbacks.PartialWindow("apply", at="epoch")
    >>> leftovers.policy
    'apply'
    """

    steers = "what becomes of an open window"

    def __init__(self, policy: str = "apply", at: str = "epoch") -> None:
        super().__init__()
        self.policy = checked_choice("policy", policy, POLICIES)
        self.at = checked_choice("at", at, ENDS)
        self._has_warned = False
        self._is_in_epoch = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes whether it is the last one."""
        self._is_in_epoch = True
        self._num_batches = self._needed = 0
        self._is_last = epoch + 1 == (self.params or {}).get("epochs")

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Notes how many micro steps the epoch must have to make an update."""
        if batch == 0:  # all callbacks have seen the epoch begin: N is set
            self._needed = int(self.optimizer.micro_steps_left)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts micro steps."""
        self._num_batches = self._num_done(batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """In `fit`, validation begins: it is to see the window applied."""
        if self._is_in_epoch:
            self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The epoch has ended without a validation."""
        if self._is_in_epoch:
            self._end_epoch()
        elif self.at == "train" and self.model.stop_training:
            self._close()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Training was stopped by a callback that came later."""
        if self.at == "train" and int(self.optimizer.position):
            if self.policy == "apply" and self._is_averaged():
                warnings.warn(
                    "Training was stopped by a callback that comes after PartialWindow "
                    "in the list, and the moving averages are in the variables "
                    "already: the open window is not applied. Put PartialWindow after "
                    "that callback.",
                    stacklevel=2,
                )
                return
            self._close()

    def _is_averaged(self) -> bool:
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return any(leaf.use_ema for leaf in leaf_optimizers(optimizer))

    def _end_epoch(self) -> None:
        self._is_in_epoch = False
        if self._num_batches < self._needed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The epoch had {self._num_batches} micro steps, and its window is "
                f"full only after {self._needed}: no update of a whole window was made "
                f"in it. PartialWindow's policy is {self.policy!r}.",
                stacklevel=2,
            )
        is_stopped = self.model.stop_training
        if self.at == "epoch" or self._is_last or is_stopped:
            self._close()

    def _close(self) -> None:
        if self.policy == "apply":
            self.optimizer.flush()
        elif self.policy == "drop" and int(self.optimizer.position):
            self.optimizer.reset()
