"""The examples run, agree, and say so; the README's code runs as it stands."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests.platforms import tpu_stand_in

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 240  # each takes under a minute on two free cores


def run_example(name: str, *arguments: str) -> str:
    """What an example prints; raises if it exits non-zero or takes too long."""
    # The package as this test sees it: the source's, or an installed wheel's.
    package = pathlib.Path(keras_accum.__file__).parents[1]
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TF_CONFIG", None)
    completed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.slow
class ExamplesTest(parameterized.TestCase):
    def test_digits_draws_three_curves(self):
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "digits.png"
            printed = run_example("digits.py", "--epochs=2", f"--plot={plot}")
            self.assertEqual(plot.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertIn("large batch", printed)

    def test_custom_loop(self):
        self.assertNotEmpty(run_example("custom_loop.py"))

    def test_tpu_says_that_there_is_none(self):
        printed = run_example("tpu.py", "--epochs=1")
        self.assertIn("for no TPU was found", printed)
        self.assertIn("nothing about a TPU", printed)

    @pytest.mark.multiworker
    def test_multi_worker(self):
        self.assertNotEmpty(run_example("multi_worker.py"))

    def test_mixed_precision_recovers(self):
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "scale.png"
            printed = run_example("mixed_precision.py", f"--plot={plot}")
            self.assertEqual(plot.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertIn("windows that overflowed   5, until 2**19", printed)

    def test_schedules_draws_its_history(self):
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "schedules.png"
            printed = run_example("schedules.py", "--epochs=8", f"--plot={plot}")
            self.assertEqual(plot.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        # 96 micro steps an epoch, in windows of 1, 2, 4 and 8, two epochs each.
        self.assertIn("updates      360, as they should be: 360", printed)

    def test_from_cross_shard(self):
        printed = run_example("from_cross_shard.py")
        self.assertEqual(printed.count("20 updates"), 4)

    def test_from_graphcore(self):
        printed = run_example("from_graphcore.py")
        self.assertEqual(printed.count("0.843400"), 4)

    def test_compared_with_keras(self):
        printed = run_example("compared_with_keras.py")
        self.assertIn("RuntimeError", printed)


class ReadmeTest(parameterized.TestCase):
    def test_its_code_runs_in_order(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        self.assertGreaterEqual(len(blocks), 4)
        names: dict = {"resolver": tpu_stand_in.Resolver(2)}
        for block in blocks:
            exec(block, names)
        model = names["RowWeighted"]([keras.Input((1,)), _linear()])
        model.compile(
            keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.001), 2), "mse"
        )
        x = np.array([[1.0], [2.0], [3.0], [4.0], [10.0]], "float32")
        data = tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(4)
        model.fit(data, shuffle=False, verbose=0)
        # Vector 46: five rows in micro-batches of 4 and 1, weighted by their rows.
        np.testing.assert_allclose(model.get_weights()[0], [[0.948]], rtol=1e-6)


def _linear() -> keras.layers.Layer:
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
