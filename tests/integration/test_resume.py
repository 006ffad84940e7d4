"""Invariant 5: a save at any micro step, restored anywhere, continues as before.

The expected values come from the plain optimizer on the mean of each window's rows.
"""

import contextlib
import dataclasses
import itertools
import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import tolerances, training
from tests.integration import saving, stepping

STEPS = 3  # per window
SAVED_AT = range(STEPS, 2 * STEPS)  # every position, with momentum from a window before


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training: what its steps are like, and what they must come to."""

    options: tuple = ()  # of the plain optimizer
    lengths: tuple = (STEPS, STEPS)  # of the windows
    is_weighted: bool = False
    has_none: bool = False
    has_new_length: bool = False  # asked for in the middle of the second window

    def plain(self):
        return keras.optimizers.SGD(0.05, momentum=0.9, **dict(self.options))

    def wrapper(self):
        return keras_accum.AccumulationOptimizer(self.plain(), STEPS)

    def mixin(self):
        return stepping.AccumulatingSGD(
            0.05, momentum=0.9, accumulation_steps=STEPS, **dict(self.options)
        )

    @property
    def num_steps(self) -> int:
        return sum(self.lengths)

    def gradients(self):
        gradients = stepping.gradients(self.num_steps)
        if self.has_none:
            # The bias has one in step 0, in step 3 (before the later saves), in none
            # of the last window.
            for k in (1, 2, 4, 5, 6, 7, 8):
                gradients[k][1] = None
        return gradients

    def weights(self):
        if not self.is_weighted:
            return [None] * self.num_steps
        random = np.random.RandomState(1)
        shape = (self.num_steps, stepping.ROWS)
        return list(random.uniform(0.2, 3.0, shape).astype("float32"))

    def run(self, model, strategy, steps):
        """Yields before each of the micro steps `steps`, and takes it."""
        gradients, weights = self.gradients(), self.weights()
        for k in steps:
            yield k
            with warnings.catch_warnings():
                if self.has_none:
                    warnings.filterwarnings("ignore", message="Gradients do not exist")
                stepping.micro_step(model, strategy, gradients[k], weights[k])
            if self.has_new_length and k == STEPS:
                model.optimizer.accumulation_steps = 2

    def expected(self):
        """The plain optimizer, after one update a window."""
        model = stepping.layered("default", self.plain)
        ends = list(itertools.accumulate(self.lengths))
        for start, end in zip([0, *ends], ends, strict=False):
            weights = self.weights()[start:end] if self.is_weighted else None
            means = stepping.window_mean(self.gradients()[start:end], weights)
            stepping.apply_plain(model, means)
        return model


SCENARIOS = {
    "momentum": Scenario(),
    "row_weights": Scenario(is_weighted=True),
    "none_gradients": Scenario(lengths=(3, 3, 3), has_none=True),
    "ema": Scenario(options=(("use_ema", True), ("ema_momentum", 0.5))),
    "new_length": Scenario(lengths=(3, 3, 2), has_new_length=True),
}

# The plainest scenario from each strategy to each, and everything else pairwise.
CASES = [
    ("momentum", "keras", "default", "default", "wrapper"),
    ("momentum", "weights", "default", "one_device", "wrapper"),
    ("momentum", "checkpoint", "default", "mirrored", "wrapper"),
    ("momentum", "weights", "one_device", "default", "wrapper"),
    ("momentum", "checkpoint", "one_device", "one_device", "wrapper"),
    ("momentum", "keras", "one_device", "mirrored", "wrapper"),
    ("momentum", "checkpoint", "mirrored", "default", "wrapper"),
    ("momentum", "keras", "mirrored", "one_device", "wrapper"),
    ("momentum", "weights", "mirrored", "mirrored", "wrapper"),
    ("momentum", "keras", "default", "mirrored", "mixin"),
    ("momentum", "weights", "mirrored", "one_device", "mixin"),
    ("momentum", "checkpoint", "mirrored", "mirrored", "mixin"),
    ("row_weights", "keras", "mirrored", "mirrored", "wrapper"),
    ("row_weights", "weights", "mirrored", "default", "mixin"),
    ("row_weights", "keras", "default", "mirrored", "wrapper"),
    # A `tf.train.Checkpoint` cannot turn rows of one replica into rows of two.
    ("row_weights", "checkpoint", "mirrored", "mirrored", "wrapper"),
    ("row_weights", "weights", "default", "one_device", "wrapper"),
    ("none_gradients", "keras", "mirrored", "default", "wrapper"),
    ("none_gradients", "weights", "default", "mirrored", "wrapper"),
    ("none_gradients", "checkpoint", "mirrored", "mirrored", "mixin"),
    ("none_gradients", "weights", "one_device", "default", "mixin"),
    ("ema", "keras", "default", "mirrored", "wrapper"),
    ("ema", "weights", "mirrored", "mirrored", "mixin"),
    ("ema", "checkpoint", "mirrored", "default", "wrapper"),
    ("new_length", "keras", "mirrored", "one_device", "mixin"),
    ("new_length", "weights", "default", "mirrored", "wrapper"),
    ("new_length", "checkpoint", "mirrored", "mirrored", "wrapper"),
    ("new_length", "keras", "default", "default", "wrapper"),
]


class ResumeTest(saving.TestCase):
    @parameterized.parameters(*CASES)
    def test_continues_as_if_never_interrupted(
        self, name, file_format, source, target, surface
    ):
        scenario = SCENARIOS[name]
        optimizer = getattr(scenario, surface)
        model = stepping.layered(source, optimizer)
        paths = {}
        for k in scenario.run(model, source, range(SAVED_AT.stop)):
            if k in SAVED_AT:
                path = self.path(f"{k}{saving.SUFFIXES[file_format]}")
                paths[k] = saving.save(model, path)
        expected = scenario.expected()
        plain = expected.optimizer.variables
        for saved_at, path in paths.items():
            with self.subTest(saved_at=saved_at):
                model = saving.restore(path, target, optimizer)
                self.assertEqual(int(model.optimizer.position), saved_at - STEPS)
                for _ in scenario.run(
                    model, target, range(saved_at, scenario.num_steps)
                ):
                    pass
                training.assert_same_variables(
                    [*model.variables, *model.optimizer.variables[: len(plain)]],
                    [*expected.variables, *plain],
                    tolerances.BY_DTYPE["float32"],
                )
                self.assertEqual(int(model.optimizer.position), 0)

    @parameterized.parameters(
        ("weights", "mirrored", "mirrored"),
        ("keras", "default", "one_device"),
        ("checkpoint", "one_device", "default"),
    )
    def test_the_loss_scale_goes_on_counting(self, file_format, source, target):
        def optimizer():
            # The third finite update after the overflow is made after the restore.
            scale = keras_accum.DynamicLossScale(growth_interval=3)
            return keras_accum.AccumulationOptimizer(
                SCENARIOS["momentum"].plain(), 2, loss_scale=scale
            )

        steps = stepping.gradients(10)
        steps[3][0][-1, 0, 0] = np.inf  # the last row: of one replica only

        def train(model, strategy, numbers):
            for k in numbers:
                scale = float(model.optimizer.loss_scale)
                stepping.micro_step(model, strategy, steps[k], scale=scale)

        model = stepping.layered(source, optimizer)
        train(model, source, range(9))
        suffix = saving.SUFFIXES[file_format]
        path = saving.save(model, self.path(f"open{suffix}"))
        model = saving.restore(path, target, optimizer)
        self.assertEqual(float(model.optimizer.loss_scale), 2.0**14)
        self.assertEqual(int(model.optimizer.skipped_windows), 1)
        train(model, target, [9])
        self.assertEqual(float(model.optimizer.loss_scale), 2.0**15)
        expected = stepping.layered("default", SCENARIOS["momentum"].plain)
        for start in (0, 4, 6, 8):
            means = stepping.window_mean(steps[start : start + 2])
            stepping.apply_plain(expected, means)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )


def _momentum(accumulation_steps):
    plain = SCENARIOS["momentum"].plain
    return lambda: keras_accum.AccumulationOptimizer(plain(), accumulation_steps)


class OtherOptimizerTest(saving.TestCase):
    def saved(self, accumulation_steps, num_steps):
        model = stepping.layered("default", _momentum(accumulation_steps))
        for gradients in stepping.gradients(num_steps):
            stepping.micro_step(model, "default", gradients)
        return saving.save(model, self.path("saved.weights.h5"))

    def test_the_accumulation_steps_of_the_file_replace_the_constructors(self):
        path = self.saved(3, num_steps=4)
        with self.assertLogs("absl", "WARNING") as logs:
            model = saving.restore(path, "default", _momentum(5))
        self.assertLen(logs.output, 1)
        self.assertIn("accumulation_steps is 3, as saved", logs.output[0])
        self.assertIn("constructed with 5", logs.output[0])
        self.assertEqual(model.optimizer.accumulation_steps, 3)
        for gradients in stepping.gradients(6)[4:]:
            stepping.micro_step(model, "default", gradients)
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 2)

    def test_equal_accumulation_steps_are_not_logged(self):
        path = self.saved(3, num_steps=4)
        with self.assertNoLogs("absl", "WARNING"):
            saving.restore(path, "default", _momentum(3))

    @parameterized.product(
        file_format=["weights", "checkpoint"], num_steps=[3, 4], is_built=[True, False]
    )
    def test_an_optimizer_of_windows_of_one_takes_up_longer_ones(
        self, file_format, num_steps, is_built
    ):
        model = stepping.layered("default", _momentum(3))
        steps = stepping.gradients(6)
        for gradients in steps[:num_steps]:
            stepping.micro_step(model, "default", gradients)
        path = saving.save(model, self.path(f"x{saving.SUFFIXES[file_format]}"))
        model = stepping.layered("default", _momentum(1), seed=7)
        if not is_built:
            model.optimizer = _momentum(1)()
        if file_format == "weights":
            # Keras loads the slots of an optimizer that is built only, and says so.
            is_told = self.assertWarnsRegex(UserWarning, "optimizer")
            with contextlib.nullcontext() if is_built else is_told:
                model.load_weights(path)
        else:
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.read(path)
        self.assertEqual(model.optimizer.accumulation_steps, 3)
        for gradients in steps[num_steps:]:
            stepping.micro_step(model, "default", gradients)
        expected = stepping.layered("default", SCENARIOS["momentum"].plain)
        stepping.apply_plain(expected, stepping.window_mean(steps[:3]))
        if file_format == "weights" and not is_built:
            expected.optimizer = SCENARIOS["momentum"].plain()
        stepping.apply_plain(expected, stepping.window_mean(steps[3:]))
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.parameters("weights", "checkpoint")
    def test_one_that_has_stepped_cannot(self, file_format):
        model = stepping.layered("default", _momentum(3))
        path = saving.save(model, self.path(f"x{saving.SUFFIXES[file_format]}"))
        model = stepping.layered("default", _momentum(1))
        stepping.micro_step(model, "default", stepping.gradients(1)[0])
        with self.assertRaisesRegex(ValueError, "cannot be raised from 1 once"):
            if file_format == "weights":
                model.load_weights(path)
            else:
                tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)

    def test_windows_of_one_go_into_longer_ones(self):
        path = self.saved(1, num_steps=2)
        with self.assertLogs("absl", "WARNING"):
            model = saving.restore(path, "default", _momentum(4))
        self.assertEqual(model.optimizer.accumulation_steps, 1)
        model.optimizer.accumulation_steps = 4
        expected = stepping.layered("default", SCENARIOS["momentum"].plain)
        steps = stepping.gradients(6)
        for gradients in steps[2:]:
            stepping.micro_step(model, "default", gradients)
        for window in (steps[:1], steps[1:2], steps[2:]):
            stepping.apply_plain(expected, stepping.window_mean(window))
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.parameters(
        ([], "2 saved accumulators for 4 variables"), ([1], "[Ss]hape")
    )
    def test_the_accumulators_of_another_model_are_refused(self, frozen, message):
        def model(frozen):
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(4)]
            )
            for layer in frozen:
                model.layers[layer].trainable = False
            # Without slots: Keras itself would notice theirs.
            model.compile(keras_accum.AccumulationOptimizer(keras.optimizers.SGD(), 3))
            model.optimizer.build(model.trainable_variables)
            return model

        path = saving.save(model(frozen=[0]), self.path("saved.weights.h5"))
        other = model(frozen)
        with self.assertRaisesRegex(ValueError, message):
            other.load_weights(path)
