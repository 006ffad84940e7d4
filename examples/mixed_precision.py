"""Trains digits in float16: an overflow, the skipped windows, and the recovery.

Under a `mixed_float16` policy gradients are computed in float16, which ends at 65504.
The loss scale starts much too high here, on purpose. Each window that overflows is
skipped on the whole, and halves the scale, until gradients fit. Later a scanner
delivers one broken batch: its window is skipped, the weights stay as they are, and the
training goes on.

    python examples/mixed_precision.py --plot mixed_precision.png
"""

from collections.abc import Sequence

import keras
import matplotlib.pyplot as plt
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app, flags

import keras_accum

_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the digits.", lower_bound=2)
_PLOT = flags.DEFINE_string("plot", "mixed_precision.png", "Where to draw the scale.")

ACCUMULATION_STEPS = 4
BATCH_SIZE = 32
NUM_TEST = 261
FIRST_SCALE = 2.0**24
GROWTH_INTERVAL = 30
BROKEN_BATCH = 150  # counted over the epochs, well after the recovery


Data = tuple[np.ndarray, np.ndarray]


class Record(keras.callbacks.Callback):
    """Notes the loss scale at each boundary; checks that a skip moves no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.has_updated: list[bool] = []

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Keeps the weights of before."""
        self.before = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Looks at the optimizer where a window has just been closed."""
        optimizer = self.model.optimizer
        if int(optimizer.position) == 0:
            self.scales.append(float(optimizer.loss_scale))
            self.has_updated.append(bool(optimizer.has_updated))
            is_moved = any(
                np.any(one != other)
                for one, other in zip(
                    self.before, self.model.get_weights(), strict=True
                )
            )
            if is_moved != self.has_updated[-1]:
                raise RuntimeError("A skipped window moved a weight.")


def load_digits() -> tuple[Data, Data]:
    """Training and test set of scikit-learn's digits."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    num_batches = (len(images) - NUM_TEST) // (BATCH_SIZE * ACCUMULATION_STEPS)
    num_train = num_batches * BATCH_SIZE * ACCUMULATION_STEPS
    train = (images[:num_train], labels[:num_train])
    return train, (images[-NUM_TEST:], labels[-NUM_TEST:])


def batches(images: np.ndarray, labels: np.ndarray, epochs: int) -> tf.data.Dataset:
    """All epochs in one stream, one of whose batches is broken."""
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.repeat(epochs).batch(BATCH_SIZE)

    def break_one(index: tf.Tensor, batch: tuple) -> tuple:
        images, labels = batch
        is_broken = tf.equal(index, BROKEN_BATCH)
        return tf.where(is_broken, np.float32(np.inf), images), labels

    return dataset.enumerate().map(break_one)


def train(epochs: int) -> tuple[keras.Model, Record, float]:
    """Trains in float16; returns the model, what was recorded, and the accuracy."""
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    scale = keras_accum.DynamicLossScale(
        initial=FIRST_SCALE, growth_interval=GROWTH_INTERVAL
    )
    optimizer = keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(0.2, momentum=0.9), ACCUMULATION_STEPS, loss_scale=scale
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    training, test = load_digits()
    record = Record()
    model.fit(batches(*training, epochs), shuffle=False, callbacks=[record])
    _, accuracy = model.evaluate(*test, verbose=0)
    keras.mixed_precision.set_dtype_policy("float32")
    return model, record, accuracy


def draw(record: Record, path: str) -> None:
    """The loss scale over the windows, with those that were skipped."""
    windows = np.arange(1, len(record.scales) + 1)
    scales, has_updated = np.array(record.scales), np.array(record.has_updated)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.step(windows, scales, where="post", label="loss scale")
    axes.plot(
        windows[~has_updated],
        scales[~has_updated],
        "x",
        color="tab:red",
        label="skipped window",
    )
    axes.set_yscale("log", base=2)
    axes.set_xlabel("window")
    axes.set_title("The scale falls until gradients fit, and grows again")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(_: Sequence[str]) -> int:
    """Trains, prints what happened, and draws it; 1 if the training did not recover."""
    model, record, accuracy = train(_EPOCHS.value)
    draw(record, _PLOT.value)
    skipped = [i + 1 for i, updated in enumerate(record.has_updated) if not updated]
    recovered = next(i for i, updated in enumerate(record.has_updated) if updated)
    print(f"\nloss scale at the start   2**{int(np.log2(FIRST_SCALE))}")
    print(f"windows that overflowed   {recovered}, until 2**", end="")
    print(int(np.log2(record.scales[recovered])))
    print(f"windows skipped           {skipped}")
    print(f"updates                   {int(model.optimizer.iterations.numpy())}")
    print(f"loss scale at the end     2**{int(np.log2(record.scales[-1]))}")
    print(f"test accuracy             {accuracy:.1%}")
    print(f"drawn to                  {_PLOT.value}")
    broken_window = BROKEN_BATCH // ACCUMULATION_STEPS + 1
    is_as_told = recovered > 0 and skipped[-1] == broken_window and accuracy > 0.9
    return 0 if is_as_told else 1


if __name__ == "__main__":
    app.run(main)
