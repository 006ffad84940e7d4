"""The boundary: one decision for all replicas, reached from wherever one stands."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import boundary
from tests import engine, registry

R = registry.NUM_REPLICAS


class BoundaryCase(parameterized.TestCase):
    def _make(self, strategy):
        self.strategy = registry.STRATEGIES[strategy]()
        self.replicas = range(self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            self.counter = engine.new_variable("counter")
            self.other = engine.new_variable("other")

    def _count(self, variable=None):
        """A count that all replicas share."""
        values = engine.copies(
            self.strategy, self.counter if variable is None else variable
        )
        self.assertLen({int(value) for value in values}, 1)
        return int(values[0])

    def _run(self, function, is_graph):
        """Runs `function` in replica context; returns a result for each replica."""

        def run():
            return self.strategy.run(function)

        return (tf.function(run, autograph=False) if is_graph else run)()


@parameterized.product(strategy=["default", "mirrored"], is_graph=[False, True])
class DecideTest(BoundaryCase):
    def test_it_takes_the_branch_of_the_predicate(self, strategy, is_graph):
        self._make(strategy)
        predicate = tf.Variable(True)

        def count(variable):
            boundary.each_replica(lambda: variable.assign_add(1))

        def close(due):
            boundary.decide(due, lambda: count(self.counter), lambda: count(self.other))

        def step():
            boundary.merge(close, predicate.read_value())

        self._run(step, is_graph)
        self.assertEqual((self._count(), self._count(self.other)), (1, 0))
        predicate.assign(False)
        for _ in range(2):
            self._run(step, is_graph)
        self.assertEqual((self._count(), self._count(self.other)), (1, 2))

    def test_nothing_happens_when_there_is_no_other_branch(self, strategy, is_graph):
        self._make(strategy)

        def close(due):
            boundary.decide(
                due, lambda: boundary.each_replica(lambda: self.counter.assign_add(1))
            )

        self._run(lambda: boundary.merge(close, tf.constant(False)), is_graph)
        self.assertEqual(self._count(), 0)
        self._run(lambda: boundary.merge(close, tf.constant(True)), is_graph)
        self.assertEqual(self._count(), 1)

    def test_replicas_reduce_inside_the_branch(self, strategy, is_graph):
        self._make(strategy)
        with self.strategy.scope():
            total = engine.new_variable("total", dtype="float32")

        def reduce():
            context = tf.distribute.get_replica_context()
            own = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            total.assign(context.all_reduce(tf.distribute.ReduceOp.SUM, own))

        def close(due):
            boundary.decide(due, lambda: boundary.each_replica(reduce))

        self._run(lambda: boundary.merge(close, tf.constant(True)), is_graph)
        expected = sum(r + 1.0 for r in self.replicas)
        for value in engine.copies(self.strategy, total):
            self.assertEqual(float(value), expected)

    def test_merging_calls_once_and_hands_back_to_every_replica(
        self, strategy, is_graph
    ):
        self._make(strategy)
        calls = []
        with self.strategy.scope():
            seen = engine.new_variable(
                "seen", synchronization="on_read", aggregation="sum"
            )

        def close(own):
            calls.append(tf.distribute.in_cross_replica_context())
            boundary.each_replica(seen.assign, own)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            boundary.merge(close, tf.convert_to_tensor(10 + replica))

        self._run(step, is_graph)
        self.assertEqual(calls, [True])
        values = engine.copies(self.strategy, seen)
        np.testing.assert_array_equal(values, [10 + r for r in self.replicas])

    def test_the_first_replica_speaks_for_all(self, strategy, is_graph):
        self._make(strategy)

        def close(own):
            first = boundary.first_replica(own)
            boundary.each_replica(lambda: self.counter.assign(first))

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            boundary.merge(close, tf.convert_to_tensor(5 + replica))

        self._run(step, is_graph)
        self.assertEqual(self._count(), 5)


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class FromAnywhereTest(BoundaryCase):
    def _make(self, strategy):
        super()._make(strategy)
        self.from_anywhere = boundary.FromAnywhere(self.strategy)
        self.contexts = []

    def _increment(self):
        self.contexts.append(tf.distribute.in_cross_replica_context())
        self.counter.assign_add(1)

    def _call(self):
        self.from_anywhere(self._increment, "increment")

    def test_from_plain_python(self, strategy):
        self._make(strategy)
        self._call()
        self.assertEqual(self._count(), 1)
        self.assertNotIn(True, self.contexts)

    def test_from_the_scope(self, strategy):
        self._make(strategy)
        with self.strategy.scope():
            self._call()
        self.assertEqual(self._count(), 1)
        self.assertNotIn(True, self.contexts)

    def test_from_replica_context(self, strategy):
        self._make(strategy)
        self.strategy.run(self._call)
        self.assertEqual(self._count(), 1)
        self.assertEqual(self.contexts, [False] * len(self.replicas))

    def test_from_replica_context_in_a_graph(self, strategy):
        self._make(strategy)
        step = tf.function(lambda: self.strategy.run(self._call), autograph=False)
        for _ in range(3):
            step()
        self.assertEqual(self._count(), 3)

    def test_from_a_graph_outside_the_replicas(self, strategy):
        self._make(strategy)
        step = tf.function(self._call, autograph=False)
        for _ in range(3):
            step()
        self.assertEqual(self._count(), 3)


class CompiledTest(BoundaryCase):
    def test_each_key_is_compiled_once(self):
        self._make("mirrored")
        from_anywhere = boundary.FromAnywhere(self.strategy)
        traced = {"one": 0, "other": 0}

        def function(key):
            def increment():
                traced[key] += 1
                self.counter.assign_add(1)

            return increment

        for key in ("one", "other", "one", "other", "one"):
            from_anywhere(function(key), key)
        self.assertEqual(self._count(), 5)
        self.assertEqual(traced, {"one": R, "other": R})
