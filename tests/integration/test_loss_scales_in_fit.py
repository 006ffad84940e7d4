"""Every loss scale through `compile` and `fit`, with one window that overflows.

What is expected is plain Keras's: the gradients of each replica's rows under the same
policy, unscaled, their mean in float64, the plain optimizer. Scales follow the rules as
they are published.
"""

import functools
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import stepping

STEPS = 2
WINDOWS = 8
BAD_WINDOW = 3  # its last row, which is of the last replica only, is infinite
WINDOW = STEPS * training.ROWS
EDGE, RATIO = 1.25, 0.25  # of the automatic scale
TOLERANCES = {
    "float32": tolerances.BY_DTYPE["float32"],
    "mixed_bfloat16": tolerances.BY_DTYPE["bfloat16"],
    "mixed_float16": tolerances.BY_DTYPE["float16"],
}


class Rule:
    """A loss scale that stays."""

    def __init__(self, scale):
        self.scale = scale

    def after(self, is_clean, updates, scaled):
        """A window has ended.

        Args:
            is_clean: All of its gradients were finite.
            updates: Made until now.
            scaled: The scaled gradients of each micro-batch, each replica's own.
        """


class DynamicRule(Rule):
    """Micikevicius et al., with growth after two finite windows in a row."""

    finite = 0

    def after(self, is_clean, updates, scaled):
        self.finite = self.finite + 1 if is_clean else 0
        if not is_clean:
            self.scale /= 2
        elif self.finite == 2:
            self.scale, self.finite = self.scale * 2, 0


class ScheduledRule(Rule):
    """16, 32, 64, ..., by updates."""

    def after(self, is_clean, updates, scaled):
        self.scale = 2.0 ** (4 + updates)


class AutomaticRule(Rule):
    """Graphcore's, with a decision after every second window."""

    def __init__(self, scale):
        super().__init__(scale)
        self.magnitudes, self.windows, self.shares = [], 0, []

    def after(self, is_clean, updates, scaled):
        self.magnitudes += [np.abs(each).ravel() for each in scaled]
        self.windows += 1
        if self.windows % 2 == 0:
            elements = np.concatenate(self.magnitudes)
            self.magnitudes = []
            share = np.mean(~(elements <= EDGE))  # what is not finite is large
            self.shares.append(share)
            if share > RATIO:
                self.scale = max(self.scale / 2, 1.0)
            elif self.scale * 2 < 2.0**9:
                self.scale *= 2


def _doubled(updates):
    return 2.0 ** (4.0 + tf.cast(updates, tf.float32))


# What is passed as `loss_scale`, and the rule that it must follow. Powers of two, which
# scale without rounding.
SCALES = {
    "static": (lambda: 1024.0, lambda: Rule(1024.0)),
    "dynamic": (
        lambda: keras_accum.DynamicLossScale(1024.0, growth_interval=2),
        lambda: DynamicRule(1024.0),
    ),
    "scheduled": (
        lambda: keras_accum.ScheduledLossScale(_doubled),
        lambda: ScheduledRule(16.0),
    ),
    "automatic": (
        lambda: keras_accum.AutomaticLossScale(
            4.0, maximum=2.0**9, period=2, edge=EDGE, ratio=RATIO
        ),
        lambda: AutomaticRule(4.0),
    ),
}


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def wrapper(loss_scale):
    return keras_accum.AccumulationOptimizer(momentum(), STEPS, loss_scale=loss_scale)


def mixin(loss_scale):
    return stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS, loss_scale=loss_scale
    )


class Traced(keras.Sequential):
    """A small network that counts how often its step is traced (or run eagerly)."""

    traces = 0

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def network(optimizer, **compile_arguments):
    keras.utils.set_random_seed(0)
    model = Traced(
        [
            keras.Input((training.FEATURES,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, loss="mse", auto_scale_loss=False, **compile_arguments)
    return model


def rows():
    x, y = training.rows(WINDOWS * WINDOW)
    x[(BAD_WINDOW + 1) * WINDOW - 1, 0] = np.inf
    return x, y


class Expected(NamedTuple):
    weights: list
    losses: list  # the mean of each window's
    scales: list  # after each window


@functools.cache
def expected(policy, scale, replicas):
    """Plain Keras, micro-batch by micro-batch; the policy is set by the caller."""
    model, rule = network(momentum()), SCALES[scale][1]()
    share = training.ROWS // replicas
    losses, scales, updates = [], [], 0
    batches = list(training.batches(*rows(), share))
    for start in range(0, len(batches), STEPS * replicas):
        each = [
            loss_and_gradients(model, x, y)
            for x, y in batches[start : start + STEPS * replicas]
        ]
        window = [gradients for _, gradients in each]
        losses.append(np.mean([loss for loss, _ in each]))
        means = [np.mean(g, axis=0, dtype="float64") for g in zip(*window, strict=True)]
        is_clean = all(np.all(np.isfinite(mean)) for mean in means)
        if is_clean:
            stepping.apply_plain(model, means)
            updates += 1
        scaled = [g * (rule.scale / replicas) for gs in window for g in gs]
        rule.after(is_clean, updates, scaled)
        scales.append(rule.scale)
    # Rounding must not decide on which side of the ratio a share lies.
    assert all(abs(s - RATIO) > 0.02 for s in getattr(rule, "shares", []))
    return Expected(model.get_weights(), losses, scales)


def loss_and_gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    variables = [variable.value for variable in model.trainable_variables]
    return float(loss), [np.asarray(g) for g in tape.gradient(loss, variables)]


class Recorder(keras.callbacks.Callback):
    """What stands after each window, which is an epoch."""

    def __init__(self):
        super().__init__()
        self.scales, self.traces, self.skipped = [], [], []

    def on_epoch_end(self, epoch, logs=None):
        self.scales.append(float(self.model.optimizer.loss_scale))
        self.skipped.append(int(self.model.optimizer.skipped_windows))
        self.traces.append(self.model.traces)


class InFitTest(parameterized.TestCase):
    def tearDown(self):
        keras.mixed_precision.set_dtype_policy("float32")
        super().tearDown()

    @parameterized.product(
        scale=[*SCALES], policy=[*TOLERANCES], strategy=["default", "mirrored"]
    )
    def test_trains_as_plain_keras_and_follows_its_rule(self, scale, policy, strategy):
        recorder = self.fit(wrapper, scale, policy, strategy, "graph")
        self.assertLen(set(recorder.traces), 1)  # all are of the first window

    @parameterized.parameters(
        *[(scale, "default") for scale in SCALES],
        ("dynamic", "mirrored"),  # these two judge what the replicas have seen
        ("automatic", "mirrored"),
    )
    def test_the_mixin_does_in_eager_mode(self, scale, strategy):
        self.fit(mixin, scale, "mixed_bfloat16", strategy, "eager")

    def fit(self, make, scale, policy, strategy, mode):
        """Fits, compares with plain Keras, and returns what was recorded."""
        keras.mixed_precision.set_dtype_policy(policy)
        distribution = registry.STRATEGIES[strategy]()
        correct = expected(policy, scale, distribution.num_replicas_in_sync)
        with distribution.scope():
            model = network(make(SCALES[scale][0]()), **registry.MODES[mode])
        recorder = Recorder()
        history = model.fit(
            training.batches(*rows(), training.ROWS),
            steps_per_epoch=STEPS,
            epochs=WINDOWS,
            shuffle=False,
            verbose=0,
            callbacks=[recorder],
        ).history
        tolerance = TOLERANCES[policy]
        for one, other in zip(model.get_weights(), correct.weights, strict=True):
            np.testing.assert_allclose(one, other, tolerance.rtol, tolerance.atol)
        self.assertEqual(recorder.scales, correct.scales)
        # Logged as they are, not as they are scaled.
        np.testing.assert_allclose(
            history["loss"], correct.losses, tolerance.rtol, tolerance.atol
        )
        self.assertEqual(
            recorder.skipped, [int(w >= BAD_WINDOW) for w in range(WINDOWS)]
        )
        iterations = int(training.numbers(model.optimizer.iterations))
        self.assertEqual(iterations, WINDOWS - 1)
        return recorder


class RulesTest(parameterized.TestCase):
    @parameterized.product(
        scale=["dynamic", "scheduled", "automatic"], replicas=[1, registry.NUM_REPLICAS]
    )
    def test_the_data_make_a_scale_move(self, scale, replicas):
        """Else the tests above would compare numbers that stand still."""
        scales = expected("float32", scale, replicas).scales
        moves = np.sign(np.diff([SCALES[scale][1]().scale, *scales]))
        self.assertIn(1, moves)
        if scale != "scheduled":
            self.assertIn(-1, moves)
