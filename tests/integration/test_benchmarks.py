"""The benchmarks run, and write what they found. No time is asserted."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 240


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="The benchmarks are not installed."
)
class BenchmarksTest(absltest.TestCase):
    def test_claims_are_measured_and_reported(self):
        claims = ["communication", "end_to_end", "tracing"]
        with tempfile.TemporaryDirectory() as folder:
            finished = subprocess.run(  # which kills it when the time is over
                [
                    sys.executable,
                    "-m",
                    "benchmarks.run",
                    "--quick",
                    f"--only={','.join(claims)}",
                    f"--output={folder}",
                ],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if k != "TF_CONFIG"},
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
                check=False,
            )
            self.assertEqual(finished.returncode, 0, finished.stderr[-2000:])
            lines = pathlib.Path(folder, "quick.jsonl").read_text(encoding="utf-8")
            table = pathlib.Path(folder, "quick.md").read_text(encoding="utf-8")
            plot = pathlib.Path(folder, "quick.png").read_bytes()
        records = [json.loads(line) for line in lines.splitlines()]
        self.assertEqual(records[0]["claim"], "environment")
        self.assertIn("tensorflow", records[0])
        self.assertEqual({r["claim"] for r in records[1:]}, set(claims))
        self.assertEqual(plot[:8], b"\x89PNG\r\n\x1a\n")
        self.assertIn("## communication", table)
        # What can be counted: a reduction per window, not one per micro step.
        counted = {
            (r["place"], r["reduce_every"]): r["collectives_per_window"]
            for r in records
            if r["claim"] == "communication"
        }
        for place in ("two replicas", "two workers"):
            self.assertEqual(counted[place, "window"], 1)
            self.assertEqual(counted[place, "micro_step"], 8)

        operations = {
            r["contender"]: r["operations"] for r in records if r["claim"] == "tracing"
        }
        self.assertLess(operations["keras_accum"], operations["plain"])

    def test_an_unknown_claim_is_refused(self):
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks.run", "--only=speed"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        self.assertNotEqual(finished.returncode, 0)
        self.assertIn("must name claims of", finished.stdout + finished.stderr)
