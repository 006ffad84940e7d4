"""Graphcore's optimizers on the strategy there is (vectors 10 to 19)."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import graphcore
from tests import refusals, registry, tolerances, training

R = 2  # of the vectors


def _per_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


class Handed(keras.optimizers.SGD):
    """Keeps what it is handed."""

    def apply(self, grads, trainable_variables=None):
        self.__dict__.setdefault("handed", []).append(grads[0])
        super().apply(grads, trainable_variables)


class ReductionMethodTest(refusals.RefusalCase):
    def test_vector_10(self):
        method = graphcore.GradientAccumulationReductionMethod
        for name, expected in (
            ("SUM", method.SUM),
            ("sum", method.SUM),
            ("Mean", method.MEAN),
            ("mEAN", method.MEAN),
            ("RUNNING_MEAN", method.RUNNING_MEAN),
            (method.RUNNING_MEAN, method.RUNNING_MEAN),
        ):
            self.assertIs(method.parse(name), expected)
        for name in ("Exp", 10, None):
            with self.assertRaisesRegex(
                ValueError, "Cannot parse.*SUM.*MEAN.*RUNNING_MEAN"
            ):
                graphcore.GradientAccumulationOptimizerV2(
                    keras.optimizers.SGD(), 2, reduction_method=name
                )
        default = graphcore.GradientAccumulationOptimizerV2(keras.optimizers.SGD(), 2)
        self.assertEqual(default.get_config()["reduction_method"], "SUM")

    @parameterized.parameters(
        ("SUM", 524032.0), ("MEAN", 65504.0), ("RUNNING_MEAN", 65504.0)
    )
    def test_vector_11(self, method, expected):
        variable, asked = keras.Variable(0.0, dtype="float16"), []

        def dtype(of):
            asked.append(of)
            return "float32"

        inner = Handed(1e-9)
        optimizer = graphcore.GradientAccumulationOptimizerV2(
            inner, 8, dtype=dtype, reduction_method=method
        )
        optimizer.build([variable])
        for _ in range(8):
            gradient = tf.constant(65504.0, tf.float16)
            optimizer.apply_gradients([(gradient, variable)])
        (handed,) = inner.handed
        self.assertEqual((handed.dtype, float(handed)), (tf.float32, expected))
        self.assertTrue(all(each is variable for each in asked))

    def test_vector_13(self):
        for steps in (0, -1, 2.0, "4", None, True):
            for cls in (
                graphcore.GradientAccumulationOptimizer,
                graphcore.GradientAccumulationOptimizerV2,
                graphcore.CrossReplicaGradientAccumulationOptimizer,
                graphcore.CrossReplicaGradientAccumulationOptimizerV2,
            ):
                self.assert_refused(
                    ValueError,
                    lambda c=cls, s=steps: c(keras.optimizers.SGD(), s),
                    "`num_mini_batches` must be an integer >= 1",
                    f"num_mini_batches={steps!r}",
                )

    def test_what_only_an_ipu_does(self):
        for name in (
            "offload_weight_update_variables",
            "replicated_optimizer_state_sharding",
        ):
            self.assert_refused(
                ValueError,
                lambda n=name: graphcore.GradientAccumulationOptimizerV2(
                    keras.optimizers.SGD(), 2, **{n: True}
                ),
                f"`{name}` must be left out: only an IPU can do that",
                f"{name}=True",
                "Leave it out",
            )


VECTOR_12 = {
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.8),
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}


class CrossReplicaTest(parameterized.TestCase):
    @parameterized.parameters(*VECTOR_12)
    def test_vector_12(self, name):
        strategy, steps, updates = registry.mirrored(), 4, 3
        replicas = strategy.num_replicas_in_sync
        random = np.random.RandomState(0)
        ids = random.randint(0, 6, (updates, steps, replicas, 5))
        table = random.randn(6, 3).astype("float32")
        kernel = random.randn(3, 2).astype("float32")

        def loss_of(variables, rows):
            embedded = tf.gather(tf.convert_to_tensor(variables[0]), rows)
            return tf.reduce_mean((embedded @ variables[1]) ** 2)

        with strategy.scope():
            variables = [keras.Variable(table), keras.Variable(kernel)]
            optimizer = graphcore.CrossReplicaGradientAccumulationOptimizerV2(
                VECTOR_12[name](), steps, reduction_method="mean"
            )
            optimizer.build(variables)

        @tf.function
        def step(rows):
            def on_replica(rows):
                with tf.GradientTape() as tape:
                    loss = loss_of(variables, rows)
                optimizer.minimize(loss, variables, tape=tape)

            strategy.run(on_replica, args=(rows,))

        for rows in ids.reshape(-1, replicas, 5):
            step(_per_replica(strategy, rows))
        expected = [keras.Variable(table), keras.Variable(kernel)]
        plain = VECTOR_12[name]()
        plain.build(expected)
        for window in ids.reshape(updates, -1, 5):
            with tf.GradientTape() as tape:
                loss = tf.add_n([loss_of(expected, rows) for rows in window])
                loss /= len(window)
            natives = [variable.value for variable in expected]
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, natives)]
            plain.apply_gradients(zip(gradients, expected, strict=True))
        tolerance = registry.tolerance(name)
        training.assert_same_variables(variables, expected, tolerance)

    @parameterized.product(
        strategy=["default", "mirrored"], steps=[1, 2], way=["loop", "fit"]
    )
    def test_vector_14(self, strategy, steps, way):
        distribution = registry.STRATEGIES[strategy]()
        with distribution.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
            optimizer = graphcore.CrossReplicaGradientAccumulationOptimizerV2(
                keras.optimizers.SGD(1.0), steps, reduction_method="mean"
            )
            model.compile(optimizer, "mse")
            optimizer.build(model.trainable_variables)
        rows = 4 * steps
        x, y = np.ones((rows, 1), "float32"), np.full((rows, 1), 2, "float32")
        if way == "fit":
            model.fit(x, y, batch_size=4, verbose=0)
        else:

            def step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                optimizer.minimize(loss, model.trainable_variables, tape=tape)

            for _ in range(steps):
                tf.function(lambda: distribution.run(step), autograph=False)()
        np.testing.assert_allclose(model.get_weights()[0], [[3.0]], rtol=1e-6)

    def test_without_a_cross_replica_sum_replicas_part_ways(self):
        strategy = registry.mirrored()
        with strategy.scope():
            variable = keras.Variable(0.0)
            optimizer = graphcore.GradientAccumulationOptimizer(
                keras.optimizers.SGD(1.0), 2
            )
        with self.assertWarnsRegex(UserWarning, "inside their groups only"):
            optimizer.build([variable])

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.cast(replica + 1, tf.float32)
            optimizer.apply_gradients([(gradient, variable)])

        for _ in range(2):
            strategy.run(step)
        copies = strategy.experimental_local_results(variable.value)
        for replica, copy in enumerate(copies):
            self.assertEqual(float(copy), -2 * (replica + 1))

    def test_in_fit_each_replica_trains_as_if_alone(self):
        strategy = registry.mirrored()
        x, y = training.rows(4 * training.ROWS)
        with strategy.scope():
            model = training.network(
                graphcore.GradientAccumulationOptimizerV2(
                    keras.optimizers.SGD(0.05, momentum=0.9), 2, reduction_method="MEAN"
                )
            )
        with self.assertWarnsRegex(UserWarning, "inside their groups only"):
            model.fit(training.batches(x, y, training.ROWS), shuffle=False, verbose=0)
        own = training.ROWS // strategy.num_replicas_in_sync
        of_first = np.arange(len(x)) % training.ROWS < own
        expected = training.network(keras.optimizers.SGD(0.05, momentum=0.9))
        data = training.batches(x[of_first], y[of_first], 2 * own)
        expected.fit(data, shuffle=False, verbose=0)
        for variable, plain in zip(model.variables, expected.variables, strict=True):
            first = strategy.experimental_local_results(variable.value)[0]
            np.testing.assert_allclose(
                first.numpy(), training.numbers(plain), rtol=1e-5, atol=1e-6
            )

    @parameterized.parameters("sum", "mean", "running_mean")
    def test_the_config_and_a_round_trip(self, method):
        optimizer = graphcore.CrossReplicaGradientAccumulationOptimizerV2(
            keras.optimizers.Adam(0.25), 3, dtype="float32", reduction_method=method
        )
        again = type(optimizer).from_config(optimizer.get_config())
        self.assertEqual(again.get_config(), optimizer.get_config())
        self.assertEqual(again.accumulation_steps, 3)
        one = graphcore.CrossReplicaOptimizer(keras.optimizers.SGD(0.5))
        again = type(one).from_config(one.get_config())
        self.assertEqual(again.get_config(), one.get_config())


class MapGradientTest(parameterized.TestCase):
    def _decayed(self, gradient, variable):
        return gradient + 0.01 * tf.convert_to_tensor(variable)

    def test_vector_15(self):
        x, y, z = (keras.Variable(v) for v in (1.0, 5.0, 10.0))
        optimizer = graphcore.MapGradientOptimizer(
            keras.optimizers.SGD(1.0), self._decayed
        )
        pairs = optimizer.compute_gradients(lambda: x * y + x * z + y * z, [x, y, z])
        expected = [15.01, 11.05, 6.10]
        np.testing.assert_allclose([float(g) for g, _ in pairs], expected, rtol=1e-6)
        optimizer.apply_gradients(pairs)  # which does not map once more
        after = [float(v.numpy()) for v in (x, y, z)]
        np.testing.assert_allclose(after, [1 - 15.01, 5 - 11.05, 10 - 6.1], rtol=1e-5)

    def test_in_fit_it_maps_once(self):
        model = training.network(
            graphcore.MapGradientOptimizer(keras.optimizers.SGD(0.05), self._decayed)
        )
        training.train(model, 4, training.ROWS)
        expected = training.network(keras.optimizers.SGD(0.05, weight_decay=0.01))
        training.train(expected, 4, training.ROWS)
        training.assert_same_variables(  # without momentum coupled is decoupled
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.parameters("eager", "graph")
    def test_what_is_done_to_mapped_gradients_is_kept(self, mode):
        x = keras.Variable(1.0)
        optimizer = graphcore.MapGradientOptimizer(
            keras.optimizers.SGD(1.0), lambda gradient, variable: 2.0 * gradient
        )

        def step():
            pairs = optimizer.compute_gradients(lambda: 3.0 * x, [x])
            clipped = [(tf.clip_by_value(g, -4.0, 4.0), v) for g, v in pairs]
            optimizer.apply_gradients(clipped)

        run = tf.function(step, autograph=False) if mode == "graph" else step
        for _ in range(2):
            run()
        self.assertEqual(float(x.numpy()), 1 - 2 * 4)

    def test_a_fit_after_gradients_that_were_only_looked_at(self):
        optimizer = graphcore.MapGradientOptimizer(
            keras.optimizers.SGD(0.05), self._decayed
        )
        model = training.network(optimizer)
        x, y = training.rows(2)
        optimizer.compute_gradients(
            lambda: tf.reduce_mean((model(x) - y) ** 2), model.trainable_variables
        )
        training.train(model, 4, training.ROWS)
        expected = training.network(keras.optimizers.SGD(0.05, weight_decay=0.01))
        training.train(expected, 4, training.ROWS)
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )

    def test_none_is_not_mapped(self):
        x, y = keras.Variable(1.0), keras.Variable(1.0)
        optimizer = graphcore.MapGradientOptimizer(
            keras.optimizers.SGD(1.0), self._decayed
        )
        (_, (none, _)) = optimizer.compute_gradients(lambda: 2.0 * x, [x, y])
        self.assertIsNone(none)

    def test_a_function_is_needed(self):
        with self.assertRaisesRegex(TypeError, "gradient_mapping_function=0.01"):
            graphcore.MapGradientOptimizer(keras.optimizers.SGD(1.0), 0.01)
