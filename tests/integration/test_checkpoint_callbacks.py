"""What Keras's callbacks save at any micro step of a `fit` goes on as before.

The expected values come from the plain optimizer, an update for each window.
"""

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import saving, stepping

STEPS = 2
BATCHES = 5


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


SURFACES = {
    "wrapper": lambda: keras_accum.AccumulationOptimizer(momentum(), STEPS),
    "mixin": lambda: stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS
    ),
}


def plain_updates(windows):
    """The plain optimizer, an update for each window of micro-batches."""
    x, y = training.rows(BATCHES * training.ROWS)
    model = training.network(momentum(), run_eagerly=True)
    for window in windows:
        rows = np.concatenate(
            [np.arange(training.ROWS) + k * training.ROWS for k in window]
        )
        model.train_on_batch(x[rows], y[rows])
    return model


class Interrupt(keras.callbacks.Callback):
    """Fails after the micro step `batch` of the epoch `epoch`."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._last = (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._last:
            raise InterruptedError


class InterruptedTest(saving.TestCase):
    def model(self, strategy, surface, seed=0):
        with registry.STRATEGIES[strategy]().scope():
            # Quicker than a graph, for so few steps.
            return training.network(SURFACES[surface](), seed=seed, run_eagerly=True)

    def fit(self, model, callbacks, epochs=1, first=0):
        x, y = training.rows(BATCHES * training.ROWS)
        rows = slice(first * training.ROWS, None)
        dataset = training.batches(x[rows], y[rows], training.ROWS)
        model.fit(dataset, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)

    def assert_same(self, model, windows, position):
        expected = plain_updates(windows)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )
        training.assert_same_variables(
            model.optimizer.variables[: len(expected.optimizer.variables)],
            expected.optimizer.variables,
            tolerances.BY_DTYPE["float32"],
        )
        self.assertEqual(int(model.optimizer.position), position)

    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_backup_in_mid_window(self, strategy, surface):
        def backup():
            return keras.callbacks.BackupAndRestore(self.path("backup"), save_freq=3)

        model = self.model(strategy, surface)
        with self.assertRaises(InterruptedError):
            self.fit(model, [backup(), Interrupt(0, 3)])
        model = self.model(strategy, surface, seed=7)
        self.fit(model, [backup()])
        # Keras takes the epoch from its start again: five more micro-batches.
        self.assert_same(model, [(0, 1), (2, 0), (1, 2), (3, 4)], position=0)

    def test_backup_between_epochs(self):
        def backup():
            return keras.callbacks.BackupAndRestore(self.path("backup"))

        model = self.model("default", "wrapper")
        with self.assertRaises(InterruptedError):
            self.fit(model, [backup(), Interrupt(1, 2)], epochs=3)
        model = self.model("default", "wrapper", seed=7)
        self.fit(model, [backup()], epochs=3)
        windows = [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4), (0, 1), (2, 3)]
        self.assert_same(model, windows, position=1)

    def test_a_build_in_the_default_strategy_is_one_in_the_optimizers(self):
        model = self.model("mirrored", "mixin")
        model.optimizer.build(model.trainable_variables)
        self.fit(model, [])
        self.assert_same(model, [(0, 1), (2, 3)], position=1)

    @parameterized.parameters(("default", ".weights.h5"), ("mirrored", ".keras"))
    def test_checkpoints_in_mid_epoch(self, strategy, kind):
        checkpoint = keras.callbacks.ModelCheckpoint(
            self.path("{epoch}_{batch}" + kind),
            save_freq=3,
            save_weights_only=kind == ".weights.h5",
        )
        self.fit(self.model(strategy, "wrapper"), [checkpoint])
        path = self.path("1_3" + kind)
        if kind == ".keras":
            with registry.STRATEGIES[strategy]().scope():
                model = keras.saving.load_model(path)
        else:
            model = self.model(strategy, "wrapper", seed=7)
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        self.assertEqual(int(model.optimizer.position), 1)
        self.fit(model, [], first=3)
        self.assert_same(model, [(0, 1), (2, 3)], position=1)

    def test_checkpoints_of_each_epoch(self):
        checkpoint = keras.callbacks.ModelCheckpoint(self.path("{epoch}.keras"))
        model = self.model("default", "wrapper")
        self.fit(model, [checkpoint], epochs=2)
        windows = [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]
        for epoch, num_updates, position in ((1, 2, 1), (2, 5, 0)):
            with registry.STRATEGIES["default"]().scope():
                saved = keras.saving.load_model(self.path(f"{epoch}.keras"))
            self.assert_same(saved, windows[:num_updates], position)
