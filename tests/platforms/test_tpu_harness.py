"""What the evidence is worth: each layer is shown an optimizer that is wrong.

The mutants: one that reduces in every micro step, one with accumulators that are
synchronised, one that never reduces, one whose loss is scaled twice, and a batch of
dynamic shape.
"""

import functools
import threading
import time
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import accumulators, replica_groups, window_state
from tests import registry, training
from tests.platforms import tpu_emulation, tpu_lowering, tpu_stand_in
from tests.platforms import tpu_evidence as evidence

UPDATES, STEPS = 2, 3


class ReducesEveryStep(keras_accum.AccumulationOptimizer):
    def apply(self, grads, trainable_variables=None, weight=None):
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, list(grads))
        super().apply(mean, trainable_variables, weight)


class _NeverReduces(replica_groups.ReplicaGroups):
    def all_reduce_sum(self, values):
        return list(values)


class NeverReduces(keras_accum.AccumulationOptimizer):
    def build(self, variables):
        self._groups = _NeverReduces(None, self._strategy.num_replicas_in_sync)
        super().build(variables)


class ScalesTwice(keras_accum.AccumulationOptimizer):
    """Keras has divided the loss by the number of replicas already."""

    def scale_loss(self, loss):
        return super().scale_loss(loss) / self._strategy.num_replicas_in_sync


class _SynchronisedState(window_state.WindowState):
    def new_variable(self, name, **options):
        if name.startswith("accumulator_"):
            options |= {"synchronization": "auto", "aggregation": "mean"}
        return super().new_variable(name, **options)


class SynchronisedAccumulators(keras_accum.AccumulationOptimizer):
    def build(self, variables):
        self.window_state.__class__ = _SynchronisedState
        with mock.patch.object(accumulators, "SMALL", 0):  # each has its own variable
            super().build(variables)


class _Run:
    """An optimizer in a training of its own, and what it left behind."""

    def __init__(self, wrapper, name="tpu_2"):
        self.strategy = registry.STRATEGIES[name]()
        before = len(self.strategy.recorder.programs)
        self.model = evidence.trained(
            name,
            lambda: evidence.accumulating("wrapper", STEPS, wrapper),
            UPDATES,
            STEPS,
        )
        self.program = self.strategy.recorder.programs[before]
        self.emulation = self.strategy.recorder.emulations[before]

    def traced(self):
        evidence.assert_reduces_in_the_boundary(self.program)

    def counted(self):
        evidence.assert_reduces_once_per_window(self.emulation, STEPS)

    def right(self):
        expected = evidence.large_batch(UPDATES, STEPS)
        evidence.assert_as_large_batch(self.model, expected)

    def same(self):
        evidence.assert_same_on_replicas(self.strategy, self.model.variables)


class MutantTest(parameterized.TestCase):
    @parameterized.parameters(
        (ReducesEveryStep, ("traced", "counted")),
        (NeverReduces, ("right", "same")),
        (ScalesTwice, ("right",)),
        (SynchronisedAccumulators, ("traced", "counted")),
    )
    def test_is_caught(self, mutant, by):
        run = _Run(mutant)
        for layer in by:
            with self.assertRaises(AssertionError):
                getattr(run, layer)()

    def test_the_real_one_passes(self):
        run = _Run(keras_accum.AccumulationOptimizer)
        for layer in ("traced", "counted", "right", "same"):
            getattr(run, layer)()


class LoweredMutantTest(parameterized.TestCase):
    def _lowered(self, wrapper):
        strategy = tpu_stand_in.strategy(2)
        with strategy.scope():
            model = training.network(evidence.accumulating("wrapper", STEPS, wrapper))
            model.optimizer.build(model.trainable_variables)
        program, inputs = evidence.train_step(strategy, model, rows=4)
        return tpu_lowering.lowered(program, 2, inputs)

    def test_one_who_reduces_every_step_is_caught(self):
        with self.assertRaises(AssertionError):
            evidence.assert_lowers_into_the_boundary(self._lowered(ReducesEveryStep))

    def test_one_who_never_reduces_is_caught(self):
        with self.assertRaisesRegex(AssertionError, "no all-reduce at all"):
            evidence.assert_lowers_into_the_boundary(self._lowered(NeverReduces))

    def test_a_dynamic_shape_is_caught(self):
        strategy = registry.emulated_tpu(2)
        with strategy.scope():
            model = training.network(evidence.accumulating("wrapper", STEPS))
        x, y = training.rows(8)
        before = len(strategy.recorder.programs)
        # Six rows, then two: without drop_remainder the size is known at run time.
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
        model.fit(dataset, verbose=0, shuffle=False)
        program = strategy.recorder.programs[before]
        text = str(program.graph.as_graph_def())
        self.assertIn("XlaSetDynamicDimensionSize", text)
        inputs = [
            tf.zeros([3 if size is None else size for size in each.shape], each.dtype)
            for each in program.inputs[: -len(program.captured_inputs)]
        ]
        text = tpu_lowering.lowered(program, 2, inputs)
        with self.assertRaisesRegex(AssertionError, "dynamic dimensions"):
            evidence.assert_static(text)


class StandInTest(parameterized.TestCase):
    def test_a_step_cannot_run(self):
        strategy = tpu_stand_in.strategy(2)

        def one():
            return tf.constant(1.0)

        @functools.partial(tf.function, autograph=False)
        def step():
            return strategy.run(one)

        step.get_concrete_function()
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "TPUReplicate"):
            step()


class EmulationTest(parameterized.TestCase):
    def _all_reduced(self, function):
        """The result on each of two replicas."""
        strategy = registry.emulated_tpu(2)

        def on_replica():
            context = tf.distribute.get_replica_context()
            return function(context, context.replica_id_in_sync_group)

        results = tf.function(lambda: strategy.run(on_replica), autograph=False)()
        return [float(each) for each in strategy.experimental_local_results(results)]

    def test_a_sum_over_replicas(self):
        def summed(context, replica):
            value = 10.0 ** tf.cast(replica, tf.float32)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value)

        self.assertEqual(self._all_reduced(summed), [11.0, 11.0])

    def test_in_a_loop_each_iteration_has_its_own(self):
        def summed(context, replica):
            def body(i, value):
                own = value + tf.cast(replica, tf.float32)
                return i + 1, context.all_reduce(tf.distribute.ReduceOp.SUM, own)

            start = (tf.constant(0), tf.constant(1.0))
            return tf.while_loop(lambda i, _: i < 5, body, start)[1]

        # v <- 2v + 1, five times from 1.
        self.assertEqual(self._all_reduced(summed), [63.0, 63.0])

    def test_replicas_that_part_ways_are_an_error_at_once(self):
        def parted(context, replica):
            def reduced():
                return context.all_reduce(tf.distribute.ReduceOp.SUM, 1.0)

            is_first = tf.equal(replica, 0)
            return tf.cond(is_first, reduced, lambda: tf.constant(0.0))

        begin = time.monotonic()
        with self.assertRaisesRegex(tf.errors.OpError, "Replica 0 waits .* ended"):
            self._all_reduced(parted)
        self.assertLess(time.monotonic() - begin, tpu_emulation.TIME_LIMIT_S)

    def test_one_that_does_not_come_is_waited_for_no_longer_than_the_limit(self):
        rendezvous = tpu_emulation.Rendezvous(2, time_limit_s=0.1)
        with self.assertRaisesRegex(tpu_emulation.PartedWaysError, "come in time"):
            rendezvous.exchange("here", 0, 1.0)

    def test_a_fast_replica_does_not_overtake(self):
        rendezvous = tpu_emulation.Rendezvous(2)
        seen = {0: [], 1: []}

        def visit(replica, pause):
            for value in range(3):
                own = 10 * replica + value
                seen[replica].append(rendezvous.exchange("loop", replica, own))
                time.sleep(pause)

        threads = [
            threading.Thread(target=visit, args=(replica, 0.02 * replica))
            for replica in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(tpu_emulation.TIME_LIMIT_S)
        expected = [[value, 10 + value] for value in range(3)]
        self.assertEqual(seen, {0: expected, 1: expected})


class RegistryTest(parameterized.TestCase):
    def test_a_strategy_is_the_real_one(self):
        strategy = registry.emulated_tpu(8)
        self.assertIsInstance(strategy, tf.distribute.TPUStrategy)
        self.assertEqual(strategy.num_replicas_in_sync, 8)
        with strategy.scope():
            variable = keras.Variable(1.0)
        self.assertLen(strategy.experimental_local_results(variable.value), 8)
