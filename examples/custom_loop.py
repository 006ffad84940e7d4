"""Weighs micro-batches of unequal size by their rows, in a training loop of its own.

A mean of means is not the mean over the rows when the micro-batches differ in size.
With its number of rows as its weight, each counts for what it holds, and a window
trains as one batch of all its rows. The last window here is only half full: `flush`
makes its update too.

    python examples/custom_loop.py
"""

from collections.abc import Sequence

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app

import keras_accum

ACCUMULATION_STEPS = 4
NUM_MICRO_BATCHES = 42  # ten windows, and half of another

# Another order of float32 sums: some 1e-7 per update. Without the weights the
# difference is above 1e-2.
TOLERANCE = 1e-5

Batch = tuple[np.ndarray, np.ndarray]


def load_micro_batches() -> list[Batch]:
    """Cuts scikit-learn's digits into micro-batches of 8 to 56 rows."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    rng = np.random.default_rng(seed=0)
    order = rng.permutation(len(images))
    images = (images[order] / 16).astype("float32")
    labels = labels[order].astype("int32")
    ends = np.cumsum(rng.integers(8, 57, size=NUM_MICRO_BATCHES))
    cut_images, cut_labels = np.split(images, ends), np.split(labels, ends)
    return list(zip(cut_images, cut_labels, strict=True))[:NUM_MICRO_BATCHES]


def join_windows(micro_batches: Sequence[Batch]) -> list[Batch]:
    """Joins the micro-batches of each window into the large batch they stand for."""
    windows = []
    for start in range(0, len(micro_batches), ACCUMULATION_STEPS):
        images, labels = zip(
            *micro_batches[start : start + ACCUMULATION_STEPS], strict=True
        )
        windows.append((np.concatenate(images), np.concatenate(labels)))
    return windows


def build_model() -> keras.Model:
    """Builds a small network, with the same first weights at every call."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def build_optimizer() -> keras.optimizers.Optimizer:
    """Builds the optimizer of the large batch."""
    return keras.optimizers.SGD(
        0.2, momentum=0.9, global_clipnorm=1.0, weight_decay=1e-3
    )


def compute_loss(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the mean cross entropy over the rows of a batch."""
    return tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(
            labels, model(images, training=True), from_logits=True
        )
    )


def train_accumulated(
    model: keras.Model,
    optimizer: keras_accum.AccumulationOptimizer,
    micro_batches: Sequence[Batch],
) -> None:
    """Trains with one micro step per micro-batch, weighted by its rows."""
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def micro_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = compute_loss(model, images, labels)
        gradients = tape.gradient(loss, variables)
        rows = tf.shape(images)[0]
        optimizer.apply_gradients(
            zip(gradients, variables, strict=True),
            weight=tf.cast(rows, tf.float32),
        )

    for images, labels in micro_batches:
        micro_step(tf.constant(images), tf.constant(labels))
    optimizer.flush()


def train_large_batches(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    batches: Sequence[Batch],
) -> None:
    """Trains with one plain Keras update per large batch."""
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def update(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = compute_loss(model, images, labels)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for images, labels in batches:
        update(tf.constant(images), tf.constant(labels))


def main(argv: Sequence[str]) -> int:
    """Compares the two loops and returns 1 if they disagree."""
    del argv
    micro_batches = load_micro_batches()
    windows = join_windows(micro_batches)
    accumulated, large = build_model(), build_model()
    accumulating = keras_accum.AccumulationOptimizer(
        build_optimizer(), accumulation_steps=ACCUMULATION_STEPS
    )
    plain = build_optimizer()

    train_accumulated(accumulated, accumulating, micro_batches)
    train_large_batches(large, plain, windows)

    sizes = [len(labels) for _, labels in micro_batches]
    updates, expected = int(accumulating.iterations), int(plain.iterations)
    pairs = zip(accumulated.get_weights(), large.get_weights(), strict=True)
    difference = np.max([np.abs(a - b).max() for a, b in pairs])
    last_loss = compute_loss(accumulated, *map(tf.constant, windows[-1]))
    print(f"{len(sizes)} micro-batches of {min(sizes)} to {max(sizes)} rows")
    print(f"updates: {updates}, with large batches: {expected}")
    print(f"loss of the last window: {float(last_loss):.4f}")
    print(f"largest weight difference: {difference:.1e}, tolerance {TOLERANCE:g}")
    if updates != expected or not difference <= TOLERANCE:
        print("The weighted micro-batches and the large batches DISAGREE.")
        return 1
    print("The weighted micro-batches train exactly as the large batches do.")
    return 0


if __name__ == "__main__":
    app.run(main)
