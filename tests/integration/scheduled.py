"""A small training whose updates are counted, and the large batches it stands for."""

import keras
import numpy as np

import keras_accum
from tests import registry, training
from tests.integration import stepping


def momentum(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def optimizer_of(surface, steps):
    if surface == "mixin":
        return stepping.AccumulatingSGD(0.05, momentum=0.9, accumulation_steps=steps)
    return keras_accum.AccumulationOptimizer(momentum(), steps)


class Traced(keras.Sequential):
    """Counts traces; in eager, calls."""

    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        return super().train_step(data)


def make_model(strategy="default", surface="wrapper", steps=1, **compile_arguments):
    with registry.STRATEGIES[strategy]().scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((training.FEATURES,)), keras.layers.Dense(1)]
        model = Traced(layers)
        model.compile(optimizer_of(surface, steps), "mse", **compile_arguments)
    return model


class Updates(keras.callbacks.Callback):
    """After each batch and at each epoch's end, the updates made."""

    def on_train_begin(self, logs=None):
        self.by_batch, self.by_epoch = [], []

    def _updates(self):
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return int(training.numbers(optimizer.iterations))

    def on_train_batch_end(self, batch, logs=None):
        self.by_batch.append(self._updates())

    def on_epoch_end(self, epoch, logs=None):
        self.by_epoch.append(self._updates())


def fit(model, *callbacks, batches=10, epochs=1, **fit):
    x, y = training.rows(batches * training.ROWS)
    seen = Updates()
    model.fit(
        training.batches(x, y, training.ROWS),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, seen],
        **fit,
    )
    return seen


def large_batches(windows, batches=10, **options):
    """The plain optimizer, one update for each list of micro-batches."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((training.FEATURES,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(momentum(**options), "mse", run_eagerly=True)
    x, y = training.rows(batches * training.ROWS)
    for window in windows:
        rows = np.concatenate(
            [np.arange(training.ROWS) + k * training.ROWS for k in window]
        )
        model.train_on_batch(x[rows], y[rows])
    return model


def windows(batches, steps, start=0):
    """Consecutive windows over the batches, the last one as long as there are any."""
    return [range(k, min(k + steps, batches)) for k in range(start, batches, steps)]
