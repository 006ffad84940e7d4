"""What becomes of a window that is open at an end, through `fit`."""

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import PartialWindow
from tests import tolerances, training
from tests.integration.scheduled import fit, large_batches, make_model, windows


class PartialWindowTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_applied_at_the_end_of_epochs(self, strategy, surface):
        """Vector 55: 5 batches, N=2, 2 epochs: updates at micro steps 2, 4, 5."""
        model = make_model(strategy, surface, steps=2)
        seen = fit(model, PartialWindow("apply"), batches=5, epochs=2)
        self.assertEqual(seen.by_batch, [0, 1, 1, 2, 2, 3, 4, 4, 5, 5])
        self.assertEqual(seen.by_epoch, [3, 6])
        expected = large_batches(2 * windows(5, 2), batches=5)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.parameters(("carry", 0.8, 2), ("apply", 0.64, 0), ("drop", 0.8, 0))
    def test_what_becomes_of_it(self, policy, expected, position):
        """Vector 43: x=1, y=0, w=1, lr .1, MSE, 6 rows one at a time, N=4."""
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        inner = keras.optimizers.SGD(0.1)
        model.compile(keras_accum.AccumulationOptimizer(inner, 4), "mse")
        x = np.ones((6, 1), "float32")
        model.fit(x, 0 * x, batch_size=1, verbose=0, callbacks=[PartialWindow(policy)])
        np.testing.assert_allclose(model.get_weights()[0], [[expected]], rtol=1e-6)
        self.assertEqual(int(model.optimizer.position), position)
        if policy == "drop":
            for variable in model.optimizer.window_state.held:
                if "accumulator" in variable.path:
                    np.testing.assert_array_equal(variable.numpy(), [[0.0]])

    @parameterized.parameters(1, 2, 3)
    def test_leftovers_make_an_update(self, steps):
        """Vector 40: 20 batches, N in {1, 2, 3}: ceil(20 / N) updates."""
        seen = fit(make_model(steps=steps), PartialWindow(), batches=20)
        self.assertEqual(seen.by_epoch, [-(-20 // steps)])

    def test_a_decaying_rate_sees_updates(self):
        """Vector 34: three updates of rates 1, 2, 3 on a gradient of 1: -1, -3, -6."""
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
            [0, 1], [1.0, 2.0, 3.0]
        )
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(schedule), 2)
        model.compile(optimizer, loss=lambda y, y_pred: y_pred)
        seen = []
        x = np.ones((5, 1), "float32")
        at_end = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()[0].item())
        )
        model.fit(x[:2], x[:2], batch_size=1, verbose=0, callbacks=[at_end])
        model.fit(
            x[:3], x[:3], batch_size=1, verbose=0, callbacks=[PartialWindow(), at_end]
        )
        self.assertEqual(seen, [-1, -6])

    @parameterized.parameters("apply", "drop")
    def test_only_at_the_end_of_the_training(self, policy):
        model = make_model(steps=3)
        seen = fit(model, PartialWindow(policy, at="train"), batches=4, epochs=2)
        # Eight micro steps: two windows, and two of a third one.
        self.assertEqual(seen.by_epoch, [1, 2 + (policy == "apply")])
        self.assertEqual(int(model.optimizer.position), 0)

    def test_validation_sees_it_applied(self):
        x, y = training.rows(6 * training.ROWS)
        model = make_model(steps=4)
        history = model.fit(
            training.batches(x, y, training.ROWS),
            validation_data=(x, y),
            shuffle=False,
            verbose=0,
            callbacks=[PartialWindow("apply")],
        ).history
        expected = large_batches(windows(6, 4), batches=6).evaluate(x, y, verbose=0)
        np.testing.assert_allclose(history["val_loss"], [expected], rtol=1e-5)

    @parameterized.parameters("epoch", "train")
    def test_an_average_is_finished_after_it(self, at):
        def optimizer():
            return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)

        model, expected = make_model(steps=2), large_batches([])
        model.compile(keras_accum.AccumulationOptimizer(optimizer(), 2), "mse")
        expected.compile(optimizer(), "mse", run_eagerly=True)
        fit(model, PartialWindow("apply", at=at), batches=3)
        x, y = training.rows(3 * training.ROWS)
        for window in windows(3, 2):
            rows = slice(window[0] * training.ROWS, (window[-1] + 1) * training.ROWS)
            expected.train_on_batch(x[rows], y[rows])
        expected.optimizer.finalize_variable_values(expected.trainable_variables)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    def test_an_epoch_shorter_than_a_window_is_warned_of_once(self):
        model = make_model(steps=4)
        with self.assertWarnsRegex(UserWarning, "had 3 micro steps") as caught:
            fit(model, PartialWindow("apply"), batches=3, epochs=3)
        self.assertLen(caught.warnings, 1)
        fit(make_model(steps=3), PartialWindow("apply"), batches=3)  # none
