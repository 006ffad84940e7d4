"""Data of unknown length: the step that finds its end changes nothing.

Keras takes a step more, which fails where it takes the next batch. What does not depend
on the batch may be done all the same: plain Keras's `iterations` count that step.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.unit.test_arguments import MixedSGD

BATCHES, EPOCHS, STEPS = 7, 3, 4


def _optimizer(surface, **options):
    if surface == "mixin":
        return MixedSGD(0.05, momentum=0.9, accumulation_steps=STEPS, **options)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return keras_accum.AccumulationOptimizer(inner, STEPS, **options)


def _data():
    """Batches of static shape, whose number is not known before their end."""
    x, y = training.rows(BATCHES * training.ROWS)
    return training.batches(x, y, training.ROWS).filter(lambda x, y: True)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
class UnknownLengthTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], surface=["wrapper", "mixin"]
    )
    def test_windows_hold_the_batches_there_are(self, strategy, surface):
        with registry.STRATEGIES[strategy]().scope():
            model = training.network(_optimizer(surface))
        self.assertEqual(int(_data().cardinality()), tf.data.UNKNOWN_CARDINALITY)
        model.fit(_data(), epochs=EPOCHS, shuffle=False, verbose=0)
        self.assertEqual(int(model.optimizer.position), BATCHES * EPOCHS % STEPS)
        expected = training.network(
            keras.optimizers.SGD(0.05, momentum=0.9), run_eagerly=True
        )
        x, y = training.rows(BATCHES * training.ROWS)
        x, y = np.tile(x, (EPOCHS, 1)), np.tile(y, (EPOCHS, 1))
        rows = STEPS * training.ROWS
        for k in range(BATCHES * EPOCHS // STEPS):
            window = slice(k * rows, (k + 1) * rows)
            expected.train_on_batch(x[window], y[window])
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.product(
        strategy=["default", "mirrored"],
        policy=["skip_window", "skip_micro_batch"],
        every=["window", "micro_step"],
    )
    def test_no_count_moves(self, strategy, policy, every):
        with registry.STRATEGIES[strategy]().scope():
            scale = keras_accum.AutomaticLossScale()
            optimizer = _optimizer(
                "wrapper", loss_scale=scale, on_nonfinite=policy, reduce_every=every
            )
            optimizer.measure_gradients(noise=True)
            model = training.network(optimizer)
        model.fit(_data().take(3), shuffle=False, verbose=0)
        counts = {v.name: v.numpy() for v in optimizer.window_state.held}
        self.assertEqual(counts["position"], 3)
        self.assertEqual(counts["weight"], 3)
        self.assertEqual(counts["bad_micro_batches"], 0)
        replicas = registry.STRATEGIES[strategy]().num_replicas_in_sync
        elements = 6 * 5 + 5 + 5 + 1
        self.assertEqual(counts["num_counted_here"], 3 * replicas * elements)
        optimizer.flush()
        # Were they miscounted, the noise of the window would not be known.
        self.assertTrue(np.isfinite(float(optimizer.gradient_noise_scale)))
