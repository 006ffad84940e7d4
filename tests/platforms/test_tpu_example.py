"""The example for a TPU, with the emulated one in its place."""

import contextlib
import importlib.util
import io
import pathlib
import re
from unittest import mock

from absl import flags
from absl.testing import absltest, flagsaver

from tests import registry

PATH = pathlib.Path(__file__).parents[2] / "examples" / "tpu.py"


class ExampleTest(absltest.TestCase):
    def test_it_trains_as_a_large_batch(self):
        spec = importlib.util.spec_from_file_location("example_of_a_tpu", PATH)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        flags.FLAGS.mark_as_parsed()
        found = (registry.emulated_tpu(8), "an emulated TPU")
        printed = io.StringIO()
        with (
            mock.patch.object(example, "find_strategy", return_value=found),
            flagsaver.flagsaver(epochs=1),
            contextlib.redirect_stdout(printed),
        ):
            example.main([])
        self.assertIn("This ran on an emulated TPU.", printed.getvalue())
        difference = re.search(r"weight difference +(\S+)", printed.getvalue())
        self.assertLess(float(difference[1]), 1e-5)
        self.assertRegex(printed.getvalue(), r"updates +12\n")
