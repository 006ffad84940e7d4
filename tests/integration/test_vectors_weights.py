"""Published vectors 45 and 46: micro-batches that weigh what they hold.

Both from a training loop of one's own and from a `train_step` under `fit`.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training

FLOAT32 = tolerances.BY_DTYPE["float32"]


def column(values):
    return np.array(values, "float32")[:, None]


def optimizer(learning_rate, **arguments):
    return keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(learning_rate), 2, **arguments
    )


class WeighsItsRows(keras.Sequential):
    """Passes the rows of each micro-batch, or the sum of their weights."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        weight = tf.shape(x)[0] if sample_weight is None else sum_of(sample_weight)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True), weight=weight
        )
        return {"loss": loss}


def sum_of(values):
    return tf.reduce_sum(values)


def linear(cls=keras.Sequential):
    """The model LIN: a weight of 1 and no bias."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return cls([keras.Input((1,)), dense])


def outcome(variables, accumulating):
    """The weight, and the number of updates: in vector 45 it ends where it began."""
    updates = training.numbers(accumulating.iterations).item()
    return training.numbers(variables[0]).item(), updates


def by_hand(strategy, learning_rate, micro_batches, own_mean):
    """A training loop of its own: each replica takes the rows that are its own.

    Args:
        strategy: A name in `registry.STRATEGIES`.
        learning_rate: Of the gradient descent.
        micro_batches: Pairs of inputs, targets and weights of the rows.
        own_mean: Means of squared errors and weights, of one replica's rows.
    """
    strategy = registry.STRATEGIES[strategy]()
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = linear()
        # A mean over a replica's rows does not carry 1/R.
        accumulating = optimizer(learning_rate, replica_reduction="mean")
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def micro_step(x, y, weights):
        def on_one_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = [each[replica::replicas] for each in (x, y, weights)]
            with tf.GradientTape() as tape:
                errors = (model(own[0]) - own[1])[:, 0] ** 2
                loss = own_mean(errors, own[2])
            gradients = tape.gradient(loss, variables)
            accumulating.apply_gradients(
                zip(gradients, variables, strict=True), weight=sum_of(own[2])
            )

        strategy.run(on_one_replica)

    for micro_batch in micro_batches:
        micro_step(*map(tf.constant, micro_batch))
    return outcome(variables, accumulating)


def under_fit(strategy, learning_rate, micro_batches, loss):
    with registry.STRATEGIES[strategy]().scope():
        model = linear(WeighsItsRows)
        model.compile(optimizer(learning_rate), loss=loss)
    x, y, *weights = micro_batches
    batch_size = 2 if weights else 4
    dataset = tf.data.Dataset.from_tensor_slices((x, y, *weights))
    model.fit(dataset.batch(batch_size), verbose=0, shuffle=False)
    return outcome(model.trainable_variables, model.optimizer)


class WeightsTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_vector_45_from_a_loop_of_ones_own(self, strategy):
        x, y = column([1.0, 1.0]), (column([0.0, 0.0]), column([3.0, 3.0]))
        weights = [np.array(w, "float32") for w in ([1.0, 1.0], [1.0, 0.0])]

        def own_mean(errors, weights):
            # 0/0 where a replica's only row weighs nothing: that must not poison.
            return tf.reduce_sum(errors * weights) / tf.reduce_sum(weights)

        micro_batches = [(x, y[k], weights[k]) for k in range(2)]
        weight, updates = by_hand(strategy, 0.1, micro_batches, own_mean)
        np.testing.assert_allclose(weight, 1.0, rtol=FLOAT32.rtol)
        self.assertEqual(updates, 1)

    @parameterized.parameters("default", "mirrored")
    def test_vector_45_from_a_train_step(self, strategy):
        rows = column([1.0] * 4), column([0.0, 0.0, 3.0, 3.0]), np.array([1.0, 1, 1, 0])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        weight, updates = under_fit(strategy, 0.1, rows, loss)
        np.testing.assert_allclose(weight, 1.0, rtol=FLOAT32.rtol)
        self.assertEqual(updates, 1)

    @parameterized.parameters("default", "mirrored")
    def test_vector_46_from_a_loop_of_ones_own(self, strategy):
        inputs = [column([1.0, 2.0, 3.0, 4.0]), column([10.0])]
        micro_batches = [
            (x, np.zeros_like(x), np.ones(len(x), "float32")) for x in inputs
        ]

        def own_mean(errors, weights):
            return tf.reduce_mean(errors)  # of no row on the second replica: 0/0

        weight, updates = by_hand(strategy, 0.001, micro_batches, own_mean)
        np.testing.assert_allclose(weight, 0.948, rtol=FLOAT32.rtol)
        self.assertEqual(updates, 1)

    @parameterized.parameters("default", "mirrored")
    def test_vector_46_from_a_train_step(self, strategy):
        x = column([1.0, 2.0, 3.0, 4.0, 10.0])
        weight, updates = under_fit(strategy, 0.001, (x, np.zeros_like(x)), "mse")
        np.testing.assert_allclose(weight, 0.948, rtol=FLOAT32.rtol)
        self.assertEqual(updates, 1)
