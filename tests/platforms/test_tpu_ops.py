"""The operations under an emulated TPUStrategy: inside a `tf.while_loop` (vectors 1-5).

TPUStrategy allows a collective in a loop, so that the published loops run as written.
"""

import functools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import ops
from tests import registry

ITERATIONS = 10


def _accumulated(gradient, steps=5):
    return ops.stateful_gradient_accumulate(gradient, steps, verify_usage=False)


def _looped(strategy, body, start, iterations=ITERATIONS):
    """A function of `strategy.run` around the loop; the value of each replica."""

    def on_replica():
        def one_more(i, value):
            return i + 1, body(value)

        loop_vars = (tf.constant(0), tf.constant(start))
        return tf.while_loop(lambda i, _: i < iterations, one_more, loop_vars)[1]

    @functools.partial(tf.function, autograph=False)
    def run():
        return strategy.run(on_replica)

    def values():
        return [float(v) for v in strategy.experimental_local_results(run())]

    return values


@parameterized.parameters("tpu_2", "tpu_8")
class LoopTest(parameterized.TestCase):
    def test_vector_1(self, name):
        strategy = registry.STRATEGIES[name]()

        def body(value):
            return value + _accumulated(tf.constant(1.0))

        values = _looped(strategy, body, 10.0)
        self.assertEqual(set(values()), {20.0})
        self.assertEqual(set(values()), {20.0})

    def test_vector_2_in_both_orders(self, name):
        strategy = registry.STRATEGIES[name]()
        replicas = strategy.num_replicas_in_sync
        one = tf.constant(1.0)

        def sum_of_windows(value):
            return value + ops.cross_replica_sum(_accumulated(one))

        def window_of_sums(value):
            return value + _accumulated(ops.cross_replica_sum(one))

        for body in (sum_of_windows, window_of_sums):
            values = _looped(strategy, body, 10.0)()
            self.assertEqual(set(values), {10.0 + 10.0 * replicas})

    def test_vector_3(self, name):
        strategy = registry.STRATEGIES[name]()
        one = tf.constant(1.0)

        def body(value):
            summed = ops.cross_replica_sum(one)
            return value + _accumulated(ops.replication_normalise(summed))

        self.assertEqual(set(_looped(strategy, body, 10.0)()), {20.0})

    def test_vector_4(self, name):
        strategy = registry.STRATEGIES[name]()
        with strategy.scope():
            v = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def body(value):
            mean = ops.cross_replica_mean(tf.constant(1.0))
            return value + ops.stateful_gradient_accumulate_with_momentum(
                v, mean, 0.8, 5
            )

        values = _looped(strategy, body, 10.0)()
        np.testing.assert_allclose(values, 24.0, rtol=1e-6)
        for copy in strategy.experimental_local_results(v):
            np.testing.assert_allclose(float(copy), 9.0, rtol=1e-6)

    def test_each_replica_has_a_state_of_its_own(self, name):
        strategy = registry.STRATEGIES[name]()

        def body(value):
            own = tf.cast(ops.replication_index(), tf.float32)
            return value + _accumulated(own, 2)

        values = _looped(strategy, body, 0.0, iterations=4)()
        self.assertEqual(values, [4.0 * r for r in range(len(values))])

    def test_groups(self, name):
        """Vector 9, in a loop."""
        strategy = registry.STRATEGIES[name]()
        replicas = strategy.num_replicas_in_sync

        def body(value):
            own = 2.0 ** tf.cast(ops.replication_index(), tf.float32)
            return value + ops.cross_replica_sum(own, replica_group_size=2)

        values = _looped(strategy, body, 0.0, iterations=3)()
        pairs = [3.0 * (2.0**r + 2.0 ** (r + 1)) for r in range(0, replicas, 2)]
        self.assertEqual(values, [pair for pair in pairs for _ in range(2)])


class UsageTest(parameterized.TestCase):
    @parameterized.parameters((10, 4), (8, 5))
    def test_vector_5(self, iterations, steps):
        strategy = registry.STRATEGIES["tpu_2"]()

        def body(value):
            return value + ops.stateful_gradient_accumulate(tf.constant(1.0), steps)

        def on_replica():
            return ops.repeat(iterations, body, [tf.constant(0.0)])

        @functools.partial(tf.function, autograph=False)
        def run():
            return strategy.run(on_replica)

        with self.assertRaisesRegex(ValueError, "must divide the number of iterations"):
            run()

    def test_its_state_survives_the_calls(self):
        strategy = registry.STRATEGIES["tpu_2"]()

        def body(value):
            return value + _accumulated(tf.constant(1.0))

        values = _looped(strategy, body, 0.0, iterations=3)
        seen = [set(values()) for _ in range(5)]
        self.assertEqual(seen, [{0.0}, {5.0}, {0.0}, {5.0}, {5.0}])
