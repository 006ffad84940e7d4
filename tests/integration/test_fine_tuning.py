"""Freezing, compiling again, wrapping what is trained already: as without accumulation.

The expected values come from the plain optimizer on the large batch.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import stepping

STEPS = 2


def momentum(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def wrapper(**options):
    return keras_accum.AccumulationOptimizer(momentum(**options), STEPS)


def mixin(**options):
    return stepping.AccumulatingSGD(
        0.05, momentum=0.9, accumulation_steps=STEPS, **options
    )


SURFACES = {"wrapper": wrapper, "mixin": mixin}


def made(strategy, optimizer, **options):
    """A network under a strategy, run eagerly: quicker, for so few steps."""
    with registry.STRATEGIES[strategy]().scope():
        return training.network(optimizer(**options), run_eagerly=True)


def compile_again(model, trainable=None, optimizer=None):
    """Compiles with the same optimizer, the first layer frozen or not."""
    if trainable is not None:
        model.layers[0].trainable = trainable
    with model.distribute_strategy.scope():
        optimizer = optimizer or model.optimizer
        model.compile(optimizer, loss="mse", run_eagerly=True)


def large_batch(model, *windows):
    """One plain update for each number of a window."""
    size = STEPS * training.ROWS
    for window in windows:
        x, y = training.rows(size, seed=window)
        model.train_on_batch(x, y)


def micro_batch(model, window, k):
    """The micro step `k` of the window of that number."""
    x, y = training.rows(STEPS * training.ROWS, seed=window)
    rows = slice(k * training.ROWS, (k + 1) * training.ROWS)
    model.train_on_batch(x[rows], y[rows])


def micro_batches(model, *windows):
    for window in windows:
        for k in range(STEPS):
            micro_batch(model, window, k)


def assert_same(model, expected, tolerance=tolerances.BY_DTYPE["float32"]):
    training.assert_same_variables(model.variables, expected.variables, tolerance)
    plain = expected.optimizer.variables
    training.assert_same_variables(
        model.optimizer.variables[: len(plain)], plain, tolerance
    )


class FreezeTest(parameterized.TestCase):
    @parameterized.parameters(
        ("default", "wrapper", 1),
        ("default", "mixin", 0),
        ("mirrored", "wrapper", 0),
        ("mirrored", "mixin", 1),
    )
    def test_a_frozen_layer_stays_and_the_others_go_on(
        self, strategy, surface, steps_before
    ):
        options = {"weight_decay": 0.1, "global_clipnorm": 0.5}
        model = made(strategy, SURFACES[surface], **options)
        expected = made("default", momentum, **options)
        micro_batches(model, 0)
        large_batch(expected, 0)
        for k in range(steps_before):
            micro_batch(model, 1, k)
        before = model.layers[0].get_weights()
        compile_again(model, trainable=False)
        compile_again(expected, trainable=False)
        for k in range(steps_before, STEPS):
            micro_batch(model, 1, k)
        micro_batches(model, 2)
        large_batch(expected, 1, 2)
        for one, other in zip(model.layers[0].get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
        assert_same(model, expected)

        compile_again(model, trainable=True)
        compile_again(expected, trainable=True)
        micro_batches(model, 3)
        large_batch(expected, 3)
        assert_same(model, expected)

    @parameterized.parameters("default", "mirrored")
    def test_a_frozen_layer_under_a_multi_optimizer(self, strategy):
        if "multi" not in registry.OPTIMIZERS:
            self.skipTest("This Keras has no MultiOptimizer.")
        multi = registry.OPTIMIZERS["multi"]
        model = made(
            strategy, lambda: keras_accum.AccumulationOptimizer(multi(), STEPS)
        )
        expected = made("default", momentum)
        # What a MultiOptimizer stands for, without one: plain Keras's cannot leave
        # out a variable that it was built for.
        by_name = {"kernel": momentum(), "bias": keras.optimizers.Adam(0.01)}

        def update_by_name(window):
            x, y = training.rows(STEPS * training.ROWS, seed=window)
            variables = expected.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((expected(x) - y) ** 2)
            pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
            for name, optimizer in by_name.items():
                optimizer.apply_gradients([p for p in pairs if p[1].name == name])

        for name, optimizer in by_name.items():
            variables = [v for v in expected.variables if v.name == name]
            optimizer.build(variables)
        micro_batches(model, 0)
        update_by_name(0)
        micro_batch(model, 1, 0)
        compile_again(model, trainable=False)
        expected.layers[0].trainable = False
        micro_batch(model, 1, 1)
        micro_batches(model, 2)
        update_by_name(1)
        update_by_name(2)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.ADAPTIVE
        )

    @parameterized.parameters("wrapper", "mixin")
    def test_a_layer_frozen_at_the_build_is_named_when_unfrozen(self, surface):
        model = made("default", SURFACES[surface])
        compile_again(model, trainable=False)
        micro_batches(model, 0)
        compile_again(model, trainable=True)
        path = model.layers[0].kernel.path
        with self.assertRaisesRegex(ValueError, f"unknown variable '{path}'"):
            micro_batch(model, 1, 0)


class CompileTest(parameterized.TestCase):
    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_compiling_again_in_mid_window_keeps_it(self, strategy, surface):
        model = made(strategy, SURFACES[surface])
        expected = made("default", momentum)
        micro_batches(model, 0)
        micro_batch(model, 1, 0)
        compile_again(model)
        self.assertEqual(int(model.optimizer.position), 1)
        micro_batch(model, 1, 1)
        large_batch(expected, 0)
        compile_again(expected)
        large_batch(expected, 1)
        assert_same(model, expected)

    @parameterized.parameters("default", "mirrored")
    def test_wraps_an_optimizer_that_is_trained_already(self, strategy):
        model, expected = made(strategy, momentum), made("default", momentum)
        large_batch(model, 0)
        large_batch(expected, 0, 1)
        with model.distribute_strategy.scope():
            optimizer = keras_accum.AccumulationOptimizer(model.optimizer, STEPS)
        self.assertEqual(int(training.numbers(optimizer.iterations)), 1)
        compile_again(model, optimizer=optimizer)
        micro_batches(model, 1)
        assert_same(model, expected)

    @parameterized.parameters("wrapper", "mixin")
    def test_a_clone_trains_like_the_first(self, surface):
        optimizer = SURFACES[surface](clipnorm=0.5)
        micro_batches(made("default", lambda: optimizer), 5)
        clone = type(optimizer).from_config(optimizer.get_config())
        model = made("default", lambda: clone)
        expected = made("default", momentum, clipnorm=0.5)
        micro_batches(model, 0, 1)
        large_batch(expected, 0, 1)
        assert_same(model, expected)


class DelegationTest(parameterized.TestCase):
    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_exclude_from_weight_decay(self, strategy, surface):
        def without_biases(optimizer):
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        def accumulating():
            return without_biases(SURFACES[surface](weight_decay=4.0))

        model = made(strategy, accumulating)
        expected = made("default", lambda: without_biases(momentum(weight_decay=4.0)))
        decayed = made("default", momentum, weight_decay=4.0)
        micro_batches(model, 0, 1)
        large_batch(expected, 0, 1)
        large_batch(decayed, 0, 1)
        assert_same(model, expected)
        apart = np.abs(decayed.layers[0].bias.numpy() - model.layers[0].bias.numpy())
        self.assertGreater(apart.max(), 1e-4)

    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_finalize_variable_values(self, strategy, surface):
        options = {"use_ema": True, "ema_momentum": 0.7}
        model = made(strategy, SURFACES[surface], **options)
        expected = made("default", momentum, **options)
        micro_batches(model, 0, 1)
        large_batch(expected, 0, 1)
        raw = model.get_weights()
        for each in (model, expected):
            with each.distribute_strategy.scope():
                each.optimizer.finalize_variable_values(each.trainable_variables)
        assert_same(model, expected)
        self.assertGreater(np.abs(raw[0] - model.get_weights()[0]).max(), 1e-4)

    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_the_learning_rate_can_be_set(self, strategy, surface):
        model = made(strategy, SURFACES[surface])
        expected = made("default", momentum)
        micro_batches(model, 0)
        micro_batch(model, 1, 0)
        model.optimizer.learning_rate = 0.4  # for the update that is under way
        micro_batch(model, 1, 1)
        large_batch(expected, 0)
        expected.optimizer.learning_rate = 0.4
        large_batch(expected, 1)
        assert_same(model, expected)


class CustomLoopTest(parameterized.TestCase):
    @parameterized.parameters(("default", "mixin"), ("mirrored", "wrapper"))
    def test_tf_variables(self, strategy, surface):
        distribution = registry.STRATEGIES[strategy]()
        with distribution.scope():
            variables = [tf.Variable(np.ones(s, "float32")) for s in ((6, 1), (1,))]
            optimizer = SURFACES[surface]()

        def step(x, y):
            with tf.GradientTape() as tape:
                errors = x @ variables[0] + variables[1] - y
                num_replicas = distribution.num_replicas_in_sync
                loss = tf.reduce_mean(errors**2) / num_replicas
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        @tf.function
        def micro_step(x, y):
            distribution.run(step, args=(x, y))

        x, y = training.rows(4 * STEPS * training.ROWS)
        batches = training.batches(x, y, training.ROWS)
        for batch in distribution.experimental_distribute_dataset(batches):
            micro_step(*batch)

        kernel, bias = np.ones((6, 1)), np.ones(1)
        velocities = [0.0, 0.0]
        size = STEPS * training.ROWS
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            errors = x[rows] @ kernel + bias - y[rows]
            gradients = [2 * x[rows].T @ errors / size, 2 * errors.mean(0)]
            velocities = [
                0.9 * v - 0.05 * g for v, g in zip(velocities, gradients, strict=True)
            ]
            kernel, bias = kernel + velocities[0], bias + velocities[1]
        float32 = tolerances.BY_DTYPE["float32"]
        for variable, value in zip(variables, (kernel, bias), strict=True):
            np.testing.assert_allclose(
                training.numbers(variable), value, float32.rtol, float32.atol
            )
