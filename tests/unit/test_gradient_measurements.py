"""The gradient's norm and noise scale, by the formulas on known micro-gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum.arguments import StepIsTraced
from tests import micro_steps, refusals
from tests.unit.test_arguments import make

N = 3
SHAPES = ((3, 2), (2,))
START = [np.zeros(shape, "float32") for shape in SHAPES]
MOMENTUM = 0.5
# What the noise scale must not depend on.
OPTIONS = {
    "plain": {},
    "sum": {"micro_reduction": "sum"},
    "running_mean": {"micro_reduction": "running_mean"},
    "mean_of_replicas": {"replica_reduction": "mean"},
    "sum_mean_of_replicas": {"micro_reduction": "sum", "replica_reduction": "mean"},
    "scaled": {"loss_scale": 1024.0},
    "skip_micro_batch": {"on_nonfinite": "skip_micro_batch"},
}


def _run(strategy, mode="graph", steps=N, values=None, noise=True, **options):
    def optimizer():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.01)
        measured = keras_accum.AccumulationOptimizer(inner, steps, **options)
        measured.measure_gradients(noise=noise, momentum=MOMENTUM)
        return measured

    return micro_steps.MicroSteps(strategy, optimizer, values or START, mode)


def _gradients(strategy, num_micro_steps, seed=0):
    """Around a mean that is not 0, so that the estimate of its norm is positive."""
    steps = micro_steps.random_gradients(SHAPES, strategy, num_micro_steps, seed)
    return [[g + np.float32(2.0) for g in step] for step in steps]


def _take(run, steps, **step):
    scale = np.float32(run.optimizer.loss_scale)
    for gradients in steps:
        run([None if g is None else g * scale for g in gradients], **step)


def _micro_gradients(window, replica_reduction="sum"):
    """One flat, true gradient for each micro-batch: Keras divides losses by R."""
    replicas = len(window[0][0])
    factor = replicas if replica_reduction == "sum" else 1
    return [
        factor * np.concatenate([np.ravel(g[r]) for g in step]).astype("float64")
        for step in window
        for r in range(replicas)
    ]


class Noise:
    """Appendix A.1 of arXiv:1812.06162 with batches of 1 and n micro-batches."""

    def __init__(self):
        self.trace = self.square = 0.0

    def after(self, micro_gradients):
        """The noise scale once a window of these has been seen."""
        n = len(micro_gradients)
        small = np.mean([g @ g for g in micro_gradients])
        mean = np.mean(micro_gradients, axis=0)
        square = (n * (mean @ mean) - 1 * small) / (n - 1)
        trace = (small - mean @ mean) / (1 / 1 - 1 / n)
        self.trace = MOMENTUM * self.trace + (1 - MOMENTUM) * trace
        self.square = MOMENTUM * self.square + (1 - MOMENTUM) * square
        return self.trace / self.square


def _assert_close(actual, expected):
    # Squared norms of some ten numbers, and differences of them: a few units of 6e-8.
    np.testing.assert_allclose(float(actual), expected, rtol=5e-6)


class GradientNormTest(parameterized.TestCase):
    def _norm(self, window, **reductions):
        means = micro_steps.combined(window, SHAPES, **reductions)
        return np.sqrt(sum(np.sum(g**2) for g in means if g is not None))

    @parameterized.parameters(*micro_steps.spread(*OPTIONS))
    def test_of_the_reduced_gradient_before_it_is_clipped(self, strategy, mode, option):
        run = _run(strategy, mode, noise=False, **OPTIONS[option])
        self.assertTrue(np.isnan(run.optimizer.gradient_norm))
        reductions = {k: v for k, v in OPTIONS[option].items() if k.endswith("tion")}
        steps = _gradients(strategy, 2 * N)
        for window in micro_steps.in_windows(steps, N):
            _take(run, window)
            expected = self._norm(window, **reductions)
            _assert_close(run.optimizer.gradient_norm, expected)
        _take(run, steps[:1])  # an open window has none yet
        _assert_close(run.optimizer.gradient_norm, expected)
        run.optimizer.flush()
        expected = self._norm(steps[:1], **reductions)
        _assert_close(run.optimizer.gradient_norm, expected)

    @parameterized.parameters(*micro_steps.PLACES)
    def test_of_windows_of_one_and_sparse_rows_that_come_twice(self, strategy, mode):
        replicas = micro_steps.num_replicas(strategy)
        random = np.random.RandomState(1)
        for steps in (1, 2):
            run = _run(strategy, mode, steps, noise=False)
            window = [
                [
                    micro_steps.Rows(
                        np.array([[1, 1, 0]] * replicas),
                        random.randn(replicas, 3, 2).astype("float32"),
                    ),
                    random.randn(replicas, 2).astype("float32"),
                ]
                for _ in range(steps)
            ]
            for step in window:
                run(step)
            _assert_close(run.optimizer.gradient_norm, self._norm(window))

    def test_of_float16_that_its_square_would_overflow(self):
        run = _run("default", steps=2, values=[np.zeros(2, "float16")], noise=False)
        for _ in range(2):
            run([np.array([[3e4, 4e4]], "float32")])
        _assert_close(run.optimizer.gradient_norm, 5e4)

    def test_of_a_window_that_was_skipped_it_is_not_finite(self):
        run = _run("default", steps=1, noise=False)
        _take(run, [[np.full((1, *shape), np.nan, "float32") for shape in SHAPES]])
        self.assertFalse(np.isfinite(run.optimizer.gradient_norm))

    def test_without_a_measurement_nothing_is_known(self):
        optimizer, variable = make("wrapper", 1), keras.Variable(1.0)
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
        self.assertTrue(np.isnan(optimizer.gradient_norm))
        self.assertTrue(np.isnan(optimizer.gradient_noise_scale))


class NoiseScaleTest(parameterized.TestCase):
    def test_an_empty_replica_is_no_micro_batch(self):
        run, replicas = _run("mirrored"), micro_steps.num_replicas("mirrored")
        steps = [
            [np.ones((replicas, *shape), "float32") for shape in SHAPES]
            for _ in range(2)
        ]
        for gradient in steps[1]:
            gradient[-1] = 0.0
        _take(run, steps)
        self.assertTrue(np.isnan(run.optimizer.gradient_noise_scale))

    @parameterized.parameters(*micro_steps.spread(*OPTIONS))
    def test_by_the_formulas_and_moving_averages(self, strategy, mode, option):
        options = OPTIONS[option]
        run, noise = _run(strategy, mode, **options), Noise()
        self.assertTrue(np.isnan(run.optimizer.gradient_noise_scale))
        for window in micro_steps.in_windows(_gradients(strategy, 3 * N), N):
            _take(run, window)
            reduction = options.get("replica_reduction", "sum")
            expected = noise.after(_micro_gradients(window, reduction))
            _assert_close(run.optimizer.gradient_noise_scale, expected)

    def test_replicas_alone_are_enough(self):
        run, noise = _run("mirrored", steps=1), Noise()
        for step in _gradients("mirrored", 2):
            _take(run, [step])
            expected = noise.after(_micro_gradients([step]))
            _assert_close(run.optimizer.gradient_noise_scale, expected)

    def test_one_micro_batch_says_nothing(self):
        run = _run("default", steps=1)
        _take(run, _gradients("default", 3))
        self.assertTrue(np.isnan(run.optimizer.gradient_noise_scale))

    def test_a_gradient_that_drowns_in_noise_is_not_known(self):
        run = _run("default", steps=2)
        (step,) = _gradients("default", 1)
        _take(run, [step, [-g for g in step]])
        self.assertTrue(np.isnan(run.optimizer.gradient_noise_scale))

    @parameterized.parameters("default", "mirrored")
    @pytest.mark.filterwarnings("ignore:Gradients do not exist")
    def test_an_absent_gradient_is_zero(self, strategy):
        steps = _gradients(strategy, N)
        zeros = [[kernel, np.zeros_like(bias)] for kernel, bias in steps]
        run = _run(strategy)
        _take(run, [[kernel, None] for kernel, _ in steps])
        expected = Noise().after(_micro_gradients(zeros))
        _assert_close(run.optimizer.gradient_noise_scale, expected)

    @parameterized.parameters("default", "mirrored")
    def test_windows_of_other_lengths(self, strategy):
        run, noise = _run(strategy), Noise()
        steps = _gradients(strategy, 8)
        _take(run, steps[:2])
        run.optimizer.flush()
        expected = noise.after(_micro_gradients(steps[:2]))
        _assert_close(run.optimizer.gradient_noise_scale, expected)
        run.optimizer.accumulation_steps = 5
        _take(run, steps[3:8])
        expected = noise.after(_micro_gradients(steps[3:8]))
        _assert_close(run.optimizer.gradient_noise_scale, expected)

    @parameterized.parameters(*micro_steps.PLACES)
    def test_it_is_what_it_was_after_windows_that_say_nothing(self, strategy, mode):
        replicas = micro_steps.num_replicas(strategy)
        run, noise = _run(strategy, mode), Noise()
        steps = _gradients(strategy, 2 * N)
        _take(run, steps[:N])
        expected = noise.after(_micro_gradients(steps[:N]))
        bad = [g.copy() for g in steps[1]]
        bad[1][-1, 0] = np.inf
        _take(run, [steps[0], bad, steps[2]])
        _assert_close(run.optimizer.gradient_noise_scale, expected)
        _take(run, steps[:1], weight=np.linspace(1, 2, replicas, dtype="float32"))
        _take(run, steps[1:N])
        _assert_close(run.optimizer.gradient_noise_scale, expected)
        _take(run, steps[:2])
        run.optimizer.reset()
        _take(run, steps[N:])
        expected = noise.after(_micro_gradients(steps[N:]))
        _assert_close(run.optimizer.gradient_noise_scale, expected)

    @parameterized.product(place=micro_steps.PLACES, scale=[None, 1024.0])
    def test_a_micro_batch_that_is_left_out_is_in_no_number(self, place, scale):
        replicas = micro_steps.num_replicas(place[0])
        for replica in range(replicas):
            options = {"on_nonfinite": "skip_micro_batch", "loss_scale": scale}
            run = _run(*place, **options)
            steps = _gradients(place[0], N)
            steps[1][0][replica, 0, 0] = np.nan
            micro_gradients = _micro_gradients(steps)
            del micro_gradients[replicas + replica]
            _take(run, steps)
            expected = Noise().after(micro_gradients)
            _assert_close(run.optimizer.gradient_noise_scale, expected)

    @parameterized.parameters("default", "mirrored")
    def test_a_window_that_was_open_before_says_nothing(self, strategy):
        run = micro_steps.MicroSteps(
            strategy, lambda: make("wrapper", N), START, "eager"
        )
        steps = _gradients(strategy, 2 * N)
        _take(run, steps[:1])
        run.optimizer.forget_traces()
        run.optimizer.measure_gradients(noise=True, momentum=MOMENTUM)
        _take(run, steps[1:N])
        self.assertTrue(np.isnan(run.optimizer.gradient_noise_scale))
        self.assertTrue(np.isfinite(run.optimizer.gradient_norm))
        _take(run, steps[N:])
        expected = Noise().after(_micro_gradients(steps[N:]))
        _assert_close(run.optimizer.gradient_noise_scale, expected)


class MeasureGradientsTest(refusals.RefusalCase):
    def test_a_momentum_out_of_range(self):
        for value in (-0.1, 1.0, 1, 2.0, float("nan"), float("inf")):
            self.assert_refused(
                ValueError,
                lambda v=value: make("wrapper").measure_gradients(True, v),
                "`momentum` must be in [0, 1)",
                f"momentum={value!r}",
                "Use for example 0.95",
            )

    @parameterized.parameters("wrapper", "mixin")
    def test_more_than_there_is_must_be_asked_for_in_time(self, surface):
        for before, after in (
            (None, {}),
            (None, {"noise": True}),
            ({}, {"noise": True}),
            ({"noise": True, "momentum": 0.5}, {"noise": True, "momentum": 0.9}),
        ):
            optimizer, variable = make(surface), keras.Variable(1.0)
            if before is not None:
                optimizer.measure_gradients(**before)
            optimizer.apply_gradients([(tf.constant(3.0), variable)])
            self.assert_refused(
                StepIsTraced,
                lambda o=optimizer, a=after: o.measure_gradients(**a),
                "`measure_gradients` must be called before the first micro step",
                "an optimizer that has taken a micro step",
                "call `optimizer.forget_traces()` before",
            )

    @parameterized.parameters("wrapper", "mixin")
    def test_what_there_is_can_be_asked_for_again(self, surface):
        optimizer, variable = make(surface, 2), keras.Variable(1.0)
        optimizer.measure_gradients()
        optimizer.measure_gradients(noise=True, momentum=0.5)
        for gradient in (3.0, 5.0):
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
            optimizer.measure_gradients()
            optimizer.measure_gradients(momentum=0.7)
            optimizer.measure_gradients(noise=True, momentum=0.5)
        _assert_close(optimizer.gradient_norm, 4)
        # m = 17 and M = 16 of two: |G|^2 = 15, tr(S) = 2.
        _assert_close(optimizer.gradient_noise_scale, 2 / 15)
