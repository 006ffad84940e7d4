"""From Graphcore's gradient accumulation to keras_accum: the old loop beside the new.

The old loop is written as for an IPU: a repeated body that computes gradients, hands
each to `stateful_gradient_accumulate`, and updates by hand with what is emitted: zeros
while a window fills, the sum at its end. The operation's name and numbers are
Graphcore's; here it runs on stock TensorFlow. The middle one keeps Graphcore's
optimizer, the new one is `compile` and `fit`. No IPU is needed, and none was used.

    python examples/from_graphcore.py
"""

from collections.abc import Sequence

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app

import keras_accum

MICRO_BATCH_SIZE = 16
NUM_MINI_BATCHES = 4
NUM_UPDATES = 20
LEARNING_RATE = 0.1

# Another order of float32 sums: some 1e-7 per update.
TOLERANCE = 1e-5


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Micro-batches of scikit-learn's digits, in a fixed order."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    num_micro_batches = NUM_UPDATES * NUM_MINI_BATCHES
    rows = order[: num_micro_batches * MICRO_BATCH_SIZE]
    images = (images[rows] / 16).astype("float32")
    shape = (num_micro_batches, MICRO_BATCH_SIZE)
    return images.reshape(*shape, 64), labels[rows].astype("int32").reshape(shape)


def loss_of(weights: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Softmax cross-entropy of a linear model, the mean over rows."""
    logits = images @ weights
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(each)


def large_batches(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """What all of them stand for: plain gradient descent on whole windows, in NumPy."""
    weights = np.zeros((64, 10))
    images = images.reshape(NUM_UPDATES, -1, 64).astype("float64")
    for image, label in zip(images, labels.reshape(NUM_UPDATES, -1), strict=True):
        scores = np.exp(image @ weights)
        excess = scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[label]
        weights -= LEARNING_RATE * image.T @ excess / len(image)
    return weights


def old_loop(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Gradients by hand, in a repeated body."""
    weights = tf.Variable(tf.zeros((64, 10)))
    all_images, all_labels = tf.constant(images), tf.constant(labels)

    def body(index: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, all_images[index], all_labels[index])
        gradient = tape.gradient(loss, weights)
        summed = keras_accum.ops.stateful_gradient_accumulate(
            gradient, NUM_MINI_BATCHES
        )
        weights.assign_sub(LEARNING_RATE / NUM_MINI_BATCHES * summed)
        return [index + 1]

    @tf.function(autograph=False)
    def train() -> list[tf.Tensor]:
        return keras_accum.ops.repeat(len(images), body, [tf.constant(0)])

    train()
    return weights.numpy()


def graphcores_optimizer(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The optimizer by its old name."""
    weights = keras.Variable(np.zeros((64, 10), "float32"))
    optimizer = keras_accum.graphcore.GradientAccumulationOptimizerV2(
        keras.optimizers.SGD(LEARNING_RATE),
        NUM_MINI_BATCHES,
        reduction_method="MEAN",
    )
    optimizer.build([weights])

    @tf.function(autograph=False)
    def step(image: tf.Tensor, label: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(tf.convert_to_tensor(weights), image, label)
        optimizer.minimize(loss, [weights], tape=tape)

    for image, label in zip(images, labels, strict=True):
        step(tf.constant(image), tf.constant(label))
    return weights.numpy()


def new_loop(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """`compile` and `fit`."""
    layer = keras.layers.Dense(10, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((64,)), layer])
    model.compile(
        keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(LEARNING_RATE), NUM_MINI_BATCHES
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        images.reshape(-1, 64),
        labels.reshape(-1),
        batch_size=MICRO_BATCH_SIZE,
        shuffle=False,
        verbose=0,
    )
    return layer.get_weights()[0]


def main(_: Sequence[str]) -> int:
    """Runs the loops and compares their weights; 1 if they differ."""
    images, labels = load_digits()
    expected = large_batches(images, labels)
    print(f"{'NumPy, large batches':34} norm of the weights ", end="")
    print(f"{np.linalg.norm(expected):.6f}")
    largest = 0.0
    for title, run in (
        ("stateful_gradient_accumulate", old_loop),
        ("GradientAccumulationOptimizerV2", graphcores_optimizer),
        ("AccumulationOptimizer, fit", new_loop),
    ):
        weights = run(images, labels)
        difference = np.abs(weights - expected).max()
        largest = max(largest, difference)
        print(f"{title:34} norm of the weights ", end="")
        print(f"{np.linalg.norm(weights):.6f}, largest difference {difference:.1e}")
    return 0 if largest < TOLERANCE else 1


if __name__ == "__main__":
    app.run(main)
