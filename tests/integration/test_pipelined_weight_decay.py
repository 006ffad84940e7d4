"""Weight decay that a callback steers, through `fit`."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import PipelinedWeightDecay
from tests import micro_steps, refusals, registry, training
from tests.equivalence import given_gradients
from tests.integration import stepping
from tests.unit.test_weight_decay import BAD_NUMBERS, EXPECTED

N, RATE = 2, 0.1


class Traced(keras.Sequential):
    """Counts how often its step is traced; in eager, how often it is run."""

    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        return super().train_step(data)


class Seen(keras.callbacks.Callback):
    """The weight and the number of traces after each epoch."""

    def __init__(self):
        super().__init__()
        self.weights, self.traces = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(_weight(self.model))
        self.traces.append(self.model.num_traces)


def _optimizer(surface="wrapper", **plain):
    plain = {"learning_rate": RATE, **plain}
    if surface == "wrapper":
        inner = keras.optimizers.SGD(**plain)
        return keras_accum.AccumulationOptimizer(inner, N)
    mixed = given_gradients.AccumulatingSGD(**plain, accumulation_steps=N)
    if surface == "inside":
        return keras.optimizers.LossScaleOptimizer(mixed, initial_scale=64.0)
    return mixed


def _model(place=("default", "graph"), optimizer=_optimizer, **compile_arguments):
    """One weight, of 1, that no gradient moves while the inputs are 0."""
    strategy, mode = place
    with registry.STRATEGIES[strategy]().scope():
        kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = Traced([keras.Input((1,)), kernel])
        model.compile(
            optimizer(), loss="mse", **registry.MODES[mode], **compile_arguments
        )
    return model


def _fit(model, *callbacks, epochs=3, updates=1, **fit):
    """Fits, with some updates in every epoch; returns the history and what was seen."""
    zeros = np.zeros((updates * N * training.ROWS, 1), "float32")
    data = training.batches(zeros, zeros, training.ROWS)
    seen = Seen()
    fit |= {"epochs": epochs, "callbacks": [*callbacks, seen]}
    return model.fit(data, verbose=0, shuffle=False, **fit).history, seen


def _weight(model):
    return float(model.get_weights()[0][0, 0])


def _decayed(rates):
    """The weight after each update, by the formula of AdamW."""
    return np.cumprod([1 - RATE * rate for rate in rates])


def _assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


class ScheduleTest(parameterized.TestCase):
    def _assert_not_retraced(self, seen, place=("default", "graph")):
        if place[1] != "eager":
            self.assertEqual(seen.traces, [seen.traces[0]] * len(seen.traces))

    @parameterized.product(place=micro_steps.PLACES, surface=["wrapper", "mixin"])
    def test_vector_51_by_epoch_without_a_retrace(self, place, surface):
        model = _model(place, lambda: _optimizer(surface))
        history, seen = _fit(model, PipelinedWeightDecay(0.5, {1: 0.0}))
        _assert_close(seen.weights, [0.95] * 3)
        self.assertEqual(history["pipelined_weight_decay"], [0.5, 0, 0])
        self._assert_not_retraced(seen, place)

    @parameterized.product(place=micro_steps.PLACES, surface=["wrapper", "mixin"])
    def test_by_update_without_a_retrace(self, place, surface):
        model = _model(place, lambda: _optimizer(surface))
        decay = PipelinedWeightDecay(0.5, {1: 1.0, 3: 2.0, 4: 0.25}, by="update")
        _, seen = _fit(model, decay, updates=2)
        _assert_close(seen.weights, _decayed([0.5, 1, 1, 2, 0.25, 0.25])[1::2])
        self._assert_not_retraced(seen, place)

    @parameterized.parameters("epoch", "update")
    def test_a_function_of_the_count(self, by):
        model = _model()
        decay = PipelinedWeightDecay(9.0, lambda count: 0.25 * count, by=by)
        _, seen = _fit(model, decay, updates=2)
        rates = [0, 0, 0.25, 0.25, 0.5, 0.5]
        if by == "update":
            rates = [0.25 * update for update in range(6)]
        _assert_close(seen.weights, _decayed(rates)[1::2])
        self._assert_not_retraced(seen)

    def test_a_function_of_the_count_and_the_rate_begins_with_the_argument(self):
        decay = PipelinedWeightDecay(
            1.0, lambda epoch, rate: rate / 2 if epoch else rate
        )
        history, seen = _fit(_model(), decay)
        self.assertEqual(history["pipelined_weight_decay"], [1, 0.5, 0.25])
        _assert_close(seen.weights, _decayed([1, 0.5, 0.25]))

    def test_a_later_epoch_has_the_last_entry(self):
        decay = PipelinedWeightDecay(0.5, {1: 1.0, 3: 2.0})
        history, seen = _fit(_model(), decay, initial_epoch=2, epochs=4)
        self.assertEqual(history["pipelined_weight_decay"], [1, 2])
        _assert_close(seen.weights, _decayed([1, 2]))

    def test_several_steps_per_execution_set_the_rate_between_executions(self):
        model = _model(steps_per_execution=N)
        decay = PipelinedWeightDecay(0.5, {1: 1.0, 3: 0.0}, by="update")
        _, seen = _fit(model, decay, updates=2, epochs=2)
        _assert_close(seen.weights, _decayed([0.5, 1, 1, 0])[1::2])

    def test_keras_loss_scale_optimizer_around_the_mixin(self):
        model = _model(optimizer=lambda: _optimizer("inside"))
        _, seen = _fit(model, PipelinedWeightDecay(0.5, {1: 0.0}))
        _assert_close(seen.weights, [0.95] * 3)

    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_as_the_plain_optimizer_on_the_large_batch(self, strategy, surface):
        plain = {"learning_rate": 0.05, "momentum": 0.9}
        expected = training.train(
            training.network(keras.optimizers.SGD(**plain, weight_decay=0.3)),
            5,
            training.ROWS * N,
        )
        with registry.STRATEGIES[strategy]().scope():
            model = training.network(_optimizer(surface, **plain))
        decay = PipelinedWeightDecay(0.3)
        training.train(model, 5, training.ROWS, N, callbacks=[decay])
        training.assert_same_variables(
            model.variables, expected.variables, registry.tolerance("momentum")
        )


class FormTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, 0.95),
        ({"times_learning_rate": False}, 0.5),
        ({"decoupled": False}, 0.95),  # on a gradient of 0
        ({"filter": "kernel"}, 1.0),
        ({"filter": lambda variable: variable.name == "kernel"}, 0.95),
    )
    def test_its_arguments_reach_the_optimizer(self, arguments, expected):
        _, seen = _fit(_model(), PipelinedWeightDecay(0.5, **arguments), epochs=1)
        _assert_close(seen.weights, [expected])

    def test_coupled_is_in_the_momentum_and_decoupled_is_not(self):
        for decoupled, expected in ((True, 0.95**2), (False, 0.95 - 0.045 - 0.0475)):
            model = _model(optimizer=lambda: _optimizer(momentum=0.9))
            decay = PipelinedWeightDecay(0.5, decoupled=decoupled)
            _, seen = _fit(model, decay, epochs=2)
            # w = .95, v = -.05; then v = -.9 x .05 - .1 x .5 x .95.
            _assert_close(seen.weights, [0.95, expected])

    def test_beside_a_decay_of_the_inner_optimizer(self):
        model = _model(optimizer=lambda: _optimizer(weight_decay=1.0))
        _fit(model, PipelinedWeightDecay(0.5, beside_inner=True), epochs=1)
        _assert_close(_weight(model), 0.9 * 0.95)


class SeveralFitsTest(parameterized.TestCase):
    @parameterized.product(
        place=[p for p in micro_steps.PLACES if p[1] != "xla"],
        surface=["wrapper", "mixin"],
    )
    def test_a_fit_after_one_without_it(self, place, surface):
        model = _model(place, lambda: _optimizer(surface))
        _, seen = _fit(model, epochs=1)
        _assert_close(seen.weights, [1])
        _, seen = _fit(model, PipelinedWeightDecay(0.5), epochs=2)
        _assert_close(seen.weights, [0.95, 0.95**2])

    @parameterized.parameters("default", "mirrored")
    def test_when_training_ends_so_does_the_decay(self, strategy):
        model = _model((strategy, "graph"))
        _fit(model, PipelinedWeightDecay(0.5), epochs=1)
        self.assertEqual(float(model.optimizer.pipelined_weight_decay), 0)
        traces = model.num_traces
        _fit(model, epochs=1)
        _assert_close(_weight(model), 0.95)
        self.assertEqual(model.num_traces, traces)

    def test_the_rate_that_there_was_is_given_back(self):
        model = _model()
        model.optimizer.decay_weights(1.0)
        _fit(model, PipelinedWeightDecay(0.5), epochs=1)
        self.assertEqual(float(model.optimizer.pipelined_weight_decay), 1)
        _fit(model, epochs=1)
        _assert_close(_weight(model), 0.95 * 0.9)

    def test_the_rate_of_a_fit_that_was_interrupted_is_given_back_by_the_next(self):
        model = _model()

        def interrupt(batch, logs=None):
            raise InterruptedError

        stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        with self.assertRaises(InterruptedError):
            _fit(model, PipelinedWeightDecay(0.5), stop, epochs=1)
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        model.optimizer.reset()
        other = PipelinedWeightDecay(0.5, times_learning_rate=False)
        _fit(model, other, epochs=1)
        _assert_close(_weight(model), 0.5)
        self.assertEqual(float(model.optimizer.pipelined_weight_decay), 0)

    def test_a_decay_of_another_form_is_refused_until_it_is_zero(self):
        model = _model()
        model.optimizer.decay_weights(0.5, times_learning_rate=False)
        with self.assertRaisesRegex(ValueError, "Weights decay already, in another"):
            _fit(model, PipelinedWeightDecay(0.5), epochs=1)
        model.optimizer.pipelined_weight_decay = 0.0
        _fit(model, PipelinedWeightDecay(0.5), epochs=1)
        _assert_close(_weight(model), 0.95)

    @parameterized.parameters("epoch", "update")
    def test_a_second_fit_with_the_same_callback(self, by):
        for schedule in ({0: 0.5, 1: 1.0}, lambda count: 0.5 * (count + 1)):
            model = _model()
            decay = PipelinedWeightDecay(2.0, schedule, by=by)
            _fit(model, decay, epochs=1)
            _assert_close(_weight(model), 0.95)
            # By epoch it begins anew; updates are counted on.
            _, seen = _fit(model, decay, epochs=1)
            _assert_close(seen.weights, [0.95 * (0.95 if by == "epoch" else 0.9)])

    def test_a_second_callback_of_another_form(self):
        model = _model()
        _fit(model, PipelinedWeightDecay(0.5), epochs=1)
        other = PipelinedWeightDecay(0.5, times_learning_rate=False)
        _, seen = _fit(model, other, epochs=1)
        _assert_close(seen.weights, [0.95 * 0.5])


class ExcludedTest(parameterized.TestCase):
    @parameterized.product(
        surface=["wrapper", "mixin"],
        by=["names", "variables"],
        decoupled=[True, False],
        strategy=["default", "mirrored"],
    )
    def test_what_the_optimizer_is_told_to_exclude(
        self, surface, by, decoupled, strategy
    ):
        with registry.STRATEGIES[strategy]().scope():
            kernel = keras.Variable(1.0, name="kernel")
            bias = keras.Variable(1.0, name="bias")
            if surface == "wrapper":
                optimizer = keras_accum.AccumulationOptimizer(
                    keras.optimizers.SGD(0.1), 2
                )
            else:
                optimizer = stepping.AccumulatingSGD(0.1, accumulation_steps=2)
            if by == "names":
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            else:
                optimizer.exclude_from_weight_decay(var_list=[bias])
            optimizer.build([kernel, bias])
            optimizer.decay_weights(0.5, decoupled=decoupled)

        def step():
            optimizer.apply_gradients([(tf.constant(0.0), v) for v in (kernel, bias)])

        for _ in range(2):
            registry.STRATEGIES[strategy]().run(step)
        _assert_close(training.numbers(kernel), 0.95)
        _assert_close(training.numbers(bias), 1.0)


class RefusedTest(refusals.RefusalCase):
    def test_what_is_no_rate(self):
        for error, value in BAD_NUMBERS:
            self.assert_refused(
                error,
                lambda v=value: PipelinedWeightDecay(v),
                f"`weight_decay` {EXPECTED}",
                f"weight_decay={value!r}",
            )
            self.assert_refused(
                error,
                lambda v=value: PipelinedWeightDecay(0.5, {3: v}),
                f"`schedule[3]` {EXPECTED}",
                f"schedule[3]={value!r}",
            )
            self.assert_refused(
                error,
                lambda v=value: _fit(_model(), PipelinedWeightDecay(0.5, lambda _: v)),
                f"`schedule(0)` {EXPECTED}",
                f"schedule(0)={value!r}",
            )

    def test_two_of_them(self):
        pair = PipelinedWeightDecay(0.5), PipelinedWeightDecay(0.5)
        self.assert_refused(
            ValueError,
            lambda: _fit(_model(), *pair),
            "At most one callback of a `fit` may steer pipelined_weight_decay",
            "PipelinedWeightDecay and PipelinedWeightDecay",
            "Leave one out",
        )

    def test_an_inner_optimizer_that_decays(self):
        model = _model(optimizer=lambda: _optimizer(weight_decay=0.25))
        self.assert_refused(
            ValueError,
            lambda: _fit(model, PipelinedWeightDecay(0.5)),
            "must not decay weights by itself",
            "SGD with weight_decay=0.25",
        )

    def test_an_optimizer_that_does_not_accumulate(self):
        model = _model(optimizer=keras.optimizers.SGD)
        self.assert_refused(
            ValueError,
            lambda: _fit(model, PipelinedWeightDecay(0.5)),
            "PipelinedWeightDecay needs an optimizer of keras_accum",
            "optimizer=SGD",
        )
