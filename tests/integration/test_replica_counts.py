"""The equivalence suite on other numbers of replicas, each in a process of its own.

A process has one MirroredStrategy of one size: see `tests/registry.py`.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl.testing import parameterized

from tests import registry
from tests.equivalence import test_large_batch

TIME_LIMIT_S = 240
ROOT = pathlib.Path(__file__).parents[2]
ASKED_FOR = "KERAS_ACCUM_TEST_REPLICAS"

# The first mirrored case of each option.
OPTIONS = {
    option: f"test_options{index}"
    for index, (strategy, _, _, option, *_) in reversed(
        list(enumerate(test_large_batch.CASES))
    )
    if strategy == "mirrored"
}
# Of the pairs of cases the second one is mirrored.
SUITE = [
    "tests/integration/test_replica_counts.py::ReplicaCountTest::test_as_asked_for",
    "tests/equivalence/test_one_reduction.py::OneReductionTest::"
    "test_eight_micro_steps_of_windows_of_four_reduce_twice0",
    *[
        f"tests/equivalence/test_large_batch.py::LargeBatchTest::{name}"
        for name in (*OPTIONS.values(), "test_constraints1", "test_running_mean1")
    ],
]
# Groups of two take four replicas.
GROUPS = (
    "tests/equivalence/test_reduce_every.py::GroupsTest",
    "tests/integration/test_cross_shard.py::ReductionTest",  # vectors 25, 26
    "tests/integration/test_vectors_ops.py::ReplicasTest::test_vector_9",
)


class ReplicaCountTest(parameterized.TestCase):
    def test_as_asked_for(self):
        asked_for = int(os.environ.get(ASKED_FOR, "2"))
        self.assertEqual(registry.mirrored().num_replicas_in_sync, asked_for)

    @pytest.mark.slow
    @parameterized.parameters(1, 4)
    def test_the_suite_passes_on(self, num_replicas):
        environment = os.environ | {ASKED_FOR: str(num_replicas)}
        environment.pop("PYTEST_ADDOPTS", None)
        suite = [*SUITE, *(GROUPS if num_replicas == 4 else ())]
        # `run` kills it when the time is over.
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        output = finished.stdout[-8000:]
        self.assertEqual(finished.returncode, 0, output)
        self.assertEqual(set(OPTIONS), set(registry.OPTIONS))
        num_passed = int(re.search(r"(\d+) passed in", output)[1])
        if num_replicas == 4:
            self.assertGreater(num_passed, len(SUITE) + 20)
        else:
            self.assertEqual(num_passed, len(SUITE))
