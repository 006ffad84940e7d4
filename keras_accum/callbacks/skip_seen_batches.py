"""Goes on with an interrupted epoch where it was interrupted."""

from __future__ import annotations

from typing import Any

from keras_accum.callbacks.accumulation_callback import AccumulationCallback


class SkipSeenBatches(AccumulationCallback):
    """Skips the batches of an epoch that a restored model has trained on already.

    Keras's callbacks restore weights that were saved in the middle of an epoch, and
    replay the epoch from its start: what came before the save is trained on twice.
    This callback counts the batches of the epoch in a variable that is saved with the
    optimizer, so it agrees with the weights in every file. In the first epoch of a
    `fit` as many batches are drawn from the data, and not trained on.

    It is exact if the data of an epoch comes in the same order again: a dataset that
    is not shuffled, or shuffled alike in each run. Metrics of the epoch that is gone
    on with are those of its remaining batches.

    Put it before the callback that saves, `BackupAndRestore` or `ModelCheckpoint`, and
    into each `fit` of a training that may be interrupted: what is trained without it is
    not counted.

    Example:

    >>> callbacks = [
    ...     keras_accum.callbacks.SkipSeenBatches(),
    ...     keras.callbacks.BackupAndRestore("backup", save_freq=100),
    ... ]
    """

    steers = "which batches are skipped"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the optimizer; a backup may be restored after this."""
        super().on_train_begin(logs)
        _end_skipping(self.model)  # which a fit that was interrupted had begun
        self._is_first_epoch = True
        self._num_skipped = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Has the batches skipped that the first epoch has seen."""
        self._num_skipped = 0
        if self._is_first_epoch and self.optimizer.batches_seen:
            self._num_skipped = self.optimizer.batches_seen
            self._say(f"skips {self._num_skipped} batches that were trained on.")
            self.model.train_function = _Skip(self.model, self._num_skipped)
        self._is_first_epoch = False

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts, before others save."""
        num_done = self._num_done(batch)
        if num_done > self._num_skipped:  # those that are skipped are counted
            self.optimizer.batches_seen = num_done

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The next epoch has seen none, and skips none."""
        self.optimizer.batches_seen = 0
        _end_skipping(self.model)


class _Skip:
    """Stands for a model's train function, and draws batches that it does not see.

    Args:
        model: Whose.
        num_batches: How many, before the train function stands there again.
    """

    def __init__(self, model: Any, num_batches: int) -> None:
        self._model = model
        self._num_batches = num_batches
        self.train_function = model.train_function

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """As a train function is called, for one execution."""
        try:
            for _ in range(self._model.steps_per_execution):
                next(iterator)
        except BaseException:  # the data ends, or the user wants no more
            _end_skipping(self._model)
            raise
        self._num_batches -= self._model.steps_per_execution
        if self._num_batches <= 0:
            _end_skipping(self._model)
        return {}


def _end_skipping(model: Any) -> None:
    if isinstance(model.train_function, _Skip):
        model.train_function = model.train_function.train_function
