"""Keras's callbacks do what they do with a plain optimizer on the large batch.

Losses are compared too: the micro-batches of a window meet the same weights as the
rows of the large batch, so the mean losses of an epoch are equal.
"""

import csv
import dataclasses
import functools
import os
import tempfile

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import stepping

STEPS = 2
UPDATES = 2  # per epoch

EMA = {"use_ema": True, "ema_momentum": 0.5}

CALLBACKS = {
    "scheduler": lambda folder: keras.callbacks.LearningRateScheduler(
        lambda epoch, learning_rate: learning_rate * 0.5
    ),
    # Nothing improves by 10: reduced at the end of each epoch but the first.
    "plateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.3, patience=1, min_delta=10.0
    ),
    "swap_in_evaluation": lambda folder: keras.callbacks.SwapEMAWeights(),
    "swap_on_epoch": lambda folder: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    # The first epoch stays the best, by 10, and its weights come back.
    "early_stopping": lambda folder: keras.callbacks.EarlyStopping(
        monitor="loss", min_delta=10.0, patience=1, restore_best_weights=True
    ),
    "csv": lambda folder: keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
    "tensorboard": lambda folder: keras.callbacks.TensorBoard(
        os.path.join(folder, "logs"), histogram_freq=1, update_freq=1
    ),
}

LOGGERS = ("early_stopping", "csv", "tensorboard")


def momentum(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def wrapped(plain):
    return lambda **kw: keras_accum.AccumulationOptimizer(plain(**kw), STEPS)


def mixin(**options):
    return stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS, **options
    )


SURFACES = {"wrapper": (momentum, wrapped(momentum)), "mixin": (momentum, mixin)}
if "multi" in registry.OPTIMIZERS:
    multi = registry.OPTIMIZERS["multi"]
    SURFACES["multi"] = (multi, wrapped(multi))

CASES = [
    ("scheduler", "default", "wrapper"),
    ("scheduler", "mirrored", "mixin"),
    ("scheduler", "mirrored", "multi"),
    ("plateau", "default", "mixin"),
    ("plateau", "mirrored", "wrapper"),
    ("plateau", "default", "multi"),
    ("swap_in_evaluation", "default", "wrapper"),
    ("swap_in_evaluation", "default", "mixin"),
    ("swap_in_evaluation", "mirrored", "multi"),
    ("swap_on_epoch", "default", "multi"),
    ("swap_on_epoch", "mirrored", "wrapper"),
    ("loggers", "default", "wrapper"),
    ("loggers", "mirrored", "wrapper"),
    ("loggers", "default", "multi"),
]


def fit(model, rows_per_step, epochs, callbacks):
    """Some epochs on the same rows, however many are taken at a time."""
    x, y = training.rows(UPDATES * STEPS * training.ROWS)
    return model.fit(
        training.batches(x, y, rows_per_step),
        validation_data=training.batches(*training.rows(training.ROWS, 1), 8),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


def tolerance(surface):
    return tolerances.ADAPTIVE if surface == "multi" else tolerances.BY_DTYPE["float32"]


def read_csv(folder):
    """The numbers of the CSV file, if there is one."""
    path = os.path.join(folder, "log.csv")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in rows[0]}


@dataclasses.dataclass
class Run:
    """What a training leaves behind."""

    weights: list
    history: dict
    csv: dict
    runs: set  # that TensorBoard has files of


def train(name, surface, strategy, is_large):
    """One training with the callbacks `name`."""
    keras.backend.clear_session()  # the names of a MultiOptimizer's children are logged
    options = EMA if name.startswith("swap") else {}
    with registry.STRATEGIES[strategy]().scope():
        # In a graph where it matters: there a learning rate could become a constant.
        # Eager is quicker, for so few steps.
        model = training.network(
            SURFACES[surface][0 if is_large else 1](**options),
            run_eagerly=name not in ("scheduler", "plateau"),
        )
    with tempfile.TemporaryDirectory() as folder:
        names = LOGGERS if name == "loggers" else [name]
        rows = training.ROWS * (STEPS if is_large else 1)
        epochs = 3 if name in ("scheduler", "plateau") else 2
        fitted = fit(model, rows, epochs, [CALLBACKS[each](folder) for each in names])
        return Run(
            model.get_weights(),
            fitted.history,
            read_csv(folder),
            {
                os.path.basename(path)
                for path, _, files in os.walk(os.path.join(folder, "logs"))
                if files
            },
        )


@functools.cache
def large_batch(name, surface):
    """The plain optimizer, on one device."""
    return train(name, surface, "default", is_large=True)


class AsWithALargeBatchTest(parameterized.TestCase):
    @parameterized.parameters(*(case for case in CASES if case[2] in SURFACES))
    def test_same_numbers(self, name, strategy, surface):
        expected = large_batch(name, surface)
        actual = train(name, surface, strategy, is_large=False)

        def assert_close(one, other, what):
            accuracy = tolerance(surface)
            np.testing.assert_allclose(
                one, other, accuracy.rtol, accuracy.atol, err_msg=what
            )

        for one, other in zip(actual.weights, expected.weights, strict=True):
            assert_close(one, other, "weights")
        for what in ("history", "csv"):
            logs, expected_logs = getattr(actual, what), getattr(expected, what)
            self.assertEqual(logs.keys(), expected_logs.keys())
            for key, values in expected_logs.items():
                assert_close(logs[key], values, key)
        self.assertEqual(actual.runs, expected.runs)

    def test_the_expected_numbers_show_the_callbacks(self):
        scheduled = large_batch("scheduler", "wrapper").history["learning_rate"]
        np.testing.assert_allclose(scheduled, [0.025, 0.0125, 0.00625], rtol=1e-6)
        reduced = large_batch("plateau", "wrapper").history["learning_rate"]
        np.testing.assert_allclose(reduced, [0.05, 0.05, 0.015], rtol=1e-6)
        logged = large_batch("loggers", "wrapper")
        self.assertLen(logged.history["loss"], 2)
        self.assertLen(logged.csv["loss"], 2)
        self.assertContainsSubset({"train", "validation"}, logged.runs)
