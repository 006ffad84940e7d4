"""Importing the package imports nothing that only tests and examples need."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

import keras_accum

OPTIONAL = ("matplotlib", "sklearn", "hypothesis", "pytest", "tensorboard")

PROBE = """
import importlib, sys
optional = sys.argv[2].split(",")
already = [name for name in optional if name in sys.modules]
importlib.import_module(sys.argv[1])
print(",".join(n for n in optional if n in sys.modules and n not in already))
"""


def _optional_imports_of(module, folder):
    """Which of `OPTIONAL` a new process has imported once it imported `module`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.run(
        [sys.executable, "-c", PROBE, module, ",".join(OPTIONAL)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name for name in process.stdout.strip().split(",") if name}


class OptionalImportsTest(absltest.TestCase):
    def test_the_package_imports_none(self):
        folder = pathlib.Path(keras_accum.__file__).parents[1]
        # What Keras and TensorFlow import by themselves is not ours.
        of_the_host = _optional_imports_of("keras", folder)
        self.assertLessEqual(_optional_imports_of("keras_accum", folder), of_the_host)

    def test_a_package_that_imports_one_is_found_out(self):
        with tempfile.TemporaryDirectory() as folder:
            source = "def late():\n    import sklearn\n\nimport hypothesis\n"
            pathlib.Path(folder, "greedy.py").write_text(source, encoding="utf-8")
            self.assertEqual(_optional_imports_of("greedy", folder), {"hypothesis"})
