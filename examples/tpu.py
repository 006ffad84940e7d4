"""Trains with accumulation on a TPU when there is one, and says what it did if not.

On a TPU: TPUStrategy over all cores, a global batch of static shape, an accumulating
AdamW in `model.fit`. Then the same rows as large batches on one core's worth of CPU,
and the two accuracies. Without a TPU the same lines run on two logical CPUs under
MirroredStrategy, which shows that they run, and nothing about a TPU.

    python examples/tpu.py              # a TPU of this machine, or none
    python examples/tpu.py --tpu=NAME   # a TPU of that name or address
"""

from collections.abc import Sequence

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app, flags

import keras_accum

_TPU = flags.DEFINE_string(
    "tpu", None, "Name or address of the TPU. None looks for one of this machine."
)
_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the digits.", lower_bound=1)

ACCUMULATION_STEPS = 4
MICRO_BATCH_SIZE = 32  # of all replicas together; 8 cores get 4 rows each
NUM_TEST = 261


def find_strategy() -> tuple[tf.distribute.Strategy, str]:
    """A strategy over the TPU, or over two logical CPUs; and what it is."""
    is_local = bool(tf.config.list_physical_devices("TPU"))
    if _TPU.value is None and not is_local:
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), (
            "two logical CPUs under MirroredStrategy, for no TPU was found"
        )
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(_TPU.value or "local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    strategy = tf.distribute.TPUStrategy(resolver)
    return strategy, f"a TPU of {strategy.num_replicas_in_sync} cores"


def load_digits() -> tuple[tuple, tuple]:
    """Loads scikit-learn's digits: whole windows to train on, and rows to test on."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    images = (images[order] / 16).astype("float32")
    labels = labels[order].astype("int32")
    window = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
    num_train = (len(images) - NUM_TEST) // window * window
    train = images[:num_train], labels[:num_train]
    return train, (images[-NUM_TEST:], labels[-NUM_TEST:])


def batches(rows: tuple, batch_size: int) -> tf.data.Dataset:
    """Batches of static shape: without drop_remainder a TPU pads, and compiles anew."""
    return tf.data.Dataset.from_tensor_slices(rows).batch(
        batch_size, drop_remainder=True
    )


def build_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Builds and compiles the network, with the same first weights at every call."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def adamw() -> keras.optimizers.Optimizer:
    """The optimizer of both trainings."""
    return keras.optimizers.AdamW(5e-3, weight_decay=0.01, global_clipnorm=1.0)


def accuracy(model: keras.Model, rows: tuple) -> float:
    """The share of rows whose largest output is their label; computed on the CPU."""
    weights = [variable.numpy() for variable in model.trainable_variables]
    images, labels = rows
    hidden = np.tanh(images @ weights[0] + weights[1])
    return float(np.mean(np.argmax(hidden @ weights[2] + weights[3], 1) == labels))


def main(argv: Sequence[str]) -> None:
    """Trains both ways and prints what was done where."""
    del argv
    strategy, description = find_strategy()
    train, test = load_digits()
    with strategy.scope():  # the model and the optimizer are made in it
        model = build_model(
            keras_accum.AccumulationOptimizer(adamw(), ACCUMULATION_STEPS)
        )
    model.fit(
        batches(train, MICRO_BATCH_SIZE),
        epochs=_EPOCHS.value,
        shuffle=False,  # a dataset is in the order it is given in
        verbose=2,
    )

    large = build_model(adamw())
    large_batch_size = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
    with tf.device("CPU:0"):
        large.fit(
            batches(train, large_batch_size),
            epochs=_EPOCHS.value,
            shuffle=False,
            verbose=0,
        )

    difference = max(
        float(np.abs(one.numpy() - other.numpy()).max())
        for one, other in zip(
            model.trainable_variables, large.trainable_variables, strict=True
        )
    )
    print(f"This ran on {description}.")
    print(f"updates                      {int(model.optimizer.iterations.numpy())}")
    print(f"accuracy, accumulated        {accuracy(model, test):.3f}")
    print(f"accuracy, large batch on CPU {accuracy(large, test):.3f}")
    print(f"largest weight difference    {difference:.1e}")
    if isinstance(strategy, tf.distribute.TPUStrategy):
        print("A TPU multiplies matrices in bfloat16, and so differs from a CPU.")
    else:
        print("It shows that the code runs, and nothing about a TPU.")


if __name__ == "__main__":
    app.run(main)
