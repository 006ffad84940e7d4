"""The gradient noise scale through `fit`, in rows; and as statistics would have it."""

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import GradientNoiseScale
from keras_accum.callbacks.rows import Rows
from tests import micro_steps, refusals, registry, training
from tests.equivalence import given_gradients

N, MOMENTUM = 2, 0.5
UPDATES = 2  # in an epoch


class Batches(keras.callbacks.Callback):
    """What the logs say after each batch; stands behind the callback in the list."""

    def __init__(self):
        super().__init__()
        self.logged = []

    def on_train_batch_end(self, batch, logs=None):
        self.logged.append(logs["gradient_noise_scale"])


class WithoutLossMetric(keras.Sequential):
    """A model whose own `train_step` keeps no loss."""

    def train_step(self, data):
        super().train_step(data)
        return {"seen": 1.0}

    @property
    def metrics(self):
        return []


def _optimizer(surface="wrapper"):
    # A learning rate of 0: the gradients of all updates are known beforehand.
    if surface == "wrapper":
        return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.0), N)
    mixed = given_gradients.AccumulatingSGD(0.0, accumulation_steps=N)
    if surface == "inside":
        return keras.optimizers.LossScaleOptimizer(mixed, initial_scale=64.0)
    return mixed


def _model(
    place=("default", "graph"),
    optimizer=_optimizer,
    cls=keras.Sequential,
    **compile_arguments,
):
    """A linear model of weights 1."""
    strategy, mode = place
    with registry.STRATEGIES[strategy]().scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = cls([keras.Input((training.FEATURES,)), dense])
        model.compile(
            optimizer(), loss="mse", **registry.MODES[mode], **compile_arguments
        )
    return model


def _fit(model, *callbacks, epochs=2, **fit):
    x, y = training.rows(UPDATES * N * training.ROWS)
    data = training.batches(x, y, training.ROWS)
    fit |= {"epochs": epochs, "callbacks": list(callbacks), "verbose": 0}
    return model.fit(data, shuffle=False, **fit).history


def _expected(strategy="default", epochs=2, momentum=MOMENTUM):
    """The noise scale after each update, in rows: arXiv:1812.06162, appendix A.1.

    A small batch is what one replica sees in one micro step; a big one, an update.
    """
    replicas = micro_steps.num_replicas(strategy)
    small = training.ROWS // replicas
    x, y = (a.astype("float64") for a in training.rows(UPDATES * N * training.ROWS))
    by_row = 2 * (x.sum(axis=1, keepdims=True) - y) * x  # of (x 1 - y)^2
    per_update = by_row.reshape(UPDATES, N * replicas, small, -1).mean(axis=2)
    big = small * N * replicas
    traces = squares = 0.0
    scales = []
    for micro_gradients in [*per_update] * epochs:
        small_square = np.mean(np.sum(micro_gradients**2, axis=1))
        big_square = np.sum(micro_gradients.mean(axis=0) ** 2)
        square = (big * big_square - small * small_square) / (big - small)
        trace = (small_square - big_square) / (1 / small - 1 / big)
        traces = momentum * traces + (1 - momentum) * trace
        squares = momentum * squares + (1 - momentum) * square
        scales.append(traces / squares)
    assert min(scales) > 0  # else it is NaN, and the data is to be chosen anew
    return scales


def _assert_close(actual, expected):
    # Differences of squared norms: a few units of 6e-8 each.
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


class LogsTest(parameterized.TestCase):
    @parameterized.product(place=micro_steps.PLACES, surface=["wrapper", "mixin"])
    def test_rows_at_the_end_of_an_epoch(self, place, surface):
        model = _model(place, lambda: _optimizer(surface))
        history = _fit(model, GradientNoiseScale(momentum=MOMENTUM))
        expected = _expected(place[0])[UPDATES - 1 :: UPDATES]
        _assert_close(history["gradient_noise_scale"], expected)

    @parameterized.parameters("default", "mirrored")
    def test_after_each_batch_it_is_that_of_the_last_update(self, strategy):
        seen = Batches()
        callback = GradientNoiseScale(momentum=MOMENTUM)
        _fit(_model((strategy, "graph")), callback, seen)
        after = _expected(strategy)
        known = np.repeat([np.nan, *after], N)[1 : 1 + len(seen.logged)]
        _assert_close(seen.logged, known)

    @parameterized.parameters("default", "mirrored")
    def test_rows_that_are_given_are_those_of_one_replica(self, strategy):
        rows = training.ROWS // micro_steps.num_replicas(strategy)
        callback = GradientNoiseScale(3 * rows, MOMENTUM)
        history = _fit(_model((strategy, "graph")), callback, epochs=1)
        expected = 3 * _expected(strategy, 1)[-1]
        _assert_close(history["gradient_noise_scale"], [expected])

    def test_a_train_step_without_a_loss_metric_needs_them(self):
        for rows, expected in (
            (training.ROWS, _expected(epochs=1)[-1]),
            (None, np.nan),
        ):
            callback = GradientNoiseScale(rows, momentum=MOMENTUM)
            history = _fit(_model(cls=WithoutLossMetric), callback, epochs=1)
            _assert_close(history["gradient_noise_scale"], [expected])

    @parameterized.parameters(2, 4)
    def test_several_steps_per_execution(self, steps):
        model = _model(steps_per_execution=steps)
        history = _fit(model, GradientNoiseScale(momentum=MOMENTUM))
        expected = _expected()[UPDATES - 1 :: UPDATES]
        _assert_close(history["gradient_noise_scale"], expected)

    def test_keras_loss_scale_optimizer_around_the_mixin(self):
        model = _model(optimizer=lambda: _optimizer("inside"))
        history = _fit(model, GradientNoiseScale(momentum=MOMENTUM), epochs=1)
        _assert_close(history["gradient_noise_scale"], [_expected(epochs=1)[-1]])

    def test_sample_weights_that_keras_knows_do_not_change_the_rows(self):
        x, y = training.rows(N * training.ROWS)
        callback = GradientNoiseScale(momentum=MOMENTUM)
        model, weights = _model(), np.full(len(x), 3.0, "float32")
        history = model.fit(
            *(x, y, training.ROWS),
            sample_weight=weights,
            callbacks=[callback],
            shuffle=False,
            verbose=0,
        ).history
        # All gradients are threefold: the ratio is not.
        _assert_close(history["gradient_noise_scale"], [_expected()[0]])


class SeveralFitsTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_a_fit_after_one_without_it(self, strategy):
        model = _model((strategy, "graph"))
        _fit(model, epochs=1)
        history = _fit(model, GradientNoiseScale(momentum=MOMENTUM), epochs=1)
        _assert_close(history["gradient_noise_scale"], [_expected(strategy, 1)[-1]])

    def test_averages_go_on_in_a_second_fit(self):
        model = _model()
        for epochs in (1, 2):
            history = _fit(model, GradientNoiseScale(momentum=MOMENTUM), epochs=1)
            _assert_close(
                history["gradient_noise_scale"], [_expected("default", epochs)[-1]]
            )

    def test_another_momentum_begins_anew(self):
        model = _model()
        _fit(model, GradientNoiseScale(momentum=MOMENTUM), epochs=1)
        history = _fit(model, GradientNoiseScale(momentum=0.25), epochs=1)
        expected = _expected(epochs=1, momentum=0.25)[-1]
        _assert_close(history["gradient_noise_scale"], [expected])


class StatisticsTest(parameterized.TestCase):
    @parameterized.parameters(("default", 4, 400), ("mirrored", 2, 200))
    def test_it_is_the_ratio_of_the_known_noise_and_gradient(
        self, strategy, steps, num_windows
    ):
        replicas = micro_steps.num_replicas(strategy)
        n, momentum = steps * replicas, 0.99
        true = np.linspace(0.5, 1.5, 20)
        variances = np.linspace(0.2, 4.0, 20)  # S is diagonal
        trace, square = variances.sum(), true @ true
        random = np.random.RandomState(0)
        noise = random.randn(num_windows * steps, replicas, 20) * np.sqrt(variances)

        def optimizer():
            inner = keras.optimizers.SGD(0.1)
            made = keras_accum.AccumulationOptimizer(inner, steps)
            made.measure_gradients(noise=True, momentum=momentum)
            return made

        run = micro_steps.MicroSteps(strategy, optimizer, [np.zeros(20, "float32")])
        for gradients in (true + noise) / replicas:
            run([gradients.astype("float32")])
        # Gaussian noise, one window: Var(tr) = 2 tr(S^2) / (n - 1). Mean and sample
        # variance are independent: Var(|G|^2) = Var(|mean|^2) + Var(tr) / n^2, and the
        # covariance is -Var(tr) / n. Averaged with the weights of the moving average.
        weights = momentum ** np.arange(num_windows)
        share = np.sum(weights**2) / np.sum(weights) ** 2
        of_trace = 2 * np.sum(variances**2) / (n - 1)
        of_square = 4 * true @ (variances * true) / n + 2 * np.sum(variances**2) / n**2
        of_square += of_trace / n**2
        relative = np.sqrt(
            share
            * (
                of_trace / trace**2
                + of_square / square**2
                + 2 * of_trace / n / (trace * square)
            )
        )
        bound = 4 * relative  # passed by chance once in 16000 seeds
        self.assertLess(bound, 0.2)  # else a factor of n/(n - 1) could hide in it
        measured = float(run.optimizer.gradient_noise_scale)
        np.testing.assert_allclose(measured, trace / square, rtol=bound)


class RefusedTest(refusals.RefusalCase):
    def test_a_momentum(self):
        for error, value in (
            (TypeError, None),
            (TypeError, "0.5"),
            (TypeError, True),
            (ValueError, 1.0),
            (ValueError, -0.5),
            (ValueError, float("nan")),
        ):
            self.assert_refused(
                error,
                lambda v=value: GradientNoiseScale(momentum=v),
                "`momentum` must be",
                f"momentum={value!r}",
            )

    def test_a_number_of_rows(self):
        for value in (0, -1, 2.0, "8", True):
            self.assert_refused(
                ValueError,
                lambda v=value: GradientNoiseScale(v),
                "`micro_batch_size` must be an integer >= 1",
                f"micro_batch_size={value!r}",
            )

    def test_two_of_them(self):
        self.assert_refused(
            ValueError,
            lambda: _fit(_model(), GradientNoiseScale(), GradientNoiseScale()),
            "may steer the measurement of the gradient noise scale",
            "GradientNoiseScale and GradientNoiseScale",
        )

    def test_an_optimizer_that_does_not_accumulate(self):
        self.assert_refused(
            ValueError,
            lambda: _fit(_model(optimizer=keras.optimizers.SGD), GradientNoiseScale()),
            "GradientNoiseScale needs an optimizer of keras_accum",
            "optimizer=SGD",
        )

    def test_one_micro_batch_per_update_gets_a_warning_and_no_number(self):
        model = _model()
        model.optimizer.accumulation_steps = 1
        with self.assertWarnsRegex(UserWarning, "needs two or more micro-batches"):
            history = _fit(model, GradientNoiseScale(), epochs=1)
        self.assertTrue(np.isnan(history["gradient_noise_scale"][0]))


class RowsTest(parameterized.TestCase):
    def test_rows_since_the_last_reading_over_the_batches_since(self):
        rows = Rows(None)
        rows.begin_epoch()
        self.assertTrue(np.isnan(rows.per_micro_step))
        for total, batches, expected, mean in (
            (16, 2, 8, 8),
            (22, 4, 3, 5.5),  # the last ones are short
            (22, 6, 3, 5.5),
        ):
            rows.read({"rows": float(total)}, batches)
            self.assertEqual(rows.per_micro_step, expected)
            self.assertEqual(rows.mean_per_micro_step, mean)
        rows.begin_epoch()
        self.assertEqual(rows.per_micro_step, 3)
        rows.read({"rows": 5.0}, 1)
        self.assertEqual(rows.per_micro_step, 5)

    def test_without_a_metric_they_stay_unknown(self):
        rows = Rows(None)
        rows.begin_epoch()
        rows.read({}, 0)
        self.assertTrue(np.isnan(rows.per_micro_step))
