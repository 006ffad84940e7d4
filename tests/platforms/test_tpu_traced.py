"""Traced by TPUStrategy: where the collectives of each variant stand."""

import functools

import keras
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import graph_walk, training
from tests.platforms import tpu_evidence as evidence
from tests.platforms import tpu_stand_in

STEPS = 3
VARIANTS = {
    "plain": {},
    "skip_micro_batch": {"on_nonfinite": "skip_micro_batch"},
    "propagate": {"on_nonfinite": "propagate"},
    "mean": {"replica_reduction": "mean"},
    "running_mean": {"micro_reduction": "running_mean"},
    "dynamic": {"loss_scale": "dynamic"},
    "automatic": {"loss_scale": keras_accum.AutomaticLossScale()},
    "scheduled": {
        "loss_scale": keras_accum.ScheduledLossScale(
            keras.optimizers.schedules.ExponentialDecay(8.0, 1, 0.5)
        )
    },
}


def _program(num_replicas, surface, options, build=None):
    strategy = tpu_stand_in.strategy(num_replicas)
    with strategy.scope():
        model = training.network(evidence.accumulating(surface, STEPS, **options))
        model.optimizer.build(model.trainable_variables)
        if build is not None:
            build(model.optimizer)
    program, _ = evidence.train_step(strategy, model)
    return program


class TracedTest(parameterized.TestCase):
    @parameterized.product(num_replicas=[2, 8], surface=["wrapper", "mixin"])
    def test_the_window_is_reduced_in_the_boundary(self, num_replicas, surface):
        program = _program(num_replicas, surface, {})
        evidence.assert_reduces_in_the_boundary(program)
        sums = 2  # all gradients, which share a variable, and the weight
        found = graph_walk.collectives(program)
        self.assertEqual(found["CrossReplicaSum", ("If.then_branch",)], sums)
        # Keras's own, for `iterations`, where the update is made.
        others = {place: n for place, n in found.items() if "Sum" not in place[0]}
        inner = ("If.then_branch", "If.then_branch")
        self.assertLessEqual(others.items(), {("AllToAll", inner): 1}.items())

    @parameterized.product(
        variant=sorted(set(VARIANTS) - {"plain"}), surface=["wrapper", "mixin"]
    )
    def test_of_each_option(self, variant, surface):
        program = _program(2, surface, VARIANTS[variant])
        evidence.assert_reduces_in_the_boundary(program)

    def test_of_decay_and_measurements(self):
        def build(optimizer):
            optimizer.decay_weights(0.1)
            optimizer.measure_gradients()

        program = _program(2, "wrapper", {}, build)
        evidence.assert_reduces_in_the_boundary(program)

    def test_reduced_in_each_micro_step_if_so_asked(self):
        program = _program(2, "wrapper", {"reduce_every": "micro_step"})
        found = graph_walk.collectives(program)
        self.assertIn(("CrossReplicaSum", ()), found)

    def test_a_flush_reduces_in_the_boundary(self):
        strategy = tpu_stand_in.strategy(2)
        with strategy.scope():
            model = training.network(evidence.accumulating("wrapper", STEPS))
            model.optimizer.build(model.trainable_variables)

        @functools.partial(tf.function, autograph=False)
        def flush():
            strategy.run(model.optimizer.flush)

        evidence.assert_reduces_in_the_boundary(flush.get_concrete_function())
