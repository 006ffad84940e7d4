"""Accumulates on two workers, each a process of its own, in a custom training loop.

Started without TF_CONFIG it starts both workers on this machine and waits for them.
Started with TF_CONFIG it is one worker of that cluster. Every worker trains on its
share of the digits, then compares its weights with those of the others, and with a
plain Keras training of the large batch that it repeats by itself.

    python examples/multi_worker.py
"""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import app, flags

import keras_accum

_TIMEOUT_S = flags.DEFINE_integer(
    "timeout_s", 120, "Seconds after which a worker is stopped.", lower_bound=1
)

NUM_WORKERS = 2
ACCUMULATION_STEPS = 4
MICRO_BATCH_SIZE = 16
EPOCHS = 3

# Another order of float32 sums: some 1e-7 per update. Without the 1/R the difference
# is 3e-1.
TOLERANCE = 1e-5


def load_digits(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Loads scikit-learn's digits, shuffled once, in a whole number of batches."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    order = order[: len(images) // batch_size * batch_size]
    return (images[order] / 16).astype("float32"), labels[order].astype("int32")


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
    strategy: tf.distribute.Strategy, images: np.ndarray, labels: np.ndarray
) -> keras.Model:
    """Trains on this worker's share of the rows, one micro-batch at a time."""
    with strategy.scope():
        model = build_model()
        optimizer = keras_accum.AccumulationOptimizer(
            build_optimizer(), accumulation_steps=ACCUMULATION_STEPS
        )
        optimizer.build(model.trainable_variables)

    def own_rows(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((images, labels))
        share = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return share.batch(MICRO_BATCH_SIZE, drop_remainder=True)

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # The optimizer sums over the replicas, so that each adds its part.
            loss = compute_loss(model, images, labels) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    @tf.function
    def micro_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    dataset = strategy.distribute_datasets_from_function(own_rows)
    for epoch in range(EPOCHS):
        mean_loss = np.mean([float(micro_step(batch)) for batch in dataset])
        updates = int(optimizer.iterations.numpy())
        report(f"epoch {epoch + 1}: {updates} updates, loss {mean_loss:.4f}")
    return model


def train_large_batch(
    images: np.ndarray, labels: np.ndarray, batch_size: int
) -> keras.Model:
    """Trains in this process alone, with the plain optimizer, one update per batch."""
    model, optimizer = build_model(), build_optimizer()
    optimizer.build(model.trainable_variables)

    @tf.function
    def update(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = compute_loss(model, images, labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size)
    for batch in dataset.repeat(EPOCHS):
        update(*batch)
    return model


def flatten_weights(model: keras.Model) -> np.ndarray:
    """Returns all weights of a model in one row."""
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def gather_weights(strategy: tf.distribute.Strategy, model: keras.Model) -> np.ndarray:
    """Returns every worker's weights, of shape (workers, weights)."""

    def gather(weights: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_gather(weights[tf.newaxis], axis=0)

    weights = tf.constant(flatten_weights(model))
    return tf.function(lambda: strategy.run(gather, args=(weights,)))().numpy()


def run_worker() -> int:
    """Trains as the worker that TF_CONFIG says, and returns 1 on a disagreement."""
    faulthandler.dump_traceback_later(_TIMEOUT_S.value, exit=True)
    tf.get_logger().setLevel("ERROR")  # no line per collective
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    num_replicas = strategy.num_replicas_in_sync
    batch_size = MICRO_BATCH_SIZE * num_replicas * ACCUMULATION_STEPS
    images, labels = load_digits(batch_size)
    model = train_accumulated(strategy, images, labels)
    everyone = gather_weights(strategy, model)
    large_batch = flatten_weights(train_large_batch(images, labels, batch_size))
    between_workers = np.abs(everyone - everyone[0]).max()
    to_large_batch = np.abs(everyone - large_batch).max()
    report(f"largest difference between {len(everyone)} workers: {between_workers:g}")
    report(f"largest difference to batches of {batch_size}: {to_large_batch:.1e}")
    if between_workers != 0 or not to_large_batch <= TOLERANCE:
        report(f"DISAGREE: 0 and {TOLERANCE:g} were expected at most")
        return 1
    report("all workers and the large batch agree")
    return 0


def report(line: str) -> None:
    """Prints at once, also into a pipe."""
    print(line, flush=True)


def find_free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nothing listens on."""
    with ExitStack() as stack:  # all open together, so that no port comes twice
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def start_worker(index: int, addresses: Sequence[str]) -> subprocess.Popen:
    """Starts this file as worker `index` of the cluster, and prints what it prints."""
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    worker = subprocess.Popen(
        [sys.executable, __file__, f"--timeout_s={_TIMEOUT_S.value}"],
        env=os.environ | {"TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def show() -> None:
        for line in worker.stdout or ():
            report(f"worker {index} | {line.rstrip()}")

    threading.Thread(target=show).start()
    return worker


def run_cluster() -> int:
    """Starts the workers, waits for them and leaves none, whatever happens."""
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(NUM_WORKERS)]
    deadline = time.monotonic() + _TIMEOUT_S.value
    workers = [start_worker(index, addresses) for index in range(NUM_WORKERS)]
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers):
                break  # the others would wait for it forever
            if time.monotonic() > deadline:
                report(f"Stopped after {_TIMEOUT_S.value} seconds.")
                break
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
    codes = [worker.wait() for worker in workers]
    report(f"exit codes of the workers: {codes}")
    return 0 if codes == [0] * NUM_WORKERS else 1


def main(argv: Sequence[str]) -> int:
    """Runs one worker with TF_CONFIG, and the whole cluster without."""
    del argv
    return run_worker() if "TF_CONFIG" in os.environ else run_cluster()


if __name__ == "__main__":
    app.run(main)
