"""Invariant 8: files go from the plain optimizer to the accumulating one, and back.

Under pytest every warning is an error, so no exchange may warn.
"""

import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import saving, stepping

STEPS = 3

EMA = {"use_ema": True, "ema_momentum": 0.5}

PLAIN = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, **EMA),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
}
MIXED = {
    "momentum": lambda: stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS, **EMA
    ),
    "adam": lambda: stepping.AccumulatingAdam(
        0.01, amsgrad=True, accumulation_steps=STEPS
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    PLAIN["multi"] = registry.OPTIMIZERS["multi"]

PAIRS = [
    ("plain", "wrapper"),
    ("plain", "mixin"),
    ("wrapper", "plain"),
    ("wrapper", "mixin"),
    ("mixin", "plain"),
    ("mixin", "wrapper"),
]
CASES = [
    (optimizer, *pair)
    for optimizer in PLAIN
    for pair in PAIRS
    if optimizer in MIXED or "mixin" not in pair
]


STRAY = stepping.gradients(1, seed=5)[0]


def made_by(optimizer: str, surface: str):
    """A function that makes the optimizer, plain or accumulating."""
    if surface == "plain":
        return PLAIN[optimizer]
    if surface == "mixin":
        return MIXED[optimizer]
    return lambda: keras_accum.AccumulationOptimizer(PLAIN[optimizer](), STEPS)


def update(model, surface: str, steps, strategy: str = "default") -> None:
    """One update with the mean of the steps, by whichever way the optimizer takes."""
    if surface == "plain":
        rows = [
            np.broadcast_to(mean, (stepping.ROWS, *mean.shape))
            for mean in stepping.window_mean(steps)
        ]
        stepping.micro_step(model, strategy, rows)
        return
    for rows in steps:
        stepping.micro_step(model, strategy, rows)


def open_window(model, surface: str, strategy: str = "default", stray=STRAY) -> None:
    """A micro step that is not the last of its window."""
    if surface != "plain":
        stepping.micro_step(model, strategy, stray)


class ExchangeTest(saving.TestCase):
    def check(self, model, expected):
        plain = expected.optimizer.variables
        for rtol, actual, desired in (
            (tolerances.BY_DTYPE["float32"], model.variables, expected.variables),
            (tolerances.ADAPTIVE, model.optimizer.variables[: len(plain)], plain),
        ):
            training.assert_same_variables(actual, desired, rtol)

    def exchange(self, optimizer, source, target, file_format, strategies):
        steps = stepping.gradients(2 * STEPS)
        from_strategy, to_strategy = strategies
        model = stepping.layered(from_strategy, made_by(optimizer, source))
        update(model, source, steps[:STEPS], from_strategy)
        open_window(model, source, from_strategy)
        path = self.path(f"saved{saving.SUFFIXES[file_format]}")
        saving.save(model, path)

        expected = stepping.layered("default", PLAIN[optimizer])
        update(expected, "plain", steps[:STEPS])

        model = stepping.layered(to_strategy, made_by(optimizer, target), seed=7)
        open_window(model, target, to_strategy, stray=steps[0])
        model.load_weights(path)
        self.check(model, expected)
        # Only an accumulating optimizer's file has a window; what was in the target's
        # is gone in any case.
        is_open = "plain" not in (source, target)
        window = [STRAY, *steps[STEPS + 1 :]] if is_open else steps[STEPS:]
        if target != "plain":
            self.assertEqual(int(model.optimizer.position), int(is_open))
        update(model, target, window[is_open:], to_strategy)
        update(expected, "plain", window)
        self.check(model, expected)

    @parameterized.parameters(*CASES)
    def test_values_survive_and_training_goes_on(self, optimizer, source, target):
        self.exchange(optimizer, source, target, "weights", ("default", "default"))

    @parameterized.parameters(
        ("momentum", "plain", "wrapper", ("default", "mirrored")),
        ("momentum", "plain", "mixin", ("mirrored", "mirrored")),
        ("adam", "wrapper", "plain", ("mirrored", "default")),
        ("adam", "mixin", "plain", ("mirrored", "mirrored")),
    )
    def test_whole_models_and_strategies(self, optimizer, source, target, strategies):
        self.exchange(optimizer, source, target, "keras", strategies)

    def trained(self, optimizer):
        """A plain model after one update, and a checkpoint of its optimizer."""
        model = stepping.layered("default", PLAIN[optimizer])
        update(model, "plain", stepping.gradients(STEPS))
        path = tf.train.Checkpoint(optimizer=model.optimizer).write(self.path("plain"))
        return model, path

    # Not for a MultiOptimizer: plain Keras leaves its children out of a Checkpoint.
    @parameterized.parameters("momentum", "adam")
    def test_a_plain_checkpoint_goes_into_the_inner_optimizer(self, optimizer):
        expected, path = self.trained(optimizer)
        model = stepping.layered("default", made_by(optimizer, "wrapper"))
        model.set_weights(expected.get_weights())
        checkpoint = tf.train.Checkpoint(optimizer=model.optimizer.inner_optimizer)
        status = checkpoint.read(path)
        status.assert_consumed()
        status.assert_existing_objects_matched()
        self.check(model, expected)

        back = stepping.layered("default", PLAIN[optimizer])
        back.set_weights(expected.get_weights())
        path = checkpoint.write(self.path("inner"))
        tf.train.Checkpoint(optimizer=back.optimizer).read(path).assert_consumed()
        self.check(back, expected)

    @parameterized.parameters(*MIXED)
    def test_a_plain_checkpoint_goes_into_the_mixin(self, optimizer):
        expected, path = self.trained(optimizer)
        model = stepping.layered("default", MIXED[optimizer])
        model.set_weights(expected.get_weights())
        tf.train.Checkpoint(optimizer=model.optimizer).read(path).expect_partial()
        self.check(model, expected)

    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_set_weights_takes_what_variables_hold(self, strategy, surface):
        steps = stepping.gradients(2 * STEPS)
        source = stepping.layered(strategy, made_by("momentum", surface))
        for rows in steps[: STEPS + 2]:
            stepping.micro_step(source, strategy, rows)
        model = stepping.layered(strategy, made_by("momentum", surface), seed=7)
        model.set_weights(source.get_weights())
        values = [training.numbers(v) for v in source.optimizer.variables]
        model.optimizer.set_weights(values)
        for rows in steps[STEPS + 2 :]:
            stepping.micro_step(model, strategy, rows)
        expected = stepping.layered("default", PLAIN["momentum"])
        update(expected, "plain", steps[:STEPS])
        update(expected, "plain", steps[STEPS:])
        self.check(model, expected)


# Only Keras and keras_accum are imported before the model is loaded.
LOAD = """
import sys, warnings
import keras, keras_accum
warnings.simplefilter("error")
for path in sys.argv[1:]:
    optimizer = keras.saving.load_model(path, safe_mode=True).optimizer
    print(type(optimizer).__name__, type(optimizer.inner_optimizer).__name__,
          int(optimizer.position), int(optimizer.iterations.numpy()))
"""


class LoadModelTest(saving.TestCase):
    def test_a_fresh_process_needs_no_custom_objects(self):
        paths, expected = [], []
        for optimizer in PLAIN:
            strategy = "mirrored" if optimizer == "adam" else "default"
            model = stepping.layered(strategy, made_by(optimizer, "wrapper"))
            update(model, "wrapper", stepping.gradients(STEPS), strategy)
            open_window(model, "wrapper", strategy)
            paths.append(saving.save(model, self.path(f"{optimizer}.keras")))
            inner = type(PLAIN[optimizer]()).__name__
            expected.append(f"AccumulationOptimizer {inner} 1 1")
        package = os.path.dirname(os.path.dirname(keras_accum.__file__))
        result = subprocess.run(
            [sys.executable, "-c", LOAD, *paths],
            env={**os.environ, "PYTHONPATH": package},
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.splitlines(), expected)
