"""Under an emulated TPUStrategy: bad gradients, other lengths, flush, reset, scales."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances
from tests.platforms import tpu_evidence as evidence

STEPS = 3
RATE, MOMENTUM = 0.05, 0.9
INITIAL = [np.array([1.0, 2.0], "float32"), np.array(3.0, "float32")]
SHAPES = [(2,), ()]


def _run(name, surface="wrapper", steps=STEPS, **options):
    def make():
        options.setdefault("replica_reduction", "mean")
        return evidence.accumulating(surface, steps, **options)

    return micro_steps.MicroSteps(name, make, INITIAL)


def _gradients(name, num_steps, seed=0):
    return micro_steps.random_gradients(SHAPES, name, num_steps, seed)


def _take(run, steps):
    """Micro steps with true gradients, scaled as the optimizer would have them."""
    for gradients in steps:
        scale = np.float32(run.optimizer.loss_scale)
        run([gradient * scale for gradient in gradients])


def _assert_updates(case, run, windows):
    """The variables are SGD's after one update with the mean of each window."""
    values = [value.astype("float64") for value in INITIAL]
    velocities = [np.zeros_like(value) for value in values]
    for window in windows:
        means = micro_steps.combined(window, SHAPES, replica_reduction="mean")
        for i, mean in enumerate(means):
            velocities[i] = MOMENTUM * velocities[i] - RATE * mean
            values[i] = values[i] + velocities[i]
    tolerance = tolerances.BY_DTYPE["float32"]
    for actual, expected in zip(run.values, values, strict=True):
        np.testing.assert_allclose(
            actual, expected, rtol=tolerance.rtol, atol=tolerance.atol
        )
    case.assertEqual(run.num_updates, len(windows))
    case.assertEqual(run.num_traces, 1)
    evidence.assert_same_on_replicas(
        run.strategy, [*run.variables, run.optimizer.iterations]
    )


class BadGradientTest(parameterized.TestCase):
    @parameterized.product(name=["tpu_2", "tpu_8"], surface=["wrapper", "mixin"])
    def test_on_each_replica_in_turn_skips_everywhere(self, name, surface):
        run = _run(name, surface)
        windows = []
        for replica in range(micro_steps.num_replicas(name)):
            bad, good = (
                _gradients(name, STEPS, seed) for seed in (replica, replica + 50)
            )
            bad[replica % STEPS][replica % 2][replica] = (np.nan, np.inf)[replica % 2]
            _take(run, bad + good)
            windows.append(good)
            self.assertEqual(int(run.optimizer.skipped_windows), len(windows))
        _assert_updates(self, run, windows)

    @parameterized.parameters("tpu_2", "tpu_8")
    def test_a_bad_micro_batch_is_left_out(self, name):
        run = _run(name, on_nonfinite="skip_micro_batch")
        replicas = micro_steps.num_replicas(name)
        values = [value.astype("float64") for value in INITIAL]
        velocities = [np.zeros_like(value) for value in values]
        for replica in range(replicas):
            steps = _gradients(name, STEPS, replica)
            is_good = np.ones((STEPS, replicas), bool)
            steps[1][0][replica, 0], is_good[1, replica] = np.nan, False
            _take(run, steps)
            for i in range(len(values)):
                of_variable = np.stack([step[i] for step in steps])
                mean = of_variable[is_good].mean(axis=0)
                velocities[i] = MOMENTUM * velocities[i] - RATE * mean
                values[i] = values[i] + velocities[i]
        for actual, expected in zip(run.values, values, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
        self.assertEqual(int(run.optimizer.skipped_micro_batches), replicas)

    @parameterized.parameters("tpu_2", "tpu_8")
    def test_the_dynamic_scale_backs_off_and_grows(self, name):
        scale = keras_accum.DynamicLossScale(64.0, growth_interval=2)
        run = _run(name, loss_scale=scale)
        steps = _gradients(name, 4 * STEPS)
        steps[1][0][-1] = np.inf  # on the last replica only
        seen = []
        for window in micro_steps.in_windows(steps, STEPS):
            _take(run, window)
            seen.append(float(run.optimizer.loss_scale))
        self.assertEqual(seen, [32, 32, 64, 64])
        _assert_updates(self, run, micro_steps.in_windows(steps, STEPS)[1:])

    def test_the_automatic_scale_counts_on_all_replicas(self):
        scale = keras_accum.AutomaticLossScale(64.0, period=1)
        run = _run("tpu_2", loss_scale=scale)
        steps = _gradients("tpu_2", 2 * STEPS)
        steps[0][0][1] = 1e6  # above the edge, on one replica only
        _take(run, steps[:STEPS])
        self.assertEqual(float(run.optimizer.loss_scale), 32)
        _take(run, steps[STEPS:])
        self.assertEqual(float(run.optimizer.loss_scale), 64)
        _assert_updates(self, run, micro_steps.in_windows(steps, STEPS))


class BetweenStepsTest(parameterized.TestCase):
    @parameterized.product(name=["tpu_2", "tpu_8"], surface=["wrapper", "mixin"])
    def test_another_length_without_a_retrace(self, name, surface):
        run = _run(name, surface)
        steps = _gradients(name, 9)
        _take(run, steps[:1])
        run.optimizer.accumulation_steps = 2  # from the next window on
        _take(run, steps[1:5])
        run.optimizer.accumulation_steps = 4
        _take(run, steps[5:])
        lengths = (3, 2, 4)
        ends = np.cumsum(lengths)
        windows = [steps[end - n : end] for n, end in zip(lengths, ends, strict=True)]
        _assert_updates(self, run, windows)

    @parameterized.product(
        name=["tpu_2", "tpu_8"],
        surface=["wrapper", "mixin"],
        caller=["plain", "scope", "replica"],
    )
    def test_flush_and_reset(self, name, surface, caller):
        run = _run(name, surface)
        steps = _gradients(name, 7)

        def call(method):
            if caller == "plain":
                method()
            elif caller == "scope":
                with run.strategy.scope():
                    method()
            else:
                tf.function(_inside(run.strategy, method), autograph=False)()

        call(run.optimizer.flush)  # at position 0: nothing
        _take(run, steps[:2])
        call(run.optimizer.flush)
        self.assertEqual(int(run.optimizer.position), 0)
        _take(run, steps[2:4])
        call(run.optimizer.reset)
        self.assertEqual(int(run.optimizer.position), 0)
        _take(run, steps[4:])
        _assert_updates(self, run, [steps[:2], steps[4:]])

    def test_variables_without_a_gradient_stay(self):
        run = _run("tpu_2")
        steps = _gradients("tpu_2", 2 * STEPS)
        for step in steps[STEPS:]:
            step[1] = None
        _take(run, steps[:STEPS])
        with self.assertWarnsRegex(UserWarning, "Gradients do not exist"):
            for first, _ in steps[STEPS:]:
                run([first, None])
        one = [step[1].mean() for step in steps[:STEPS]]
        expected = INITIAL[1] - RATE * np.mean(one)
        np.testing.assert_allclose(run.values[1], expected, rtol=1e-6)

    def test_weights(self):
        run = _run("tpu_2", replica_reduction="sum")
        steps = _gradients("tpu_2", STEPS)
        weights = np.array([[1, 2], [3, 0.5], [0, 4]], "float32")
        for step, weight in zip(steps, weights, strict=True):
            run(step, weight)
        means = micro_steps.combined(steps, SHAPES, weights)
        for actual, initial, mean in zip(run.values, INITIAL, means, strict=True):
            np.testing.assert_allclose(actual, initial - RATE * mean, rtol=1e-6)


def _statistic():
    """As float8 layers flag their scales: its gradient is its next value."""
    variable = keras.Variable(0.25)
    variable.overwrite_with_gradient = True
    return variable


class OverwrittenTest(parameterized.TestCase):
    @parameterized.product(name=["tpu_2", "tpu_8"], steps=[1, 2])
    def test_the_largest_value_is_kept(self, name, steps):
        run = micro_steps.MicroSteps(
            name,
            lambda: evidence.accumulating("wrapper", steps),
            [INITIAL[0], _statistic],
        )
        replicas = micro_steps.num_replicas(name)
        for window in range(3):
            # The largest comes from another micro step and replica each time.
            given = 3.0 - window + np.arange(float(steps * replicas))
            given = np.roll(given, window + 1).reshape(steps, replicas)
            for gradient in given.astype("float32"):
                run([np.ones((replicas, 2), "float32"), gradient])
            self.assertEqual(run.values[1], given.max())
        evidence.assert_same_on_replicas(run.strategy, run.variables)


def _inside(strategy, method):
    def run():
        strategy.run(method)

    return run


class MixedPrecisionTest(parameterized.TestCase):
    @parameterized.parameters("mixed_bfloat16", "mixed_float16")
    def test_through_fit(self, policy):
        keras.mixed_precision.set_dtype_policy(policy)
        model = evidence.trained(
            "tpu_2", lambda: evidence.accumulating("wrapper", STEPS), 4, STEPS
        )
        expected = evidence.training.network(evidence.momentum())
        evidence.training.train(expected, 4, evidence.training.ROWS * STEPS)
        self.assertEqual(int(model.optimizer.skipped_windows), 0)
        tolerance = tolerances.BY_DTYPE[policy.removeprefix("mixed_")]
        evidence.training.assert_same_variables(
            model.variables, expected.variables, tolerance
        )
        strategy = registry.STRATEGIES["tpu_2"]()
        evidence.assert_same_on_replicas(strategy, model.variables)
