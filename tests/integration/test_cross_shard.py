"""TPU's CrossShardOptimizer on the strategy there is (vectors 25 to 27)."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import refusals, registry, tolerances, training


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _on_replicas(strategy, function):
    results = strategy.run(function)
    return strategy.experimental_local_results(results)


def _groupings():
    """Of all replicas: lists of lists, or None."""
    ids = list(range(registry.mirrored().num_replicas_in_sync))
    middle = len(ids) // 2
    halves = [ids[:middle], ids[middle:]]
    return {"all": None, "one": [ids], "halves": halves, "alone": [[i] for i in ids]}


class ReductionTest(refusals.RefusalCase):
    @parameterized.product(
        reduction=["mean", "SUM", tf.compat.v1.losses.Reduction.MEAN],
        grouping=["all", "one", "halves", "alone"],
    )
    def test_the_loss_is_scaled_and_gradients_are_summed(self, reduction, grouping):
        """Vector 25."""
        strategy, groups = registry.mirrored(), _groupings()[grouping]
        replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            variable = keras.Variable(0.0)
            optimizer = keras_accum.CrossShardOptimizer(
                keras.optimizers.SGD(1.0), reduction, group_assignment=groups
            )
        assignment = [list(range(replicas))] if groups is None else groups
        if len(assignment) > 1:
            with self.assertWarnsRegex(UserWarning, "inside their groups"):
                optimizer.build([variable])
        else:
            optimizer.build([variable])
        is_mean = "MEAN" in str(reduction).upper()
        scale = 1 / len(assignment[0]) if is_mean else 1.0

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            slope = 10.0 ** tf.cast(replica, tf.float32)
            with tf.GradientTape() as tape:
                loss = slope * variable
            pairs = optimizer.compute_gradients(loss, [variable], tape=tape)
            optimizer.apply_gradients(pairs)
            return pairs[0][0]

        gradients = _on_replicas(strategy, tf.function(step, autograph=False))
        copies = strategy.experimental_local_results(variable.value)
        for group in assignment:
            for replica in group:
                expected = scale * 10.0**replica
                np.testing.assert_allclose(gradients[replica], expected, rtol=1e-6)
                summed = scale * sum(10.0**member for member in group)
                np.testing.assert_allclose(copies[replica].numpy(), -summed, rtol=1e-6)

    def test_what_is_refused(self):
        """Vector 26."""
        for reduction in ("none", "max", 1, None):
            self.assert_refused(
                ValueError,
                lambda r=reduction: keras_accum.CrossShardOptimizer(_momentum(), r),
                "`reduction` must be one of 'sum', 'mean'",
                f"reduction={reduction!r}",
            )
        replicas = registry.mirrored().num_replicas_in_sync
        ids = list(range(replicas))
        for groups in ([ids, [*ids[1:], 0]], [ids[:1], [*ids[1:], 0]], ids, [ids[1:]]):
            with registry.mirrored().scope():
                self.assert_refused(
                    ValueError,
                    lambda g=groups: keras_accum.CrossShardOptimizer(
                        _momentum(), group_assignment=g
                    ),
                    "must be a list of lists of equal length",
                    f"={groups!r}",
                )
        self.assert_refused(
            ValueError,
            lambda: keras_accum.CrossShardOptimizer(_momentum(), group_assignment=1),
            "`group_assignment` must be a list of lists",
            "group_assignment=1",
            "Write for example",
        )

    def test_outside_of_a_replica_there_is_one_shard(self):
        """Vector 27."""
        variable = tf.Variable(3.0)
        with registry.mirrored().scope():
            optimizer = keras_accum.CrossShardOptimizer(_momentum())
            with self.assertWarnsRegex(UserWarning, "there is one shard"):
                ((gradient, _),) = optimizer.compute_gradients(
                    lambda: 2.0 * variable, [variable]
                )
        self.assertEqual(float(gradient), 2)


class MethodsTest(refusals.RefusalCase):
    def _started(self):
        kernel, bias = keras.Variable([1.0, 2.0], name="kernel"), keras.Variable(0.5)
        optimizer = keras_accum.CrossShardOptimizer(
            _momentum(), accumulation_steps=2, name="mine"
        )
        return optimizer, kernel, bias

    @parameterized.parameters("tape", "callable", "graph")
    def test_gradients_are_computed(self, how):
        optimizer, kernel, bias = self._started()

        def loss():
            return tf.reduce_sum(tf.convert_to_tensor(kernel) ** 2)

        def gradients(grad_loss=None):
            if how == "tape":
                with tf.GradientTape() as tape:
                    value = loss()
                return optimizer.compute_gradients(
                    value, [kernel, bias], tape=tape, grad_loss=grad_loss
                )
            value = loss if how == "callable" else loss()
            return optimizer.compute_gradients(
                value, [kernel, bias], grad_loss=grad_loss
            )

        run = tf.function(gradients, autograph=False) if how == "graph" else gradients
        (of_kernel, one), (of_bias, other) = run()
        np.testing.assert_allclose(of_kernel, [2.0, 4.0])
        self.assertIsNone(of_bias)
        if how != "graph":
            self.assertIs(one, kernel)
            self.assertIs(other, bias)
        np.testing.assert_allclose(run(tf.constant(3.0))[0][0], [6.0, 12.0])

    @parameterized.parameters("default", "mirrored")
    def test_minimize_counts_updates(self, strategy):
        strategy = registry.STRATEGIES[strategy]()
        with strategy.scope():
            variable = keras.Variable(1.0)
            global_step = tf.Variable(tf.constant(5, tf.int64), trainable=False)
            inner = keras.optimizers.SGD(0.5)
            optimizer = keras_accum.CrossShardOptimizer(inner, accumulation_steps=2)
            optimizer.build([variable])

        def step():
            optimizer.minimize(lambda: 3.0 * variable, [variable], global_step)

        counts = []
        for _ in range(4):
            tf.function(lambda: strategy.run(step), autograph=False)()
            counts.append(int(global_step.numpy()))
        self.assertEqual(counts, [5, 6, 6, 7])
        self.assertAlmostEqual(float(variable.numpy()), 1 - 2 * 0.5 * 3, places=6)

    def test_what_is_asked_of_it(self):
        optimizer, kernel, bias = self._started()
        self.assertEqual(optimizer.get_slot_names(), [])
        optimizer.build([kernel, bias])
        self.assertEqual(optimizer.get_name(), "mine")
        self.assertEqual(optimizer.get_slot_names(), ["momentum"])
        slot = optimizer.get_slot(kernel, "momentum")
        self.assertEqual(slot.shape, (2,))
        self.assertIs(slot, optimizer.inner_optimizer.momentums[0])
        self.assertIsNone(optimizer.get_slot(kernel, "velocity"))
        names = [v.path for v in optimizer.variables]
        self.assertEqual([v.path for v in optimizer.variables()], names)
        with self.assertWarns(UserWarning):  # None passes
            optimizer.apply_gradients([(tf.constant([1.0, 1.0]), kernel), (None, bias)])

    def test_one_name_within_another(self):
        short, long = (keras.Variable(0.0, name=n) for n in ("w", "w_momentum"))
        optimizer = keras_accum.CrossShardOptimizer(keras.optimizers.Adam())
        optimizer.build([short, long])
        self.assertEqual(optimizer.get_slot_names(), ["momentum", "velocity"])
        self.assertIsNot(
            optimizer.get_slot(short, "momentum"), optimizer.get_slot(long, "momentum")
        )

    def test_variables_of_one_name(self):
        one, other = (keras.Variable(0.0, name="w") for _ in range(2))
        optimizer = keras_accum.CrossShardOptimizer(keras.optimizers.Adam())
        optimizer.build([one, other])
        pairs = [(tf.constant(1.0), one), (tf.constant(5.0), other)]
        optimizer.apply_gradients(pairs)
        for variable, gradient in ((one, 1.0), (other, 5.0)):
            slot = optimizer.get_slot(variable, "momentum")
            self.assertAlmostEqual(float(slot.numpy()), 0.1 * gradient, places=6)

    @parameterized.parameters("default", "mirrored")
    def test_it_is_saved_with_its_slots(self, strategy):
        def make():
            with registry.STRATEGIES[strategy]().scope():
                return training.network(
                    keras_accum.CrossShardOptimizer(_momentum(), accumulation_steps=3)
                )

        first = training.train(make(), 1, training.ROWS, 3)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(model=first).save(f"{folder}/saved")
            second = training.train(make(), 1, training.ROWS, 3)
            tf.train.Checkpoint(model=second).restore(path).assert_consumed()
        for optimizer in (first.optimizer, second.optimizer):
            self.assertIn("momentum", optimizer.get_slot_names())
        training.assert_same_variables(
            [*second.variables, *second.optimizer.variables],
            [*first.variables, *first.optimizer.variables],
            tolerances.BY_DTYPE["float32"],
        )

    def test_it_goes_into_a_saved_model(self):
        model = training.train(
            training.network(keras_accum.CrossShardOptimizer(_momentum())),
            1,
            training.ROWS,
        )
        with tempfile.TemporaryDirectory() as folder:
            tf.saved_model.save(model, folder)

    def test_a_loss_without_a_tape(self):
        optimizer, kernel, _ = self._started()
        self.assert_refused(
            ValueError,
            lambda: optimizer.compute_gradients(tf.constant(1.0), [kernel]),
            "needs the tape that recorded it",
            "tape=None",
            "or a callable that computes the loss",
        )
        self.assert_refused(
            ValueError,
            lambda: optimizer.compute_gradients(lambda: tf.constant(1.0)),
            "There must be variables",
            "var_list=None",
            "Pass var_list=",
        )


class FitTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"], steps=[1, 2], reduction=["mean", "sum"]
    )
    def test_the_loss_is_not_scaled_twice(self, strategy, steps, reduction):
        with registry.STRATEGIES[strategy]().scope():
            model = training.network(
                keras_accum.CrossShardOptimizer(
                    _momentum(), reduction, accumulation_steps=steps
                )
            )
        training.train(model, 4, training.ROWS, steps)
        expected = training.network(_momentum())
        training.train(expected, 4, training.ROWS * steps)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    def test_it_is_saved_and_loaded(self):
        model = training.network(
            keras_accum.CrossShardOptimizer(_momentum(), "sum", accumulation_steps=3)
        )
        training.train(model, 4, training.ROWS)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            loaded = keras.models.load_model(path)
        self.assertIsInstance(loaded.optimizer, keras_accum.CrossShardOptimizer)
        self.assertEqual(loaded.optimizer.get_config(), model.optimizer.get_config())
        self.assertEqual(int(loaded.optimizer.position), 1)
