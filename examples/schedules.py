"""Trains digits with a global batch that grows, and looks at what happens.

Early in training gradients agree, and small batches learn as much per update as large
ones; later noise prevails, and larger batches pay. Here the accumulation steps grow
from epoch to epoch, weight decay is turned off for the last ones, what is left over at
an epoch's end is applied, and the gradient noise scale says whether the global batch
keeps up with it. All of it in one compiled step, traced once.

    python examples/schedules.py --plot schedules.png
"""

from collections.abc import Sequence

import keras
import numpy as np
import sklearn.datasets
from absl import app, flags

import keras_accum

_EPOCHS = flags.DEFINE_integer("epochs", 12, "Passes over the digits.", lower_bound=4)
_PLOT = flags.DEFINE_string("plot", "schedules.png", "Where to draw the history.")

MICRO_BATCH_SIZE = 16
NUM_TEST = 261
STEPS = (1, 2, 4, 8)  # per window, in the four quarters of the training
WEIGHT_DECAY = 0.01


def load_digits() -> tuple[tuple, tuple]:
    """Training and test set of scikit-learn's digits."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    train = (images[:-NUM_TEST], labels[:-NUM_TEST])
    return train, (images[-NUM_TEST:], labels[-NUM_TEST:])


class CountedTraces(keras.Sequential):
    """Counts how often its train step is traced."""

    num_traces = 0

    def train_step(self, data: tuple) -> dict:
        """Keras's own."""
        self.num_traces += 1
        return super().train_step(data)


def train(epochs: int) -> tuple:
    """Trains; returns the model, the history and the monitor."""
    keras.utils.set_random_seed(0)
    model = CountedTraces(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), accumulation_steps=STEPS[0]
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    quarters = {epochs * i // 4: steps for i, steps in enumerate(STEPS)}
    monitor = keras_accum.callbacks.AccumulationMonitor()
    callbacks = [
        keras_accum.callbacks.PartialWindow("apply", at="epoch"),
        keras_accum.callbacks.AccumulationScheduler(quarters),
        keras_accum.callbacks.PipelinedWeightDecay(
            WEIGHT_DECAY, schedule={epochs * 3 // 4: 0.0}, filter=["bias"]
        ),
        keras_accum.callbacks.GradientNoiseScale(),
        monitor,
    ]
    (images, labels), test = load_digits()
    history = model.fit(
        images,
        labels,
        batch_size=MICRO_BATCH_SIZE,
        epochs=epochs,
        validation_data=test,
        callbacks=callbacks,
        verbose=0,
    )
    return model, history.history, monitor


def main(_: Sequence[str]) -> int:
    """Trains, prints a line for each epoch, and draws; 1 if it is not as told."""
    model, history, monitor = train(_EPOCHS.value)
    columns = {
        "steps": ("accumulation_steps", "d"),
        "global batch": ("global_batch_size", "d"),
        "updates": ("updates", "d"),
        "weight decay": ("pipelined_weight_decay", ".3g"),
        "noise scale": ("gradient_noise_scale", ".0f"),
        "loss": ("loss", ".4f"),
        "accuracy": ("val_accuracy", ".1%"),
    }
    print("epoch", *(f"{title:>12}" for title in columns))
    for epoch in range(_EPOCHS.value):
        cells = (f"{history[key][epoch]:{form}}" for key, form in columns.values())
        print(f"{epoch:5}", *(f"{cell:>12}" for cell in cells))
    monitor.plot_history(_PLOT.value)
    batches = -(-(len(load_digits()[0][0])) // MICRO_BATCH_SIZE)
    expected = sum(
        -(-batches // history["accumulation_steps"][epoch])
        for epoch in range(_EPOCHS.value)
    )
    print(f"\nupdates      {history['updates'][-1]}, as they should be: {expected}")
    print(
        f"traces       {model.num_traces} of the train step: Keras's own, at the start"
    )
    print(f"drawn to     {_PLOT.value}")
    is_as_told = history["updates"][-1] == expected and model.num_traces <= 2
    return 0 if is_as_told and history["val_accuracy"][-1] > 0.9 else 1


if __name__ == "__main__":
    app.run(main)
