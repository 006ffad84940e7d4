"""A window saved under an emulated TPUStrategy is finished elsewhere, and back.

The expected values come from the plain optimizer on the mean of each window's rows.
"""

from absl.testing import parameterized

import keras_accum
from tests import tolerances, training
from tests.integration import saving, stepping, test_resume

STEPS = test_resume.STEPS

# (source, target): from 2 or 8 replicas to one device, Mirrored-2 and the other number,
# and back; each way in each format once.
WAYS = [
    ("tpu_2", "default"),
    ("default", "tpu_2"),
    ("tpu_2", "mirrored"),
    ("mirrored", "tpu_2"),
    ("tpu_2", "tpu_8"),
    ("tpu_8", "default"),
]
CASES = [
    (name, file_format, *way, surface)
    for place, way in enumerate(WAYS)
    for file_format in ("keras", "weights", "checkpoint")
    for name, surface in [
        [("momentum", "wrapper"), ("momentum", "mixin"), ("ema", "wrapper")][place % 3]
    ]
]


class ResumeTest(saving.TestCase):
    @parameterized.parameters(*CASES)
    def test_continues_as_if_never_interrupted(
        self, name, file_format, source, target, surface
    ):
        scenario = test_resume.SCENARIOS[name]
        optimizer = getattr(scenario, surface)
        model = stepping.layered(source, optimizer)
        saved_at = STEPS + 2  # of the second window, with momentum from the first
        path = self.path(f"open{saving.SUFFIXES[file_format]}")
        for k in scenario.run(model, source, range(saved_at + 1)):
            if k == saved_at:
                saving.save(model, path)
        model = saving.restore(path, target, optimizer)
        self.assertEqual(int(model.optimizer.position), 2)
        for _ in scenario.run(model, target, range(saved_at, scenario.num_steps)):
            pass
        expected = scenario.expected()
        plain = expected.optimizer.variables
        training.assert_same_variables(
            [*model.variables, *model.optimizer.variables[: len(plain)]],
            [*expected.variables, *plain],
            tolerances.BY_DTYPE["float32"],
        )

    @parameterized.parameters("keras", "weights", "checkpoint")
    def test_the_counters_and_the_loss_scale(self, file_format):
        def optimizer():
            scale = keras_accum.DynamicLossScale(growth_interval=3)
            return keras_accum.AccumulationOptimizer(
                test_resume.SCENARIOS["momentum"].plain(), 2, loss_scale=scale
            )

        steps = stepping.gradients(5)
        steps[1][0][-1, 0, 0] = float("inf")  # the last row: of one replica only
        model = stepping.layered("tpu_2", optimizer)
        for step in steps:
            scale = float(model.optimizer.loss_scale)
            stepping.micro_step(model, "tpu_2", step, scale=scale)
        path = saving.save(model, self.path(f"open{saving.SUFFIXES[file_format]}"))
        model = saving.restore(path, "mirrored", optimizer)
        self.assertEqual(float(model.optimizer.loss_scale), 2.0**14)
        self.assertEqual(int(model.optimizer.skipped_windows), 1)
        self.assertEqual(int(model.optimizer.position), 1)
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 1)
