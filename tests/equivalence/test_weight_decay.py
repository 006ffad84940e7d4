"""Decay at the boundary: as the plain optimizer's own, as NumPy has it.

The decoupled form must train as the plain optimizer does that decays by itself and gets
the whole batch; the other forms, which Keras has not, are followed in NumPy.
"""

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances
from tests.equivalence import given_gradients

N, NUM_UPDATES = 3, 4
DECAY = 0.3
RATE, MOMENTUM = 0.1, 0.9
SHAPES = ((3, 2), (2,))
NAMES = ("kernel", "bias")
START = [np.linspace(-2.0, 3.0, 6).reshape(3, 2), np.array([1.5, -2.5])]

FORMS = {
    "coupled": {"decoupled": False},
    # Without a factor whatever is said of one: a gradient has its own.
    "coupled_without": {"decoupled": False, "times_learning_rate": False},
    "independent": {"times_learning_rate": False},
    "decoupled": {},
}


def _variables(constraint=None):
    """Functions that make the variables, by whose names MultiOptimizer chooses."""

    def make(value, name):
        variable = keras.Variable(value.astype("float32"), name=name)
        variable.constraint = constraint
        return variable

    return [lambda v=v, n=n: make(v, n) for v, n in zip(START, NAMES, strict=True)]


def _keras(optimizer, decay, **options):
    """A plain optimizer of the registry whose own decay is `decay`; None for none."""
    if optimizer == "muon":
        options["adam_weight_decay"] = decay
    if optimizer == "adamw" and decay is None:
        decay = 0.0  # it refuses None
    return registry.OPTIMIZERS[optimizer](weight_decay=decay, **options)


def _momentum_sgd(surface, accumulation_steps=N, **options):
    plain = {"learning_rate": RATE, "momentum": MOMENTUM}
    if surface == "mixin":
        return given_gradients.AccumulatingSGD(
            **plain, accumulation_steps=accumulation_steps, **options
        )
    return keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(**plain), accumulation_steps, **options
    )


def _run(place, optimizer, values=None, **decay):
    """Micro steps with an optimizer that decays at the boundary."""

    def decaying():
        made = optimizer()
        made.decay_weights(**{"weight_decay": DECAY, **decay})
        return made

    strategy, mode = place
    return micro_steps.MicroSteps(strategy, decaying, values or _variables(), mode)


def _gradients(strategy, num_micro_steps=N * NUM_UPDATES):
    return micro_steps.random_gradients(SHAPES, strategy, num_micro_steps)


def _take(run, steps, scale=1.0):
    for step in steps:
        run([None if g is None else g * np.float32(scale) for g in step])


def _means(steps, length=N):
    windows = micro_steps.in_windows(steps, length)
    return [micro_steps.combined(window, SHAPES) for window in windows]


def _assert_close(actual, expected, tolerance=tolerances.BY_DTYPE["float32"]):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), tolerance.rtol, tolerance.atol
        )


class DecoupledTest(parameterized.TestCase):
    """As the plain optimizer with `weight_decay=`, on the large batch."""

    def _check(self, place, optimizer, steps=None, constraint=None, scale=1.0, **plain):
        run = _run(
            place,
            lambda: keras_accum.AccumulationOptimizer(
                _keras(optimizer, None, **plain),
                N,
                loss_scale=None if scale == 1 else scale,
            ),
            _variables(constraint),
        )
        steps = _gradients(place[0]) if steps is None else steps
        _take(run, steps, scale)
        variables, expected = micro_steps.plainly(
            _keras(optimizer, DECAY, **plain), _variables(constraint), _means(steps)
        )
        tolerance = registry.tolerance(optimizer)
        _assert_close(run.values, variables, tolerance)
        inner = run.optimizer.variables[: len(expected.variables)]
        _assert_close([v.numpy() for v in inner], expected.variables, tolerance)

    @parameterized.parameters(*sorted(registry.OPTIMIZERS))
    def test_every_optimizer(self, optimizer):
        self._check(("default", "graph"), optimizer)

    @parameterized.parameters("adamw", "lion", *{"multi"} & {*registry.OPTIMIZERS})
    def test_some_optimizers_on_replicas(self, optimizer):
        self._check(("mirrored", "graph"), optimizer)

    @parameterized.parameters(
        *micro_steps.spread("plain", "clipnorm", "global_clipnorm", "clipvalue"),
        *[(*p, "ema") for p in micro_steps.PLACES if p[1] == "graph"],
        *[(*p, "ema_overwrite") for p in micro_steps.PLACES if p[1] == "eager"],
    )
    def test_options(self, strategy, mode, option):
        options = registry.OPTIONS[option]
        self._check((strategy, mode), "momentum", **options)

    @parameterized.parameters("default", "mirrored")
    def test_constraints(self, strategy):
        constraint = keras.constraints.MaxNorm(1.0)
        self._check((strategy, "graph"), "momentum", constraint=constraint)

    @parameterized.parameters("default", "mirrored")
    def test_a_learning_rate_of_a_schedule(self, strategy):
        def plain(decay):
            schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
                [0, 2], [0.4, 0.1, 0.02]
            )
            return keras.optimizers.SGD(schedule, momentum=0.9, weight_decay=decay)

        run = _run(
            (strategy, "graph"),
            lambda: keras_accum.AccumulationOptimizer(plain(None), N),
        )
        steps = _gradients(strategy)
        _take(run, steps)
        variables, _ = micro_steps.plainly(plain(DECAY), _variables(), _means(steps))
        _assert_close(run.values, variables)

    @parameterized.parameters(*micro_steps.PLACES)
    def test_any_loss_scale(self, strategy, mode):
        self._check((strategy, mode), "momentum", scale=1024.0)

    @parameterized.parameters("default", "mirrored")
    @pytest.mark.filterwarnings("ignore:Gradients do not exist")
    def test_a_variable_decays_in_windows_that_have_a_gradient_of_it(self, strategy):
        for optimizer in ("momentum", "adam"):
            # Of the bias: in every step, in one of them, in none, in the last only.
            present = [1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1]
            steps = [
                [kernel, bias if is_present else None]
                for (kernel, bias), is_present in zip(
                    _gradients(strategy), present, strict=True
                )
            ]
            self._check((strategy, "graph"), optimizer, steps)

    @parameterized.parameters(*micro_steps.PLACES)
    def test_sparse_gradients_in_windows_of_one(self, strategy, mode):
        random = np.random.RandomState(0)
        replicas = micro_steps.num_replicas(strategy)
        steps = [
            [
                micro_steps.Rows(
                    random.randint(0, 2, (replicas, 2)),  # the last row never comes
                    random.randn(replicas, 2, 2).astype("float32"),
                ),
                random.randn(replicas, 2).astype("float32"),
            ]
            for _ in range(NUM_UPDATES)
        ]
        run = _run((strategy, mode), lambda: _momentum_sgd("wrapper", 1))
        for step in steps:
            run(step)
        variables, _ = micro_steps.plainly(
            keras.optimizers.SGD(RATE, MOMENTUM, weight_decay=DECAY),
            _variables(),
            _means(steps, 1),
        )
        _assert_close(run.values, variables)


class InNumpyTest(parameterized.TestCase):
    """The forms that Keras has not, over SGD with momentum."""

    def _expected(self, means, form, clipnorm=None, decay=(DECAY, DECAY)):
        values = [value.copy() for value in START]
        velocities = [np.zeros(shape) for shape in SHAPES]
        for gradients in means:
            if form == "coupled":
                gradients = [
                    None if g is None else g + d * w
                    for g, d, w in zip(gradients, decay, values, strict=True)
                ]
            if clipnorm is not None:
                norm = np.sqrt(sum(np.sum(g**2) for g in gradients if g is not None))
                factor = min(1.0, clipnorm / norm)
                gradients = [None if g is None else g * factor for g in gradients]
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                if form == "independent":
                    values[i] *= 1 - decay[i]
                elif form == "decoupled":
                    values[i] *= 1 - RATE * decay[i]
                velocities[i] = MOMENTUM * velocities[i] - RATE * gradient
                values[i] += velocities[i]
        return values

    @parameterized.parameters(
        *[(*place, form) for place in micro_steps.PLACES for form in FORMS]
    )
    def test_forms(self, strategy, mode, form):
        surface = "mixin" if mode == "eager" else "wrapper"
        run = _run(
            (strategy, mode),
            lambda: _momentum_sgd(surface, loss_scale=1024.0),
            **FORMS[form],
        )
        steps = _gradients(strategy)
        _take(run, steps, 1024.0)
        _assert_close(run.values, self._expected(_means(steps), form.split("_")[0]))

    @parameterized.product(
        strategy=["default", "mirrored"], form=["coupled", "independent"]
    )
    @pytest.mark.filterwarnings("ignore:Gradients do not exist")
    def test_a_coupled_decay_is_clipped_and_no_other(self, strategy, form):
        def optimizer():
            inner = keras.optimizers.SGD(RATE, MOMENTUM, global_clipnorm=0.5)
            return keras_accum.AccumulationOptimizer(inner, N)

        run = _run((strategy, "graph"), optimizer, **FORMS[form])
        # What is absent is not in the norm: neither as a gradient nor by its decay.
        steps = [
            [None if 3 <= k < 6 else kernel, bias]
            for k, (kernel, bias) in enumerate(_gradients(strategy))
        ]
        _take(run, steps)
        _assert_close(run.values, self._expected(_means(steps), form, clipnorm=0.5))

    @parameterized.product(
        strategy=["default", "mirrored"],
        form=["coupled", "independent", "decoupled"],
        surface=["wrapper", "mixin"],
    )
    @pytest.mark.filterwarnings("ignore:Gradients do not exist")
    def test_filters_and_absent_gradients(self, strategy, form, surface):
        steps = [
            [None if 3 <= k < 6 or k == 8 else kernel, bias]
            for k, (kernel, bias) in enumerate(_gradients(strategy))
        ]
        run = _run(
            (strategy, "graph"),
            lambda: _momentum_sgd(surface),
            filter="bias",
            **FORMS[form],
        )
        _take(run, steps)
        expected = self._expected(_means(steps), form, decay=(DECAY, 0.0))
        _assert_close(run.values, expected)
