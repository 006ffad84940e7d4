"""Trains on handwritten digits three ways that must agree, and draws their losses.

The same 128 rows make each update of a small convolutional network

- as one large batch,
- as 4 micro-batches of 32 rows on one device,
- as 4 micro-batches of 16 rows on each of 2 replicas,

under SGD with momentum, clipping by the global norm and weight decay. Clipping and
decay show a wrong scale at once: they act on the gradient of the whole batch, so
they must run once per update, after the window and the replicas are combined.

    python examples/digits.py --plot digits.png
"""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import matplotlib.pyplot as plt
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app, flags
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

import keras_accum

_EPOCHS = flags.DEFINE_integer("epochs", 8, "Passes over the digits.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", "digits.png", "Where to draw the loss curves.")

NUM_REPLICAS = 2
ACCUMULATION_STEPS = 4
LARGE_BATCH_SIZE = 128
NUM_TEST = 261

# A float32 sum in another order differs in its last digits. Weights of size 1 then
# differ by some 1e-7 after one update and by 4e-7 after a hundred. A clip on the
# gradient of one replica makes a difference of 4e-3, a wrong factor of 2e-1.
TOLERANCE = 1e-5


@dataclass
class Digits:
    """Images of shape (rows, 8, 8, 1) in [0, 1] and their labels, 0 to 9."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass
class Run:
    """What one of the three trainings ended with."""

    name: str
    losses: np.ndarray  # one per update
    weights: list[np.ndarray]
    updates: int
    test_loss: float
    test_accuracy: float


def load_digits() -> Digits:
    """Loads scikit-learn's digits, shuffled once, in a whole number of batches."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    images = (images[order] / 16).reshape(-1, 8, 8, 1).astype("float32")
    labels = labels[order].astype("int32")
    num_train = (len(images) - NUM_TEST) // LARGE_BATCH_SIZE * LARGE_BATCH_SIZE
    train, test = slice(0, num_train), slice(len(images) - NUM_TEST, None)
    return Digits(images[train], labels[train], images[test], labels[test])


def build_model() -> keras.Model:
    """Builds the network, with the same first weights at every call.

    Tanh is smooth. A ReLU amplifies rounding: a unit near 0 for one row may be on in
    one run and off in another, and the runs part by 1e-3 without any error.
    """
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="tanh"),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def build_optimizer() -> keras.optimizers.Optimizer:
    """Builds the optimizer of the large batch."""
    return keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=1.0, weight_decay=1e-3
    )


class StepLosses(keras.callbacks.Callback):
    """Records the loss of each step, of which Keras shows the mean over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self._total = 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Takes the step's own loss out of the running mean."""
        before = self._total if batch else 0.0
        self._total = float((logs or {})["loss"]) * (batch + 1)
        self.losses.append(self._total - before)


def train(
    name: str,
    digits: Digits,
    epochs: int,
    accumulation_steps: int = 1,
    strategy: tf.distribute.Strategy | None = None,
) -> Run:
    """Trains on windows of `LARGE_BATCH_SIZE` rows, split as the arguments say.

    Args:
        name: What the table and the plot call this run.
        digits: The rows, in the order in which every run sees them.
        epochs: Passes over the training rows.
        accumulation_steps: Micro steps per window; 1 trains with the plain optimizer.
        strategy: Splits each micro step over its replicas; default: one device.

    Returns:
        The losses, weights and test results of the run.
    """
    print(f"\n{name}", flush=True)
    with (strategy or tf.distribute.get_strategy()).scope():
        optimizer = build_optimizer()
        if accumulation_steps > 1:
            optimizer = keras_accum.AccumulationOptimizer(optimizer, accumulation_steps)
        model = build_model()
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    step_losses = StepLosses()
    model.fit(
        digits.images,
        digits.labels,
        batch_size=LARGE_BATCH_SIZE // accumulation_steps,
        epochs=epochs,
        shuffle=False,
        callbacks=[step_losses],
    )
    test = model.evaluate(
        digits.test_images, digits.test_labels, verbose=0, return_dict=True
    )
    return Run(
        name=name,
        losses=np.reshape(step_losses.losses, (-1, accumulation_steps)).mean(axis=1),
        weights=model.get_weights(),
        updates=int(optimizer.iterations.numpy()),
        test_loss=test["loss"],
        test_accuracy=test["accuracy"],
    )


def train_three_ways(
    digits: Digits, epochs: int, mirrored: tf.distribute.Strategy
) -> list[Run]:
    """Trains as a large batch, on one device and on the replicas of `mirrored`."""
    n, r = ACCUMULATION_STEPS, mirrored.num_replicas_in_sync
    rows = LARGE_BATCH_SIZE // n
    return [
        train(f"large batch of {LARGE_BATCH_SIZE}", digits, epochs),
        train(f"{n} x {rows} on one device", digits, epochs, n),
        train(f"{n} x {rows // r} on {r} replicas", digits, epochs, n, mirrored),
    ]


def weight_difference(run: Run, large_batch: Run) -> float:
    """Returns the largest absolute difference between the weights of two runs."""
    pairs = zip(run.weights, large_batch.weights, strict=True)
    return float(np.max([np.abs(a - b).max() for a, b in pairs]))


def agree(runs: Sequence[Run]) -> bool:
    """Tells whether every run made the updates and the weights of the first one."""
    return all(
        run.updates == runs[0].updates and weight_difference(run, runs[0]) <= TOLERANCE
        for run in runs
    )


def print_table(runs: Sequence[Run]) -> None:
    """Prints a line per run, compared with the first one."""
    print(
        f"\n{'':24}{'train loss':>12}{'test loss':>11}{'accuracy':>10}"
        f"{'updates':>9}{'weight diff':>13}"
    )
    for run in runs:
        print(
            f"{run.name:24}{run.losses[-1]:12.6f}{run.test_loss:11.6f}"
            f"{run.test_accuracy:10.2%}{run.updates:9d}"
            f"{weight_difference(run, runs[0]):13.1e}"
        )


def draw_losses(runs: Sequence[Run], path: str) -> None:
    """Draws the losses: a wide band, a line in it and dots on it, so that all show."""
    styles = [
        {"color": "#b8d4f0", "linewidth": 7, "solid_capstyle": "round"},
        {"color": "#1f5f9e", "linewidth": 1.8},
        {"color": "#d9480f", "linestyle": "none", "marker": "o", "markersize": 4},
    ]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run, style in zip(runs, styles, strict=True):
        updates = np.arange(1, len(run.losses) + 1)
        axes.plot(updates, run.losses, markevery=3, label=run.name, **style)
    axes.set(
        yscale="log",
        xlabel="update",
        ylabel="cross entropy of the batch",
        title="One training, three ways to split its batches",
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def two_replicas() -> tf.distribute.Strategy:
    """Makes two replicas of one CPU; call it before TensorFlow runs anything."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM_REPLICAS)])


def main(argv: Sequence[str]) -> int:
    """Runs the comparison and returns 1 if the three trainings disagree."""
    del argv
    tf.get_logger().setLevel("WARNING")  # no line per collective of a replica
    plt.switch_backend("Agg")  # draws without a screen
    runs = train_three_ways(load_digits(), _EPOCHS.value, two_replicas())
    print_table(runs)
    draw_losses(runs, _PLOT.value)
    print(f"\nThe loss curves are in {_PLOT.value}.")
    if not agree(runs):
        print(f"The trainings DISAGREE by more than {TOLERANCE:g}.")
        return 1
    print(f"The three trainings agree to {TOLERANCE:g}.")
    return 0


if __name__ == "__main__":
    app.run(main)
