"""Two real workers on loopback, in a custom training loop.

Starting them is slow: one pair of processes runs everything, and the tests look at what
it has written. Keras's own `fit` does not run under MultiWorkerMirroredStrategy.
"""

import contextlib
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import tolerances, training
from tests.integration import multi_worker_program as program

TIME_LIMIT_S = 120
ROOT = pathlib.Path(__file__).parents[2]
SAME = tolerances.BY_DTYPE["float32"]


def _free_ports(count):
    with contextlib.ExitStack() as stack:  # all open at once, so that none comes twice
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(index, addresses, folder):
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    environment = os.environ | {
        "TF_CONFIG": json.dumps(config),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    with (folder / f"{index}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", program.__name__, str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(workers):
    """Until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while any(worker.poll() is None for worker in workers):
        failed = any(worker.poll() for worker in workers)
        if failed or time.monotonic() > deadline:
            return  # the others would wait for it forever
        time.sleep(0.1)


@functools.cache
def _run():
    """Runs both workers once: the folder of their files, and how they failed, if so."""
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name)
    ports = _free_ports(program.NUM_WORKERS)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    workers = []
    try:
        for index in range(program.NUM_WORKERS):
            workers.append(_start(index, addresses, path))
        _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    codes = [worker.returncode for worker in workers]
    logs = [(path / f"{i}.log").read_text()[-4000:] for i in range(len(workers))]
    failure = "\n".join([f"The workers ended with {codes}.", *logs])
    return folder, failure if any(codes) else None


def _on_the_large_batch(optimizer, updates):
    """The plain optimizer in this process; `updates` holds the rows of each update."""
    model = program.compiled(optimizer)
    for x, y in updates:
        optimizer.apply_gradients(
            zip(program.gradients(model, x, y), model.trainable_variables, strict=True)
        )
    return model


def _windows(*micro_steps):
    """Rows in their order; each number is the length of a window in micro steps."""
    x, y = training.rows(sum(micro_steps) * training.ROWS)
    ends = np.cumsum(micro_steps)[:-1] * training.ROWS
    return list(zip(np.split(x, ends), np.split(y, ends), strict=True))


@pytest.mark.multiworker
class MultiWorkerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder, failure = _run()
        if failure:
            self.fail(failure)
        self.folder = pathlib.Path(folder.name)
        files = [self.folder / f"{i}.json" for i in range(program.NUM_WORKERS)]
        self.workers = [json.loads(file.read_text()) for file in files]

    def assert_trained(self, name, model):
        """Both workers hold the same, and what the plain optimizer has made."""
        first, second = (worker[name] for worker in self.workers)
        self.assertEqual(first, second)
        self.assert_equals(first["weights"], model.trainable_variables)
        self.assert_equals(first["momentums"], model.optimizer.momentums)
        updates = int(training.numbers(model.optimizer.iterations))
        self.assertEqual(first["iterations"], updates)

    def assert_equals(self, values, variables):
        for value, variable in zip(values, variables, strict=True):
            expected = training.numbers(variable)
            np.testing.assert_allclose(value, expected, SAME.rtol, SAME.atol)

    def test_each_worker_is_a_replica(self):
        for worker in self.workers:
            self.assertEqual(worker["num_replicas"], program.NUM_WORKERS)

    def test_equals_the_large_batch(self):
        windows = _windows(*[program.STEPS] * program.NUM_UPDATES)
        self.assert_trained(
            "large_batch", _on_the_large_batch(program.plain(), windows)
        )

    @parameterized.parameters("decayed", "reduced_early")
    def test_a_decay_at_the_boundary_is_added_once(self, name):
        windows = _windows(*[program.STEPS] * program.NUM_UPDATES)
        self.assert_trained(name, _on_the_large_batch(program.plain(), windows))
        norm, noise = self.workers[0][name]["measured"]
        self.assertGreater(norm, 0)
        self.assertTrue(np.isfinite(noise))

    def test_vector_16(self):
        for worker in self.workers:
            self.assertEqual(worker["vector_16"], [0.5, 0.5])

    @parameterized.parameters(*range(program.NUM_WORKERS))
    def test_a_nan_on_one_worker_skips_on_both(self, bad_worker):
        # Vector 52.
        first, second = (worker["one_bad_batch"][bad_worker] for worker in self.workers)
        self.assertEqual(first, second)
        before, skipped, after = first
        self.assertEqual(skipped["weights"], before["weights"])
        self.assertEqual(skipped["momentums"], before["momentums"])
        counters = ("iterations", "position", "skipped_windows", "has_updated")
        self.assertEqual([skipped[c] for c in counters], [0, 0, 1, False])
        self.assertEqual([after[c] for c in counters], [1, 0, 1, True])
        expected = _on_the_large_batch(program.plain(), _windows(program.STEPS))
        self.assert_equals(after["weights"], expected.trainable_variables)

    def test_flush_divides_by_what_the_window_holds(self):
        windows = _windows(program.STEPS, 2)
        self.assert_trained(
            "flushed", _on_the_large_batch(program.unclipped(), windows)
        )

    def test_unequal_micro_batches_are_weighted_by_their_rows(self):
        rows = training.rows(int(np.sum(program.UNEQUAL_ROWS)))
        expected = _on_the_large_batch(program.unclipped(), [rows])
        self.assert_trained("unequal", expected)

    @parameterized.product(worker=[0, 1], store=["weights.h5", "checkpoint"])
    def test_a_window_saved_by_two_workers_is_finished_by_one(self, worker, store):
        optimizer = keras_accum.AccumulationOptimizer(program.plain(), program.STEPS)
        model = program.compiled(optimizer)
        folder = self.folder / str(worker)
        if store == "weights.h5":
            model.load_weights(folder / "half.weights.h5")
        else:
            checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
            checkpoint.read(str(folder / "checkpoint")).assert_consumed()
        saved = program.NUM_BEFORE_SAVE
        self.assertEqual(int(optimizer.position), saved % program.STEPS)
        self.assertEqual(self.workers[worker]["saved"]["position"], 3)
        x, y = training.rows((saved + 1) * training.ROWS)
        last = slice(saved * training.ROWS, None)
        gradients = program.gradients(model, x[last], y[last])
        optimizer.apply(gradients, model.trainable_variables)
        expected = _on_the_large_batch(program.plain(), _windows(*[program.STEPS] * 3))
        training.assert_same_variables(
            model.trainable_variables, expected.trainable_variables, SAME
        )
        training.assert_same_variables(
            optimizer.inner_optimizer.momentums, expected.optimizer.momentums, SAME
        )
