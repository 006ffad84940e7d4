"""Invariant 3: a window is reduced once, in the branch of its boundary.

Collectives are counted in the graph, calls of `all_reduce` while it is traced and while
it runs. An optimizer that reduces in every micro step shows that the counters count.
"""

import contextlib
import functools
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import accumulators
from tests import graph_walk
from tests.equivalence import given_gradients
from tests.equivalence.given_gradients import GivenGradients, random_gradients

STEPS = 4


class _ReducesEveryStep(keras_accum.AccumulationOptimizer):
    """What must not be: right in its result for a mean, and slow."""

    def apply(self, grads, trainable_variables=None, weight=None):
        context = tf.distribute.get_replica_context()
        grads = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        super().apply(grads, trainable_variables, weight)


def _collectives(function):
    """Of a concrete function: each collective, as the branches that it stands in."""
    counted = graph_walk.collectives(function)
    return [branches for (_, branches), n in counted.items() for _ in range(n)]


@contextlib.contextmanager
def _counted_reductions():
    """Counts the calls of `all_reduce`: as they are traced, and as they run."""
    all_reduce = tf.distribute.ReplicaContext.all_reduce
    ran = tf.Variable(0)
    traced = []

    @functools.wraps(all_reduce)
    def counted(context, op, value, options=None):
        traced.append(len(tf.nest.flatten(value)))
        ran.assign_add(1)
        return all_reduce(context, op, value, options)

    refused = mock.Mock(side_effect=AssertionError("a second way to reduce"))
    context = tf.distribute.ReplicaContext
    with (
        mock.patch.object(context, "all_reduce", counted),
        mock.patch.object(context, "all_gather", refused),
    ):
        yield traced, ran


def _make(surface):
    return functools.partial(given_gradients.SURFACES[surface], STEPS)


def _mutant():
    return given_gradients.wrapped(STEPS, cls=_ReducesEveryStep)


def _concrete(run, weights=None):
    gradients = [tf.constant(g) for g in random_gradients(run.num_replicas, 0)]
    if weights is not None:
        weights = tf.ones(run.num_replicas)
    return run.micro_step.get_concrete_function(gradients, weights)


def _in_the_boundary(run):
    """One collective on each replica, in the branch that is taken at the boundary."""
    number = run.num_replicas if run.num_replicas > 1 else 0
    return [("If.then_branch",)] * number


class OneReductionTest(parameterized.TestCase):
    @parameterized.product(surface=["wrapper", "mixin"], weights=[None, "given"])
    def test_the_graph_reduces_in_the_boundary_only(self, surface, weights):
        run = GivenGradients("mirrored", "graph", _make(surface))
        found = _collectives(_concrete(run, weights))
        self.assertEqual(found, _in_the_boundary(run))

    def test_the_graph_of_a_flush_reduces_in_the_boundary_only(self):
        run = GivenGradients("mirrored", "graph", _make("wrapper"))

        @tf.function(autograph=False)
        def flush():
            run.strategy.run(run.optimizer.flush)

        found = _collectives(flush.get_concrete_function())
        self.assertEqual(found, _in_the_boundary(run))

    @parameterized.parameters("default", "one_device")
    def test_one_replica_has_no_collective(self, strategy):
        run = GivenGradients(strategy, "graph", _make("wrapper"))
        self.assertEmpty(_collectives(_concrete(run)))

    def test_the_graph_shows_one_who_reduces_in_every_step(self):
        run = GivenGradients("mirrored", "graph", _mutant)
        if run.num_replicas > 1:
            self.assertIn((), _collectives(_concrete(run)))

    @parameterized.product(
        surface=["wrapper", "mixin"], mode=["graph", "eager"], is_shared=[True, False]
    )
    def test_eight_micro_steps_of_windows_of_four_reduce_twice(
        self, surface, mode, is_shared
    ):
        small = accumulators.SMALL if is_shared else 0
        with (
            mock.patch.object(accumulators, "SMALL", small),
            _counted_reductions() as (traced, ran),
        ):
            run = GivenGradients("mirrored", mode, _make(surface))
            for seed in range(2 * STEPS):
                run.step(random_gradients(run.num_replicas, seed))
        replicas = run.num_replicas if run.num_replicas > 1 else 0
        # The gradients of all variables, and the weight, in one call. Those whose
        # accumulators share a variable are one tensor.
        batch = (1 if is_shared else len(run.variables)) + 1
        num_traced = replicas * (1 if mode == "graph" else 2)
        self.assertEqual(traced, [batch] * num_traced)
        self.assertEqual(int(ran.numpy()), 2 * replicas)

    @parameterized.parameters("graph", "eager")
    def test_the_counter_shows_one_who_reduces_in_every_step(self, mode):
        with _counted_reductions() as (_, ran):
            run = GivenGradients("mirrored", mode, _mutant)
            for seed in range(2 * STEPS):
                run.step(random_gradients(run.num_replicas, seed))
        every_step = 2 * STEPS * run.num_replicas
        in_windows = 2 * run.num_replicas if run.num_replicas > 1 else 0
        self.assertEqual(int(ran.numpy()), every_step + in_windows)
