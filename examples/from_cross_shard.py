"""From TPU's CrossShardOptimizer to keras_accum: the old loop beside the new ones.

The old loop is TensorFlow 1: a graph, a session, and on a TPU
`tf.compat.v1.tpu.CrossShardOptimizer` around a momentum optimizer. Its sum over shards
has no kernel off a TPU; here the one line that puts it around is left out, which on one
shard with the whole batch changes nothing. The new loops keep the optimizer's name and
methods, and run anywhere: on two shards, with four micro-batches per update, and both.

    python examples/from_cross_shard.py
"""

from collections.abc import Sequence

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app

import keras_accum

BATCH_SIZE = 64
NUM_UPDATES = 20
LEARNING_RATE, MOMENTUM = 0.1, 0.9
REPLICAS = 2
ACCUMULATION_STEPS = 4

# Another order of float32 sums: some 1e-7 per update.
TOLERANCE = 1e-5


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Batches of scikit-learn's digits, in a fixed order."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    rows = order[: BATCH_SIZE * NUM_UPDATES]
    images = (images[rows] / 16).astype("float32").reshape(NUM_UPDATES, BATCH_SIZE, 64)
    return images, labels[rows].astype("int32").reshape(NUM_UPDATES, BATCH_SIZE)


def mean_loss(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Softmax cross-entropy, the mean over rows."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(each)


def old_loop(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """TensorFlow 1: returns the weights after the last update."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        image = v1.placeholder(tf.float32, (BATCH_SIZE, 64))
        label = v1.placeholder(tf.int32, (BATCH_SIZE,))
        weights = v1.get_variable(
            "weights", initializer=np.zeros((64, 10), "float32"), use_resource=True
        )
        loss = mean_loss(image @ weights, label)
        optimizer = v1.train.MomentumOptimizer(LEARNING_RATE, MOMENTUM)
        # On a TPU: optimizer = v1.tpu.CrossShardOptimizer(optimizer)
        global_step = v1.train.get_or_create_global_step()
        train_op = optimizer.minimize(loss, global_step=global_step)
        session.run(v1.global_variables_initializer())
        for one_image, one_label in zip(images, labels, strict=True):
            session.run(train_op, {image: one_image, label: one_label})
        return session.run(weights)


def new_loop(
    images: np.ndarray,
    labels: np.ndarray,
    strategy: tf.distribute.Strategy,
    accumulation_steps: int,
) -> tuple[np.ndarray, int]:
    """The same on any strategy; returns the weights and the updates counted."""
    with strategy.scope():
        weights = keras.Variable(np.zeros((64, 10), "float32"))
        global_step = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)
        optimizer = keras_accum.CrossShardOptimizer(
            optimizer, accumulation_steps=accumulation_steps
        )
        optimizer.build([weights])

    def shard_step(image: tf.Tensor, label: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = mean_loss(image @ weights, label)  # of this shard's rows
        optimizer.minimize(loss, [weights], global_step=global_step, tape=tape)

    @tf.function
    def micro_step(image: tf.Tensor, label: tf.Tensor) -> None:
        strategy.run(shard_step, args=(image, label))

    rows = BATCH_SIZE // accumulation_steps
    dataset = tf.data.Dataset.from_tensor_slices(
        (images.reshape(-1, 64), labels.reshape(-1))
    ).batch(rows, drop_remainder=True)
    for image, label in strategy.experimental_distribute_dataset(dataset):
        micro_step(image, label)
    return weights.numpy(), int(global_step.numpy())


def main(_: Sequence[str]) -> int:
    """Runs the loops and compares their weights; 1 if they differ."""
    cpus = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(cpus[0], logical)
    images, labels = load_digits()
    mirrored = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    new = {
        f"keras_accum, {REPLICAS} shards": (mirrored, 1),
        f"keras_accum, {ACCUMULATION_STEPS} micro-batches": (
            tf.distribute.get_strategy(),
            ACCUMULATION_STEPS,
        ),
        f"keras_accum, {REPLICAS} shards x {ACCUMULATION_STEPS}": (
            mirrored,
            ACCUMULATION_STEPS,
        ),
    }
    old = old_loop(images, labels)
    print(
        f"{'TensorFlow 1, 1 shard':32} {NUM_UPDATES} updates, norm of the weights ",
        end="",
    )
    print(f"{np.linalg.norm(old):.6f}")
    largest, updates = 0.0, 0
    for title, (strategy, steps) in new.items():
        weights, updates = new_loop(images, labels, strategy, steps)
        difference = np.abs(weights - old).max()
        largest = max(largest, difference)
        print(f"{title:32} {updates} updates, norm of the weights ", end="")
        print(f"{np.linalg.norm(weights):.6f}, largest difference {difference:.1e}")
    return 0 if largest < TOLERANCE and updates == NUM_UPDATES else 1


if __name__ == "__main__":
    app.run(main)
