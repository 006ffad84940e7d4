"""A training that waits for its test before each micro step; see test_interruption.

    python -m tests.integration.interrupted_program MODE FOLDER

Before each micro step it prints a line, and reads one: the test answers, or kills it.
"""

import pathlib
import sys

import keras
import numpy as np

import keras_accum
from tests import training

STEPS = 3  # which 8 batches are no multiple of: windows stay open across epochs
BATCHES = 8
EPOCHS = 3
SAVE_EVERY = 2  # batches, where epochs are gone on with in their middle


class WaitForTest(keras.callbacks.Callback):
    """Lets the test decide whether a micro step is taken."""

    def on_train_batch_begin(self, batch, logs=None):
        """Says where it is, and waits."""
        print("micro step", flush=True)
        if not sys.stdin.readline():
            sys.exit("the test has gone")


def make_model() -> keras.Model:
    """A network whose optimizer has slots, a schedule, a decay and an average."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 8)
    optimizer = keras.optimizers.SGD(
        schedule, momentum=0.9, weight_decay=0.01, use_ema=True, ema_momentum=0.5
    )
    model = training.network(keras_accum.AccumulationOptimizer(optimizer, STEPS))
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model, callbacks: list, initial_epoch: int = 0) -> None:
    """Fits in a fixed order of the data."""
    x, y = training.rows(BATCHES * training.ROWS)
    model.fit(
        training.batches(x, y, training.ROWS),
        epochs=EPOCHS,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


def with_backup_of_epochs(folder: pathlib.Path) -> keras.Model:
    """Keras's BackupAndRestore, at the end of each epoch."""
    model = make_model()
    fit(model, [keras.callbacks.BackupAndRestore(folder / "backup"), WaitForTest()])
    return model


def with_checkpoints(folder: pathlib.Path) -> keras.Model:
    """Keras's ModelCheckpoint; the newest one is loaded."""
    saved = sorted(folder.glob("epoch_*.keras"))
    model = keras.models.load_model(saved[-1]) if saved else make_model()
    path = folder / "epoch_{epoch}.keras"
    callbacks = [keras.callbacks.ModelCheckpoint(path), WaitForTest()]
    fit(model, callbacks, initial_epoch=len(saved))
    return model


def with_backup_of_batches(folder: pathlib.Path) -> keras.Model:
    """In the middle of epochs, which are gone on with there."""
    model = make_model()
    callbacks = [
        keras_accum.callbacks.SkipSeenBatches(),
        keras.callbacks.BackupAndRestore(folder / "backup", save_freq=SAVE_EVERY),
        WaitForTest(),
    ]
    fit(model, callbacks)
    return model


MODES = {
    "backup_of_epochs": with_backup_of_epochs,
    "checkpoints": with_checkpoints,
    "backup_of_batches": with_backup_of_batches,
}


def main() -> None:
    """Trains, and writes the variables when it is done."""
    mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    model = MODES[mode](folder)
    variables = [*model.variables, *model.optimizer.variables]
    np.savez(folder / "done.npz", *[training.numbers(v) for v in variables])


if __name__ == "__main__":
    main()
