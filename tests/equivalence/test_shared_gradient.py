"""One tensor that all replicas are given is a gradient on each of them."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests import registry
from tests.unit.test_arguments import make


class SharedGradientTest(parameterized.TestCase):
    @parameterized.product(
        steps=[1, 2],
        every=["window", "micro_step"],
        graph=[True, False],
        is_sparse=[False, True],
    )
    def test_it_is_summed_over_the_replicas(self, steps, every, graph, is_sparse):
        strategy = registry.mirrored()
        with strategy.scope():
            variable = keras.Variable([[0.0], [0.0]])
            optimizer = make("wrapper", steps, reduce_every=every)
            optimizer.build([variable])
        gradient = tf.constant([[1.0], [2.0]])
        if is_sparse:
            gradient = tf.IndexedSlices(
                gradient, tf.constant([0, 1]), tf.constant([2, 1])
            )

        def step():
            strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

        for _ in range(steps):
            (tf.function(step) if graph else step)()
        replicas = strategy.num_replicas_in_sync
        self.assertEqual(variable.numpy().tolist(), [[-replicas], [-2 * replicas]])
