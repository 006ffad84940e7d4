"""A training that is killed, again and again, ends as the one that was not."""

import os
import pathlib
import random
import select
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import keras_accum
from tests import training
from tests.integration import interrupted_program as program

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 120  # of one process; it takes ten seconds on a free core
KILLS = 3


def _line_of(process, deadline):
    """The next line that a process prints; "" when it has ended."""
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
        raise TimeoutError("The training did not say anything in time.")
    return process.stdout.readline()


def _run(mode, folder, kill_at):
    """Runs the training; kills it before the micro step `kill_at` of its own.

    Returns:
        The micro steps that it began, and its exit code.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_CONFIG", None)
    with subprocess.Popen(
        [sys.executable, "-m", program.__name__, mode, str(folder)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:
        try:
            deadline = time.monotonic() + TIME_LIMIT_S
            steps = 0
            while line := _line_of(process, deadline):
                if line.strip() != b"micro step":
                    continue
                if steps == kill_at:
                    break
                steps += 1
                process.stdin.write(b"\n")
            if kill_at is not None:
                process.kill()  # SIGKILL, by its own id
            return steps, process.wait(timeout=TIME_LIMIT_S)
        finally:
            process.kill()


@pytest.mark.slow
class KilledTest(parameterized.TestCase):
    def _uninterrupted(self):
        model = program.make_model()
        program.fit(model, [])
        return [*model.variables, *model.optimizer.variables]

    @parameterized.parameters(*program.MODES)
    def test_it_ends_bit_for_bit_as_if_it_had_not_been(self, mode):
        expected = self._uninterrupted()
        dice = random.Random(mode)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for _ in range(KILLS):
                # Before its end, whatever was saved until then.
                kill_at = dice.randrange(program.BATCHES + 1)
                steps, exit_code = _run(mode, folder, kill_at)
                self.assertEqual((steps, exit_code), (kill_at, -9))
            _, exit_code = _run(mode, folder, None)
            self.assertEqual(exit_code, 0)
            with np.load(folder / "done.npz") as done:
                actual = [done[name] for name in done.files]
        self.assertLen(actual, len(expected))
        for one, other in zip(actual, expected, strict=True):
            # How many batches of an epoch were seen is counted only where it matters.
            if not getattr(other, "path", "").endswith("batches_seen"):
                np.testing.assert_array_equal(one, training.numbers(other), other.path)


class _Stop(keras.callbacks.Callback):
    """Fails after so many micro steps, as if the process had died."""

    def __init__(self, after):
        super().__init__()
        self._after = after

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self._after:
            raise InterruptedError


class ReplayedEpochTest(parameterized.TestCase):
    """Vector 53: saved every 3 micro steps, dead at 4, with windows of two."""

    def _fit(self, folder, *callbacks):
        model = training.network(
            keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.05), 2)
        )
        positions = []
        at_begin = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: positions.append(
                int(model.optimizer.position)
            )
        )
        x, y = training.rows(8 * training.ROWS)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
        stop = [each for each in callbacks if isinstance(each, _Stop)]
        others = [each for each in callbacks if each not in stop]
        data = training.batches(x, y, training.ROWS)
        model.fit(
            data,
            shuffle=False,
            verbose=0,
            callbacks=[*others, backup, at_begin, *stop],
        )
        return model, positions

    def _dead_at_four(self, folder, *callbacks):
        with self.assertRaises(InterruptedError):
            self._fit(folder, *callbacks, _Stop(4))

    def test_keras_replays_it_and_the_phase_of_the_window_holds(self):
        with tempfile.TemporaryDirectory() as folder:
            self._dead_at_four(folder)
            model, positions = self._fit(folder)
        optimizer = model.optimizer
        self.assertEqual(positions, [1])  # restored: one update, and one micro step
        self.assertEqual(int(training.numbers(optimizer.iterations)), 1 + 4)
        self.assertEqual(int(optimizer.position), 1)

    def test_seen_batches_are_skipped_when_asked_for(self):
        with tempfile.TemporaryDirectory() as folder:
            self._dead_at_four(folder, keras_accum.callbacks.SkipSeenBatches())
            skip = keras_accum.callbacks.SkipSeenBatches()
            model, positions = self._fit(folder, skip)
        with tempfile.TemporaryDirectory() as folder:
            expected, _ = self._fit(folder)
        self.assertEqual(positions, [1])
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 4)
        for one, other in zip(model.variables, expected.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        self.assertEqual(model.optimizer.batches_seen, 0)

    def test_a_shorter_fit_and_those_after_it_train(self):
        model = training.network(
            keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.05), 2)
        )
        x, y = training.rows(8 * training.ROWS)
        data = training.batches(x, y, training.ROWS)

        def fit(batches, *callbacks, epochs=1):
            model.fit(
                data.take(batches),
                epochs=epochs,
                shuffle=False,
                verbose=0,
                callbacks=list(callbacks),
            )
            return int(training.numbers(model.optimizer.iterations))

        skip = keras_accum.callbacks.SkipSeenBatches()
        with self.assertRaises(InterruptedError):
            fit(8, skip, _Stop(6))
        # The first epoch is skipped, as it is no longer than what was seen.
        self.assertEqual(fit(2, keras_accum.callbacks.SkipSeenBatches()), 3)
        self.assertEqual(fit(8), 7)
        with self.assertRaises(InterruptedError):
            fit(8, skip, _Stop(6))
        again = keras_accum.callbacks.SkipSeenBatches()
        self.assertEqual(fit(2, again, epochs=3), 10 + 2)

    def test_interrupted_while_it_skips(self):
        model = training.network(
            keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.05), 2)
        )
        model.optimizer.build(model.trainable_variables)
        model.optimizer.batches_seen = 6
        x, y = training.rows(8 * training.ROWS)
        data = training.batches(x, y, training.ROWS)
        skip = keras_accum.callbacks.SkipSeenBatches()
        with self.assertRaises(InterruptedError):
            model.fit(data, shuffle=False, verbose=0, callbacks=[skip, _Stop(2)])
        again = keras_accum.callbacks.SkipSeenBatches()
        model.fit(data, shuffle=False, verbose=0, callbacks=[again])
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 1)
        model.fit(data, shuffle=False, verbose=0)
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 1 + 4)

    def test_they_are_skipped_by_executions_of_several_steps(self):
        def model():
            made = training.network(
                keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.05), 3),
                steps_per_execution=2,
            )
            made.optimizer.build(made.trainable_variables)
            return made

        x, y = training.rows(8 * training.ROWS)
        data = training.batches(x, y, training.ROWS)
        expected, first, second = model(), model(), model()
        expected.fit(data, shuffle=False, verbose=0)
        first.fit(
            data.take(4),
            shuffle=False,
            verbose=0,
            callbacks=[keras_accum.callbacks.SkipSeenBatches(), _Copy(second, 4)],
        )
        self.assertEqual(second.optimizer.batches_seen, 4)
        second.fit(
            data,
            shuffle=False,
            verbose=0,
            callbacks=[keras_accum.callbacks.SkipSeenBatches()],
        )
        for one, other in zip(second.variables, expected.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        self.assertEqual(int(second.optimizer.position), 2)


class _Copy(keras.callbacks.Callback):
    """Copies all variables to another model, in the middle of an epoch."""

    def __init__(self, other, after):
        super().__init__()
        self._other = other
        self._after = after

    def on_train_batch_end(self, batch, logs=None):
        if batch + 2 >= self._after:
            for one, other in zip(
                [*self._other.variables, *self._other.optimizer.variables],
                [*self.model.variables, *self.model.optimizer.variables],
                strict=True,
            ):
                one.assign(other)
