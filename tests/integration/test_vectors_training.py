"""Published vectors of whole trainings: `fit`, and a loop of one's own.

The numbers are those of the Graphcore, Keras and Lightning suites and of public
threads, restated. The number of a vector stands in the name of its test.
"""

import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training

FLOAT32 = tolerances.BY_DTYPE["float32"]


def linear(cls=keras.Sequential, **arguments):
    """The model LIN: a weight of 1 and no bias."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return cls([keras.Input((1,)), dense], **arguments)


def column(values):
    return np.array(values, "float32")[:, None]


def weight_of(model):
    return training.numbers(model.trainable_variables[0]).item()


def descent(learning_rate, steps):
    return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(learning_rate), steps)


class FitTest(parameterized.TestCase):
    @parameterized.product(strategy=["default", "mirrored"], steps=[1, 2])
    def test_vector_14_identical_samples(self, strategy, steps):
        with registry.STRATEGIES[strategy]().scope():
            model = linear()
            model.compile(descent(1.0, steps), loss="mse")
        rows = steps * micro_steps.num_replicas(strategy)
        batch_size = micro_steps.num_replicas(strategy)
        dataset = training.batches(
            column([1.0] * rows), column([2.0] * rows), batch_size
        )
        model.fit(dataset, verbose=0, shuffle=False)
        np.testing.assert_allclose(weight_of(model), 3.0, rtol=FLOAT32.rtol)
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 1)

    @parameterized.parameters("default", "mirrored")
    def test_vector_33_graph_training(self, strategy):
        with registry.STRATEGIES[strategy]().scope():
            model = linear()
            model.compile(descent(0.01, 2), loss="mse")
        x = column([1.0, 1.0, 3.0, 3.0])
        model.fit(training.batches(x, np.zeros_like(x), 2), verbose=0, shuffle=False)
        np.testing.assert_allclose(weight_of(model), 0.9, rtol=FLOAT32.rtol)

    def test_vector_33_mirrored_with_one_device(self):
        """In a process of its own: one MirroredStrategy of one size is to a process."""
        this_test = f"{__file__}::FitTest::test_vector_33_graph_training1"
        if registry.NUM_REPLICAS == 1:
            return  # It is the process of its own.
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", this_test],
            env=os.environ | {"KERAS_ACCUM_TEST_REPLICAS": "1"},
            check=True,
            timeout=120,
        )

    @parameterized.parameters("default", "mirrored")
    def test_vector_50_embedding(self, strategy):
        with registry.STRATEGIES[strategy]().scope():
            embedding = keras.layers.Embedding(4, 1, embeddings_initializer="ones")
            model = keras.Sequential(
                [keras.Input((1,), dtype="int32"), embedding, keras.layers.Flatten()]
            )
            model.compile(descent(0.1, 2), loss="mse")
        ids = np.array([[0], [1], [0], [3]])
        targets = np.array([0.0, 3.0, 2.0, 5.0])
        model.fit(training.batches(ids, column(targets), 2), verbose=0, shuffle=False)
        # The mean over four rows of (e[id] - y)^2, by hand; each row has one id.
        gradient = np.zeros(4)
        np.add.at(gradient, ids[:, 0], 2 * (1.0 - targets) / 4)
        np.testing.assert_allclose(
            training.numbers(model.trainable_variables[0])[:, 0],
            1.0 - 0.1 * gradient,
            rtol=FLOAT32.rtol,
        )


class LeftoverTest(parameterized.TestCase):
    """Vector 43: six rows, one at a time, in windows of four."""

    def setUp(self):
        super().setUp()
        self.model = linear()
        self.model.compile(descent(0.1, 4), loss="mse")
        self.train(6)

    def train(self, rows):
        x = column([1.0] * rows)
        self.model.fit(
            training.batches(x, np.zeros_like(x), 1), verbose=0, shuffle=False
        )

    def held(self):
        [variable] = [
            v for v in self.model.optimizer.variables if v.name == "accumulator_0"
        ]
        return variable.numpy().item()

    def test_vector_43_carried(self):
        np.testing.assert_allclose(weight_of(self.model), 0.8, rtol=FLOAT32.rtol)
        self.assertEqual(int(self.model.optimizer.position), 2)
        self.train(2)  # the next `fit` fills the window
        np.testing.assert_allclose(weight_of(self.model), 0.64, rtol=FLOAT32.rtol)

    def test_vector_43_applied(self):
        self.model.optimizer.flush()
        np.testing.assert_allclose(weight_of(self.model), 0.64, rtol=FLOAT32.rtol)
        self.assertEqual(int(self.model.optimizer.position), 0)
        self.assertEqual(int(self.model.optimizer.iterations), 2)

    def test_vector_43_dropped(self):
        self.assertNotEqual(self.held(), 0.0)
        self.model.optimizer.reset()
        np.testing.assert_allclose(weight_of(self.model), 0.8, rtol=FLOAT32.rtol)
        self.assertEqual(self.held(), 0.0)
        self.assertEqual(int(self.model.optimizer.position), 0)


class AverageOfMicroBatchesTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        optimizer=["momentum", "sgd", "adam", "rmsprop"],
    )
    def test_vector_12_equals_one_update_on_the_average(self, strategy, optimizer):
        def plain():
            return {
                "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.8),
                "sgd": lambda: keras.optimizers.SGD(0.01),
                "adam": lambda: keras.optimizers.Adam(0.01),
                "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
            }[optimizer]()

        random = np.random.RandomState(0)
        values = [random.randn(5, 4), random.randn(4, 2)]
        values = [value.astype("float32") for value in values]
        replicas, steps, rows = micro_steps.num_replicas(strategy), 4, 3
        ids = random.randint(0, 5, (3 * steps, replicas, rows))

        def loss(ids, variables):
            embedding, matrix = variables
            return tf.reduce_mean((tf.gather(embedding, ids) @ matrix) ** 2)

        @tf.function
        def gradients_of(ids, variables):
            with tf.GradientTape() as tape:
                value = loss(ids, variables)
            return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

        expected, inner = [keras.Variable(value) for value in values], plain()
        inner.build(expected)
        for window in micro_steps.in_windows(ids, steps):
            each = [
                gradients_of(tf.constant(one), [v.value for v in expected])
                for one in window.reshape(-1, rows)
            ]
            average = [np.mean(of_one, axis=0) for of_one in zip(*each, strict=True)]
            pairs = zip(map(tf.constant, average), expected, strict=True)
            inner.apply_gradients(list(pairs))

        with registry.STRATEGIES[strategy]().scope():
            variables = [keras.Variable(value) for value in values]
            accumulating = keras_accum.AccumulationOptimizer(
                plain(), steps, replica_reduction="mean"
            )

        @tf.function
        def micro_step(ids):
            def on_one_replica():
                context = tf.distribute.get_replica_context()
                with tf.GradientTape() as tape:
                    own = ids[context.replica_id_in_sync_group]
                    value = loss(own, [v.value for v in variables])
                gradients = tape.gradient(value, [v.value for v in variables])
                pairs = zip(gradients, variables, strict=True)
                accumulating.apply_gradients(list(pairs))

            registry.STRATEGIES[strategy]().run(on_one_replica)

        for one in ids:
            micro_step(tf.constant(one))
        training.assert_same_variables(
            variables, expected, registry.tolerance(optimizer)
        )
