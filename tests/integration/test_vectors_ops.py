"""The published numbers of the operations (vectors 1 to 9), as loops and as steps."""

import gc
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import ops
from tests import refusals, registry


def _while(num_iterations, body, start):
    """`tf.while_loop` in a `tf.function`, of a value."""

    @tf.function
    def loop():
        _, value = tf.while_loop(
            lambda i, _: i < num_iterations,
            lambda i, value: (i + 1, body(value)),
            (tf.constant(0), tf.constant(start)),
        )
        return value

    return float(loop())


def _steps(strategy, num_steps, emitted, start):
    """A loop of `strategy.run` calls of a compiled step; the value of each replica."""
    with strategy.scope():
        value = tf.Variable(
            start,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @tf.function
    def step():
        strategy.run(lambda: value.assign_add(emitted()))

    for _ in range(num_steps):
        step()
    return [float(each) for each in strategy.experimental_local_results(value)]


def _accumulated(gradient, steps=5):
    return ops.stateful_gradient_accumulate(gradient, steps, verify_usage=False)


class LoopTest(parameterized.TestCase):
    def test_vector_1_in_a_while_loop(self):
        def body(value):
            return value + _accumulated(tf.constant(1.0))

        self.assertEqual(_while(10, body, 10.0), 20)

    def test_vector_1_over_calls_of_a_function(self):
        one = registry.STRATEGIES["default"]()
        value = _steps(one, 10, lambda: _accumulated(tf.constant(1.0)), 10.0)
        self.assertEqual(value, [20])

    def test_its_state_survives_loops_and_calls(self):
        @tf.function
        def three_more(value):
            (value,) = ops.repeat(
                3, lambda value: value + _accumulated(tf.constant(1.0)), [value]
            )
            return value

        value, seen = tf.constant(0.0), []
        for _ in range(5):
            value = three_more(value)
            seen.append(float(value))
        self.assertEqual(seen, [0, 5, 5, 10, 15])

    def test_two_calls_have_two_states(self):
        @tf.function
        def step():
            return [_accumulated(tf.constant(g), 2) for g in (1.0, 10.0)]

        seen = [[float(each) for each in step()] for _ in range(4)]
        self.assertEqual(seen, [[0, 0], [2, 20]] * 2)

    @parameterized.parameters("float16", "bfloat16", "float32", "float64")
    def test_rows_and_dtypes(self, dtype):
        @tf.function
        def step(values):
            rows = tf.IndexedSlices(values, tf.constant([1, 1, 3]), (4, 1))
            return _accumulated(rows, 2)

        values = tf.constant([[1.0], [2.0], [4.0]], dtype)
        self.assertEqual(step(values).dtype, dtype)
        np.testing.assert_array_equal(step(values), [[0], [6], [0], [8]])


class ReplicasTest(parameterized.TestCase):
    """Two replicas: on Mirrored a loop of `strategy.run` calls."""

    def _values(self, emitted, start=10.0):
        strategy = registry.mirrored()
        values = _steps(strategy, 10, emitted, start)
        self.assertLen(set(values), 1)
        return values[0]

    def test_vector_2_in_both_orders(self):
        replicas = registry.mirrored().num_replicas_in_sync
        one = tf.constant(1.0)
        for emitted in (
            lambda: ops.cross_replica_sum(_accumulated(one)),
            lambda: _accumulated(ops.cross_replica_sum(one)),
        ):
            self.assertEqual(self._values(emitted), 10 + 10 * replicas)

    def test_vector_3(self):
        def emitted():
            summed = ops.cross_replica_sum(tf.constant(1.0))
            return _accumulated(ops.replication_normalise(summed))

        self.assertEqual(self._values(emitted), 20)

    @parameterized.parameters(
        ("default", 1.0, 24.0, 9.0), ("mirrored", 2.0, 38.0, 18.0)
    )
    def test_vector_4(self, strategy, gradient, value, momentum):
        strategy = registry.STRATEGIES[strategy]()
        with strategy.scope():
            v = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def emitted():
            mean = ops.cross_replica_mean(tf.constant(gradient))
            return ops.stateful_gradient_accumulate_with_momentum(v, mean, 0.8, 5)

        values = _steps(strategy, 10, emitted, 10.0)
        np.testing.assert_allclose(values, value, rtol=1e-6)
        for copy in strategy.experimental_local_results(v):
            np.testing.assert_allclose(float(copy), momentum, rtol=1e-6)

    def test_vector_8(self):
        replicas = registry.mirrored().num_replicas_in_sync
        one = tf.constant(1.0)
        values = self._values(lambda: ops.replication_normalise(one), 0.0)
        self.assertAlmostEqual(values, 10 / replicas, places=6)
        self.assertEqual(float(one), 1)

    def test_vector_9(self):
        strategy = registry.mirrored()
        replicas = strategy.num_replicas_in_sync
        for size in [n for n in (1, 2, 4) if replicas % n == 0]:

            @tf.function
            def step(size=size):
                def on_replica():
                    mine = 10.0 ** tf.cast(ops.replication_index(), tf.float32)
                    summed = ops.cross_replica_sum(mine, replica_group_size=size)
                    mean = ops.cross_replica_mean(mine, replica_group_size=size)
                    return summed, mean

                return strategy.run(on_replica)

            summed, mean = step()
            summed = strategy.experimental_local_results(summed)
            mean = strategy.experimental_local_results(mean)
            for replica in range(replicas):
                first = replica // size * size
                group = [10.0**member for member in range(first, first + size)]
                self.assertEqual(float(summed[replica]), sum(group))
                self.assertAlmostEqual(float(mean[replica]), np.mean(group), places=3)

    def test_each_replica_has_a_state_of_its_own(self):
        strategy = registry.mirrored()

        def emitted():
            return _accumulated(tf.cast(ops.replication_index(), tf.float32), 2)

        values = _steps(strategy, 4, emitted, 0.0)
        self.assertEqual(values, [4.0 * r for r in range(len(values))])

    def test_a_collective_in_a_loop_is_refused_clearly(self):
        strategy = registry.mirrored()

        def on_replica():
            return tf.while_loop(
                lambda i, _: i < 3,
                lambda i, value: (i + 1, value + ops.cross_replica_sum(1.0)),
                (tf.constant(0), tf.constant(0.0)),
            )

        with self.assertRaisesRegex(
            ValueError, r"MirroredStrategy allows no collective inside a loop.*run\("
        ):
            tf.function(lambda: strategy.run(on_replica))()


class UsageTest(refusals.RefusalCase):
    @parameterized.parameters((10, 4), (8, 5))
    def test_vector_5(self, iterations, steps):
        def body(value):
            return value + ops.stateful_gradient_accumulate(tf.constant(1.0), steps)

        looped = tf.function(lambda: ops.repeat(iterations, body, [tf.constant(0.0)]))
        self.assert_refused(
            ValueError,
            looped,
            "`num_mini_batches` must divide the number of iterations of the loop",
            f"num_mini_batches={steps} in a loop of {iterations} iterations",
            "Make one a multiple of the other",
        )

    def _loop(self, use, verify_usage):
        variable = tf.Variable(8.0)

        def body(value):
            emitted = ops.stateful_gradient_accumulate(
                tf.constant(1.0), 2, verify_usage=verify_usage
            )
            use(variable, emitted)
            return value + 1

        looped = tf.function(lambda: ops.repeat(4, body, [tf.constant(0.0)]))
        return looped, variable

    def test_vector_6_one_update_is_accepted(self):
        for use in (
            lambda v, g: v.assign_sub(0.5 * g),
            lambda v, g: tf.raw_ops.ResourceApplyGradientDescent(
                var=v.handle, alpha=0.5, delta=g
            ),
        ):
            looped, variable = self._loop(use, verify_usage=True)
            looped()
            self.assertEqual(float(variable), 8 - 0.5 * 4)

    def test_vector_6_anything_else_is_refused(self):
        def printed(variable, gradient):
            variable.assign_sub(gradient)
            variable.assign(tf.sin(gradient))

        def twice(variable, gradient):
            variable.assign_sub(gradient)
            variable.assign_sub(2.0 * gradient)

        for use, named in ((printed, "Sin"), (twice, "AssignSubVariableOp_1")):
            looped, _ = self._loop(use, verify_usage=True)
            with self.assertRaisesRegex(ValueError, f"one update of SGD.*{named}"):
                looped()
            looped, _ = self._loop(use, verify_usage=False)
            looped()

    def test_of_a_function(self):
        variable = tf.Variable(1.0)

        @tf.function
        def step(is_bad):
            emitted = ops.stateful_gradient_accumulate(tf.constant(1.0), 2)
            variable.assign(tf.exp(emitted)) if is_bad else variable.assign_sub(emitted)

        ops.check_usage(step.get_concrete_function(False))
        with self.assertRaisesRegex(ValueError, "Exp"):
            ops.check_usage(step.get_concrete_function(True))

    def test_vector_7(self):
        for scales, expected in (
            (lambda k: (1.0, 1.0), 55.0),
            (lambda k: (1.0, 0.1), 14.5),
            (lambda k: (k / (k + 1), 1 / (k + 1)), 4.5),
        ):
            accumulator = tf.Variable(10.0)
            for k in range(10):
                value = ops.gradient_accumulator_add_with_scale(
                    accumulator, float(k), *scales(k)
                )
            self.assertAlmostEqual(float(value), expected, places=4)
            self.assertEqual(float(accumulator), float(value))
        stale = tf.Variable(float("nan"))
        ops.gradient_accumulator_add_with_scale(stale, 2.0, 0.0, 1.0)
        self.assertEqual(float(stale), 2)

    def test_eager_needs_a_name(self):
        self.assert_refused(
            ValueError,
            lambda: ops.stateful_gradient_accumulate(tf.constant(1.0), 2),
            "`name` must be given in eager execution",
            "name=None",
            "or call it inside a tf.function",
        )
        name = f"of this test {os.getpid()}"
        seen = [
            float(ops.stateful_gradient_accumulate(tf.constant(1.0), 3, name=name))
            for _ in range(6)
        ]
        self.assertEqual(seen, [0, 0, 3, 0, 0, 3])

    def test_a_name_in_eager_stands_for_one_state(self):
        name = f"of one thing {os.getpid()}"

        def accumulate(steps=3, like=1.0):
            return ops.stateful_gradient_accumulate(tf.constant(like), steps, name=name)

        accumulate()
        v = tf.Variable(0.0)
        for other in (
            lambda: accumulate(steps=2),
            lambda: accumulate(like=[1.0, 2.0]),
            lambda: ops.stateful_gradient_accumulate_with_momentum(
                v, tf.constant(1.0), 0.5, 3, name=name
            ),
            lambda: registry.mirrored().run(accumulate),
        ):
            self.assert_refused(
                ValueError,
                other,
                "`name` must stand for one state",
                f"name='{name}'",
                "Use another name",
            )
        self.assertEqual([float(accumulate()) for _ in range(2)], [0, 3])

    def test_a_state_lives_as_long_as_the_function_that_has_it(self):
        inner = tf.function(lambda: _accumulated(tf.constant(1.0), 2))

        def outer():
            return tf.function(lambda: inner() + 0.0)

        self.assertEqual(float(outer()()), 0)
        gc.collect()
        self.assertEqual([float(outer()()), float(outer()())], [2, 0])

    def test_what_is_refused_else(self):
        for steps in (0, -1, 2.0, "2", None, True):
            self.assert_refused(
                ValueError,
                lambda s=steps: ops.stateful_gradient_accumulate(1.0, s, name="x"),
                "`num_mini_batches` must be an integer >= 1",
                f"num_mini_batches={steps!r}",
            )
        self.assert_refused(
            ValueError,
            lambda: ops.cross_replica_sum(1.0, [[0]], 1),
            "At most one of `group_assignment` and `replica_group_size`",
            "group_assignment=[[0]], replica_group_size=1",
            "Leave one out",
        )
        self.assert_refused(
            ValueError,
            lambda: ops.cross_replica_sum(1.0, replica_group_size=2),
            "`replica_group_size` must divide the number of replicas",
            "replica_group_size=2 for 1 replicas",
        )
        with registry.mirrored().scope():
            self.assert_refused(
                ValueError,
                lambda: ops.cross_replica_sum(1.0),
                "must be called in replica context",
                "a call in cross-replica context",
                "inside `strategy.run(...)`",
            )
