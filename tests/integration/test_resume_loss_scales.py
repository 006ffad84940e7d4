"""Every counter of a loss scale and of a policy survives a save inside a window.

Shown by what follows: scales by the published rules, skips as counted by hand, and
variables of the plain optimizer. Each save falls where a lost counter changes them.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import saving, stepping

INITIAL = 64.0
LARGE = 1e4  # far above the edge of the automatic scale, whatever the scale


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training, where it is saved, and what it must come to."""

    loss_scale: Callable
    saved_at: tuple  # before these micro steps
    scales: tuple  # after each micro step
    steps_per_window: int = 2
    bad_steps: tuple = ()  # one row, of the last replica only, is infinite
    large_steps: tuple = ()
    first_large_row: int = 0  # of the global micro-batch
    requests: tuple = ()  # pairs: after this micro step, this scale is asked for
    policy: str = "skip_window"

    def wrapper(self):
        return keras_accum.AccumulationOptimizer(
            _momentum(),
            self.steps_per_window,
            loss_scale=self.loss_scale(),
            on_nonfinite=self.policy,
        )

    def mixin(self):
        return stepping.AccumulatingSGD(
            0.05,
            momentum=0.9,
            accumulation_steps=self.steps_per_window,
            loss_scale=self.loss_scale(),
            on_nonfinite=self.policy,
        )

    def gradients(self):
        gradients = stepping.gradients(len(self.scales))
        for k in self.large_steps:
            gradients[k][0][self.first_large_row :] = (
                LARGE  # the kernel: 6 elements of 8
            )
        for k in self.bad_steps:
            gradients[k][0][-1, 0, 0] = np.inf
        return gradients

    def windows(self):
        """The micro steps of each window."""
        length = self.steps_per_window
        return [range(k, k + length) for k in range(0, len(self.scales), length)]

    def skipped(self):
        """After each micro step: windows, and micro-batches, of all replicas."""
        windows, micro_batches, after = 0, 0, []
        for window in self.windows():
            after += [(windows, micro_batches)] * (len(window) - 1)
            num_bad = len(set(window) & set(self.bad_steps))
            if self.policy == "skip_window":
                windows += num_bad > 0
            else:
                micro_batches += num_bad
            after.append((windows, micro_batches))
        return after

    def expected(self, replicas_of_step):
        """The plain optimizer, after one update for each window that is not skipped.

        Args:
            replicas_of_step: How many there are in each micro step. The last one loses
                its rows of a bad micro step, if that is what is skipped.
        """
        model, gradients = stepping.layered("default", _momentum), self.gradients()
        for window in self.windows():
            is_bad = not set(window).isdisjoint(self.bad_steps)
            if is_bad and self.policy == "skip_window":
                continue
            kept = [
                [g[: self.num_kept(k, replicas_of_step[k])] for g in gradients[k]]
                for k in window
            ]
            means = [
                np.concatenate(rows).mean(axis=0, dtype="float64")
                for rows in zip(*kept, strict=True)
            ]
            stepping.apply_plain(model, means)
        return model

    def num_kept(self, step, replicas):
        lost = stepping.ROWS // replicas if step in self.bad_steps else 0
        return stepping.ROWS - lost


def twice(scales):
    """After each micro step, from those after each window of two."""
    before = (INITIAL, *scales[:-1])
    return tuple(s for pair in zip(before, scales, strict=True) for s in pair)


def _dynamic(**arguments):
    return lambda: keras_accum.DynamicLossScale(INITIAL, **arguments)


SCENARIOS = {
    # Windows: bad, good, bad, three good, bad, bad. DeepSpeed's rule: the first bad
    # one is forgiven, the next one is not; growth forgives one again.
    "hysteresis": Scenario(
        _dynamic(growth_interval=3, hysteresis=2),
        saved_at=(5, 7, 9, 11, 13, 15),
        scales=twice((64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 32.0)),
        bad_steps=(1, 4, 13, 14),
    ),
    # What was asked for waits in the file: the window is finished as it was begun.
    "static_asked_for_16": Scenario(
        lambda: INITIAL,
        saved_at=(3, 5),
        scales=(64.0, 64.0, 64.0, 16.0, 16.0, 16.0),
        requests=((2, 16.0),),
    ),
    # What was asked for is the next window's; the second update after it doubles it.
    "dynamic_asked_for_16": Scenario(
        _dynamic(growth_interval=2),
        saved_at=(3, 5, 7),
        scales=(64.0, 64.0, 64.0, 16.0, 16.0, 16.0, 16.0, 32.0),
        requests=((2, 16.0),),
    ),
    # It counts updates: the second window makes none.
    "scheduled": Scenario(
        lambda: keras_accum.ScheduledLossScale(
            keras.optimizers.schedules.PiecewiseConstantDecay(
                [0, 1, 2], [64.0, 8.0, 128.0, 2.0]
            )
        ),
        saved_at=(1, 3, 5),
        scales=twice((8.0, 8.0, 128.0, 2.0)),
        bad_steps=(2,),
    ),
    # Elements above the edge are 12 of 32 in the first period, 6 of 32 in the second:
    # above the ratio, then below. Without those before a save it would be otherwise.
    "automatic": Scenario(
        lambda: keras_accum.AutomaticLossScale(
            INITIAL, maximum=1024.0, period=2, edge=1000.0, ratio=0.22
        ),
        saved_at=(1, 3, 5, 7),
        scales=twice((64.0, 32.0, 32.0, 64.0)),
        large_steps=(0, 2, 7),
    ),
    # The same, where only the last replica has large elements.
    "automatic_on_one": Scenario(
        lambda: keras_accum.AutomaticLossScale(
            INITIAL,
            maximum=1024.0,
            period=2,
            edge=1000.0,
            ratio=0.22 / registry.NUM_REPLICAS,
        ),
        saved_at=(1, 3, 5, 7),
        scales=twice((64.0, 32.0, 32.0, 64.0)),
        large_steps=(0, 2, 7),
        first_large_row=stepping.ROWS - 1,
    ),
    # A micro-batch that was left out lowers the scale once its window is closed.
    "micro_batches": Scenario(
        _dynamic(growth_interval=100),
        saved_at=(1, 2, 4, 7),
        scales=(64.0, 64.0, 32.0, 32.0, 32.0, 16.0, 16.0, 16.0, 16.0),
        steps_per_window=3,
        bad_steps=(0, 4),
        policy="skip_micro_batch",
    ),
}

# Every scenario in every format, and the rest pairwise.
CASES = [
    ("hysteresis", "keras", "mirrored", "mirrored", "wrapper"),
    ("hysteresis", "weights", "default", "mirrored", "mixin"),
    ("hysteresis", "checkpoint", "mirrored", "default", "wrapper"),
    ("static_asked_for_16", "keras", "default", "mirrored", "mixin"),
    ("static_asked_for_16", "weights", "mirrored", "default", "wrapper"),
    ("static_asked_for_16", "checkpoint", "default", "default", "mixin"),
    ("dynamic_asked_for_16", "keras", "mirrored", "default", "wrapper"),
    ("dynamic_asked_for_16", "weights", "mirrored", "mirrored", "mixin"),
    ("dynamic_asked_for_16", "checkpoint", "default", "mirrored", "wrapper"),
    ("scheduled", "keras", "default", "default", "wrapper"),
    ("scheduled", "weights", "default", "mirrored", "wrapper"),
    ("scheduled", "checkpoint", "mirrored", "mirrored", "mixin"),
    ("automatic", "keras", "default", "default", "mixin"),
    ("automatic", "weights", "default", "default", "wrapper"),
    ("automatic", "checkpoint", "default", "default", "mixin"),
    ("automatic_on_one", "keras", "mirrored", "mirrored", "wrapper"),
    ("automatic_on_one", "weights", "mirrored", "mirrored", "mixin"),
    ("automatic_on_one", "checkpoint", "mirrored", "mirrored", "wrapper"),
    ("automatic", "weights", "mirrored", "default", "wrapper"),
    ("micro_batches", "keras", "mirrored", "default", "wrapper"),
    ("micro_batches", "weights", "mirrored", "mirrored", "wrapper"),
    ("micro_batches", "checkpoint", "mirrored", "mirrored", "mixin"),
    ("micro_batches", "keras", "default", "mirrored", "mixin"),
]


class ResumeTest(saving.TestCase):
    @parameterized.parameters(*CASES)
    def test_goes_on_as_if_never_interrupted(
        self, name, file_format, source, target, surface
    ):
        scenario = SCENARIOS[name]
        make = getattr(scenario, surface)
        num_steps = len(scenario.scales)
        model, paths = stepping.layered(source, make), {}
        for k in range(num_steps):
            if k in scenario.saved_at:
                path = self.path(f"{k}{saving.SUFFIXES[file_format]}")
                paths[k] = saving.save(model, path)
            self.step(scenario, model, source, k)
        self.assert_ended(scenario, model, [replicas(source)] * num_steps)
        for saved_at, path in paths.items():
            with self.subTest(saved_at=saved_at):
                model = saving.restore(path, target, make)
                self.assert_counted(scenario, model, saved_at - 1)
                for k in range(saved_at, num_steps):
                    self.step(scenario, model, target, k)
                self.assert_ended(
                    scenario,
                    model,
                    [replicas(source)] * saved_at
                    + [replicas(target)] * (num_steps - saved_at),
                )

    def step(self, scenario, model, strategy, k):
        gradients, scale = scenario.gradients()[k], float(model.optimizer.loss_scale)
        stepping.micro_step(model, strategy, gradients, scale=scale)
        if k in dict(scenario.requests):
            model.optimizer.loss_scale = dict(scenario.requests)[k]
        self.assert_counted(scenario, model, k)

    def assert_counted(self, scenario, model, k):
        optimizer = model.optimizer
        self.assertEqual(
            (
                float(optimizer.loss_scale),
                int(optimizer.skipped_windows),
                int(optimizer.skipped_micro_batches),
            ),
            (scenario.scales[k], *scenario.skipped()[k]),
            f"after micro step {k}",
        )

    def assert_ended(self, scenario, model, replicas_of_step):
        expected = scenario.expected(replicas_of_step)
        plain = expected.optimizer.variables
        training.assert_same_variables(
            [*model.variables, *model.optimizer.variables[: len(plain)]],
            [*expected.variables, *plain],
            tolerances.BY_DTYPE["float32"],
        )


def replicas(strategy):
    return registry.STRATEGIES[strategy]().num_replicas_in_sync
