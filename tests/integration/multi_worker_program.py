"""One of two workers: runs all that the multi-worker tests look at, and writes it down.

Started by `test_multi_worker.py`, with TF_CONFIG in the environment and a folder as its
argument. Both workers take every step together, or a collective would wait forever.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from tests import training

NUM_WORKERS = 2
STEPS = 4
NUM_UPDATES = 10
NUM_BEFORE_SAVE = 2 * STEPS + 3
# Rows of each worker in each micro step of the window whose micro-batches are unequal.
UNEQUAL_ROWS = ((3, 2), (1, 4))


def plain():
    """An optimizer that clips and decays, and shows a wrong factor in its momentum."""
    return keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=0.7, weight_decay=0.05
    )


def unclipped():
    """The same without clipping, which would hide a wrong factor."""
    return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.05)


def compiled(optimizer):
    """The network with its optimizer built, also where no `fit` builds it."""
    model = training.network(optimizer)
    optimizer.build(model.trainable_variables)
    return model


def gradients(model, x, y, num_replicas=1):
    """Of the mean over the rows; each replica adds its part of the sum."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / num_replicas
    return tape.gradient(loss, model.trainable_variables)


class Worker:
    """A model, an accumulating optimizer and this worker's part of every micro step."""

    def __init__(self, strategy, index, make_plain, steps=STEPS, **options):
        self.strategy, self.index = strategy, index
        with strategy.scope():
            self.optimizer = keras_accum.AccumulationOptimizer(
                make_plain(), steps, **options
            )
            self.model = compiled(self.optimizer)
        rows = tf.TensorSpec((None, training.FEATURES))
        signature = [rows, tf.TensorSpec((None, 1))]
        self._micro_step = tf.function(self._step, signature, autograph=False)
        signature = [*signature, tf.TensorSpec(())]
        self._weighted_step = tf.function(self._step, signature, autograph=False)

    def _step(self, x, y, weight=None):
        def on_replica():
            local = gradients(self.model, x, y, self.strategy.num_replicas_in_sync)
            pairs = zip(local, self.model.trainable_variables, strict=True)
            self.optimizer.apply_gradients(pairs, weight=weight)

        self.strategy.run(on_replica)

    def step(self, x, y, weight=None):
        """One micro step, of this worker's own rows."""
        if weight is None:
            self._micro_step(tf.constant(x), tf.constant(y))
        else:
            self._weighted_step(*map(tf.constant, (x, y, weight)))

    def train(self, first, last, bad_step=None, bad_worker=None):
        """Micro steps first to last - 1: each worker takes its half of the rows."""
        x, y = training.rows(last * training.ROWS)
        for step in range(first, last):
            own = np.arange(training.ROWS) % NUM_WORKERS == self.index
            here = slice(step * training.ROWS, (step + 1) * training.ROWS)
            own_x = x[here][own]
            if step == bad_step and self.index == bad_worker:
                own_x = np.where(np.arange(len(own_x))[:, None] == 1, np.nan, own_x)
            self.step(own_x.astype("float32"), y[here][own])

    def state(self):
        """What is compared: variables, slots and counters."""
        optimizer = self.optimizer
        slots = optimizer.inner_optimizer.momentums
        return {
            "weights": [w.tolist() for w in self.model.get_weights()],
            "momentums": [training.numbers(m).tolist() for m in slots],
            "iterations": int(training.numbers(optimizer.iterations)),
            "position": int(optimizer.position),
            "skipped_windows": int(optimizer.skipped_windows),
            "has_updated": bool(optimizer.has_updated),
        }


def vector_16(strategy, index, steps):
    """Two workers, w = 2, rate 0.5, inputs 1 and 2, loss w x, summed."""
    with strategy.scope():
        variable = keras.Variable(2.0)
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.5), steps)
        optimizer.build([variable])

    @tf.function(autograph=False)
    def micro_step(x):
        def on_replica():
            with tf.GradientTape() as tape:
                loss = variable * x
            gradient = tape.gradient(loss, variable.value)
            optimizer.apply_gradients([(gradient, variable)])

        strategy.run(on_replica)

    for _ in range(steps):
        micro_step(tf.constant(1.0 + index))
    return float(training.numbers(variable))


def one_bad_batch(strategy, index, bad_worker):
    """A window with a NaN on one worker, then a good one."""
    worker = Worker(strategy, index, plain)
    states = [worker.state()]
    worker.train(0, STEPS, bad_step=1, bad_worker=bad_worker)
    states.append(worker.state())
    worker.train(0, STEPS)
    return [*states, worker.state()]


def flushed(strategy, index):
    """A whole window, and one that is closed after two micro steps."""
    worker = Worker(strategy, index, unclipped)
    worker.train(0, STEPS + 2)
    worker.optimizer.flush()
    worker.optimizer.flush()  # at position 0: nothing
    return worker.state()


def unequal(strategy, index):
    """Micro-batches of unequal size, each weighted by its rows."""
    worker = Worker(strategy, index, unclipped, steps=len(UNEQUAL_ROWS))
    x, y = training.rows(int(np.sum(UNEQUAL_ROWS)))
    taken = 0
    for counts in UNEQUAL_ROWS:
        first = taken + sum(counts[:index])
        own = slice(first, first + counts[index])
        worker.step(x[own], y[own], float(counts[index]))
        taken += sum(counts)
    return worker.state()


def undecayed():
    """As `plain`, which decays by itself."""
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.7)


def decayed(strategy, index, **options):
    """Decayed at the boundary, and measured; with options of the optimizer."""
    worker = Worker(strategy, index, undecayed, **options)
    worker.optimizer.decay_weights(0.05)
    worker.optimizer.measure_gradients(noise=True)
    worker.train(0, NUM_UPDATES * STEPS)
    norm = float(worker.optimizer.gradient_norm)
    noise = float(worker.optimizer.gradient_noise_scale)
    return worker.state() | {"measured": [norm, noise]}


def saved(strategy, index, folder):
    """Interrupted in mid-window; every worker writes, the first one's file counts."""
    worker = Worker(strategy, index, plain)
    worker.train(0, NUM_BEFORE_SAVE)
    own = folder / str(index)
    own.mkdir()
    worker.model.save_weights(own / "half.weights.h5")
    checkpoint = tf.train.Checkpoint(model=worker.model, optimizer=worker.optimizer)
    checkpoint.write(str(own / "checkpoint"))
    return worker.state()


def main(folder):
    """Runs everything, in the same order on both workers."""
    tf.get_logger().setLevel("ERROR")  # no line per collective
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    worker = Worker(strategy, index, plain)
    worker.train(0, NUM_UPDATES * STEPS)
    results = {
        "num_replicas": strategy.num_replicas_in_sync,
        "large_batch": worker.state(),
        "vector_16": [vector_16(strategy, index, steps) for steps in (1, 2)],
        "one_bad_batch": [
            one_bad_batch(strategy, index, bad) for bad in range(NUM_WORKERS)
        ],
        "flushed": flushed(strategy, index),
        "unequal": unequal(strategy, index),
        "decayed": decayed(strategy, index),
        "reduced_early": decayed(strategy, index, reduce_every="micro_step"),
        "saved": saved(strategy, index, folder),
    }
    (folder / f"{index}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
