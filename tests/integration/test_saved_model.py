"""A SavedModel: it serves, holds the window, and a step that is in it trains on."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.integration import saving

STEPS = 3
ROWS = training.ROWS


def _plain():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _compiled(strategy, **arguments):
    with registry.STRATEGIES[strategy]().scope():
        optimizer = keras_accum.AccumulationOptimizer(_plain(), STEPS)
        return training.network(optimizer, **arguments)


def _micro_steps(model, first, end):
    """Trains on some micro-batches, of as many as two windows have."""
    x, y = (each[first * ROWS : end * ROWS] for each in training.rows(2 * STEPS * ROWS))
    model.fit(training.batches(x, y, ROWS), shuffle=False, verbose=0)


class SavedModelTest(saving.TestCase):
    @parameterized.parameters("default", "one_device", "mirrored")
    def test_a_model_that_is_saved_in_mid_window_serves(self, strategy):
        model = _compiled(strategy)
        _micro_steps(model, 0, STEPS + 1)
        folder = self.path("model")
        tf.saved_model.save(model, folder)
        loaded = tf.saved_model.load(folder)
        x, _ = training.rows(ROWS)
        np.testing.assert_allclose(
            loaded.signatures["serving_default"](tf.constant(x))["output_0"],
            model.predict(x, verbose=0),
            rtol=1e-5,
        )

    @parameterized.product(
        source=["default", "mirrored"], target=["default", "mirrored"]
    )
    def test_a_checkpoint_reads_it_and_goes_on(self, source, target):
        model = _compiled(source)
        _micro_steps(model, 0, STEPS + 1)
        folder = self.path("model")
        tf.saved_model.save(model, folder)
        model = _compiled(target, seed=7)
        model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model).read(f"{folder}/variables/variables")
        _micro_steps(model, STEPS + 1, 2 * STEPS)
        expected = training.network(_plain())
        training.train(expected, 2, STEPS * ROWS)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.parameters("default", "mirrored")
    def test_an_export_serves(self, strategy):
        model = _compiled(strategy)
        _micro_steps(model, 0, STEPS)
        folder = self.path("model")
        model.export(folder, verbose=False)
        x, _ = training.rows(ROWS)
        loaded = tf.saved_model.load(folder)
        np.testing.assert_allclose(
            loaded.serve(tf.constant(x)),
            model.predict(x, verbose=0),
            rtol=1e-5,
        )

    def test_a_compiled_step_trains_on_where_the_window_was(self):
        model = _compiled("default", jit_compile=True)
        _micro_steps(model, 0, STEPS + 1)
        shapes = [(ROWS, training.FEATURES), (ROWS, 1)]

        @tf.function(
            autograph=False,
            jit_compile=True,
            input_signature=[tf.TensorSpec(shape) for shape in shapes],
        )
        def step(x, y):
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            return [variable.value.read_value() for variable in variables]

        module = tf.Module()
        module.step, module.model = step, model
        folder = self.path("model")
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
        x, y = training.rows(2 * STEPS * ROWS)
        for number in range(STEPS + 1, 2 * STEPS):
            rows = slice(number * ROWS, (number + 1) * ROWS)
            values = loaded.step(x[rows], y[rows])
        expected = training.network(_plain())
        training.train(expected, 2, STEPS * ROWS)
        for actual, variable in zip(values, expected.trainable_variables, strict=True):
            np.testing.assert_allclose(actual, variable.numpy(), rtol=1e-6, atol=1e-6)
