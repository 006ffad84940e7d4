"""CrossShardOptimizer under an emulated TPUStrategy, with and without groups."""

import functools
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import graph_walk, micro_steps, registry, training
from tests.platforms import tpu_evidence as evidence

GROUPS = {
    "tpu_2": {"all": None, "alone": [[0], [1]]},
    "tpu_8": {
        "all": None,
        "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "mixed": [[0, 3], [1, 6], [7, 2], [5, 4]],
    },
}
CASES = [(name, group) for name, groups in GROUPS.items() for group in groups]


class CrossShardTest(parameterized.TestCase):
    @parameterized.parameters(*[(*case, r) for case in CASES for r in ("mean", "SUM")])
    def test_the_loss_is_scaled_and_gradients_are_summed(self, name, group, reduction):
        """Vector 25."""
        strategy, groups = registry.STRATEGIES[name](), GROUPS[name][group]
        replicas = strategy.num_replicas_in_sync
        assignment = [list(range(replicas))] if groups is None else groups
        with strategy.scope():
            variable = keras.Variable(0.0)
            optimizer = keras_accum.CrossShardOptimizer(
                keras.optimizers.SGD(1.0), reduction, group_assignment=groups
            )
        if len(assignment) > 1:
            with self.assertWarnsRegex(UserWarning, "inside their groups"):
                optimizer.build([variable])
        else:
            optimizer.build([variable])
        scale = 1 / len(assignment[0]) if reduction == "mean" else 1.0

        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            slope = 2.0 ** tf.cast(replica, tf.float32)
            with tf.GradientTape() as tape:
                loss = slope * variable
            pairs = optimizer.compute_gradients(loss, [variable], tape=tape)
            optimizer.apply_gradients(pairs)
            return pairs[0][0]

        @functools.partial(tf.function, autograph=False)
        def step():
            return strategy.run(on_replica)

        gradients = strategy.experimental_local_results(step())
        copies = strategy.experimental_local_results(variable.value)
        for shards in assignment:
            summed = scale * sum(2.0**member for member in shards)
            for replica in shards:
                self.assertEqual(float(gradients[replica]), scale * 2.0**replica)
                self.assertEqual(float(copies[replica].numpy()), -summed)
        if group != "alone":
            found = graph_walk.collectives(strategy.recorder.programs[-1])
            self.assertTrue(any(kind == "CrossReplicaSum" for kind, _ in found))

    @parameterized.parameters("tpu_2", "tpu_8")
    def test_in_fit_the_mean_is_taken_once(self, name):
        def optimizer():
            return keras_accum.CrossShardOptimizer(
                evidence.momentum(), accumulation_steps=3
            )

        model = evidence.trained(name, optimizer, 3, 3)
        evidence.assert_as_large_batch(model, evidence.large_batch(3, 3))

    def test_a_bad_gradient_in_one_group_skips_in_all(self):
        strategy = registry.STRATEGIES["tpu_8"]()
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras_accum.CrossShardOptimizer(
                keras.optimizers.SGD(1.0), group_assignment=GROUPS["tpu_8"]["halves"]
            )
        with self.assertWarnsRegex(UserWarning, "inside their groups"):
            optimizer.build([variable])

        def on_replica(value):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(tf.equal(replica, 6), value, 1.0)
            optimizer.apply_gradients([(gradient, variable)])

        @functools.partial(tf.function, autograph=False)
        def step(value):
            strategy.run(on_replica, args=(value,))

        def copies():
            local = strategy.experimental_local_results(variable.value)
            return {float(copy.numpy()) for copy in local}

        step(tf.constant(np.nan, tf.float32))
        self.assertEqual(copies(), {1.0})
        self.assertEqual(int(optimizer.skipped_windows), 1)
        step(tf.constant(1.0))
        self.assertEqual(copies(), {-3.0})  # four shards of 1 each

    def test_several_groups_are_not_saved(self):
        with registry.STRATEGIES["tpu_2"]().scope():
            optimizer = keras_accum.CrossShardOptimizer(
                evidence.momentum(), group_assignment=[[0], [1]]
            )
            model = training.network(optimizer)
        with self.assertWarnsRegex(UserWarning, "inside their groups"):
            optimizer.build(model.trainable_variables)
        with (
            tempfile.TemporaryDirectory() as folder,
            self.assertRaisesRegex(ValueError, "one group of replicas to be saved"),
        ):
            model.save_weights(f"{folder}/saved.weights.h5")


class GroupsTest(parameterized.TestCase):
    @parameterized.product(every=["window", "micro_step"], surface=["wrapper", "mixin"])
    def test_accumulated_in_groups(self, every, surface):
        strategy, groups = registry.STRATEGIES["tpu_8"](), GROUPS["tpu_8"]["mixed"]

        def make():
            return evidence.accumulating(
                surface,
                2,
                plain={"global_clipnorm": 3.0},
                replica_groups=groups,
                reduce_every=every,
            )

        with self.assertWarnsRegex(UserWarning, "inside their groups"):
            run = micro_steps.MicroSteps("tpu_8", make, [np.ones(3, "float32")])
        steps = micro_steps.random_gradients([(3,)], "tpu_8", 4)
        for step in steps:
            run(step)
        copies = strategy.experimental_local_results(run.variables[0].value)
        for group in groups:
            means = [
                sum(step[0][group].sum(axis=0) for step in window) / 2
                for window in micro_steps.in_windows(steps, 2)
            ]
            (expected,), _ = micro_steps.plainly(
                evidence.momentum(global_clipnorm=3.0),
                [np.ones(3, "float32")],
                [[mean] for mean in means],
            )
            for replica in group:
                np.testing.assert_allclose(
                    copies[replica].numpy(), training.numbers(expected), rtol=1e-6
                )
