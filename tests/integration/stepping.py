"""Micro steps taken by hand, on the same rows whatever the number of replicas."""

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from tests import registry

ROWS = 8  # of a global micro-batch; every number of replicas in the suite divides it
SHAPES = ((3, 2), (2,))  # kernel and bias of `layered`


@keras.saving.register_keras_serializable(package="keras_accum_tests")
class AccumulatingSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    """The mixin, in a class that files can name."""


@keras.saving.register_keras_serializable(package="keras_accum_tests")
class AccumulatingAdam(keras_accum.AccumulationMixin, keras.optimizers.Adam):
    """The mixin over an optimizer with two slots per variable."""


def layered(strategy: str, optimizer, seed: int = 0):
    """A compiled model of one Dense layer, with its optimizer built."""
    with registry.STRATEGIES[strategy]().scope():
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer(), loss="mse")
        model.optimizer.build(model.trainable_variables)
    return model


def gradients(num_steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Of each row for each variable: `[step][variable]`, of shape (ROWS, *shape)."""
    random = np.random.RandomState(seed)
    return [
        [random.randn(ROWS, *shape).astype("float32") for shape in SHAPES]
        for _ in range(num_steps)
    ]


def micro_step(model, strategy: str, row_gradients, row_weights=None, scale=1.0):
    """One micro step; each replica has the (weighted) mean of its own rows, over R.

    Args:
        model: Of `layered`, under the same strategy.
        strategy: A name in the registry.
        row_gradients: For each variable (ROWS, *shape), or None.
        row_weights: (ROWS,), whose sum on a replica is its weight; None passes none.
        scale: What the loss was multiplied by.
    """
    distribution = registry.STRATEGIES[strategy]()
    num_replicas = distribution.num_replicas_in_sync
    share = ROWS // num_replicas

    def on_replica(rows, function):
        if rows is None:
            return None

        def local(context):
            first = context.replica_id_in_sync_group * share
            return tf.constant(function(slice(first, first + share)), tf.float32)

        return distribution.experimental_distribute_values_from_function(local)

    def mean_of(rows):
        return on_replica(
            rows,
            lambda own: (
                np.average(
                    rows[own],
                    axis=0,
                    weights=None if row_weights is None else row_weights[own],
                )
                * (scale / num_replicas)
            ),
        )

    def step(local_gradients, weight):
        pairs = zip(local_gradients, model.trainable_variables, strict=True)
        weighted = {} if weight is None else {"weight": weight}
        model.optimizer.apply_gradients(pairs, **weighted)

    local_gradients = [mean_of(rows) for rows in row_gradients]
    weight = on_replica(row_weights, lambda own: row_weights[own].sum())
    if strategy.startswith("tpu"):  # which runs no pure eager code
        step = tf.function(step, autograph=False)
    distribution.run(step, args=(local_gradients, weight))


def window_mean(steps, weights=None) -> list[np.ndarray | None]:
    """The mean over all rows of a window, in float64; None where no step has any."""
    means = []
    for rows in zip(*steps, strict=True):
        # A micro-batch without a gradient adds nothing, and counts in the mean.
        filled = [np.zeros((ROWS, 1)) if g is None else g for g in rows]
        per_step = [
            np.average(g, axis=0, weights=None if weights is None else weights[k])
            for k, g in enumerate(filled)
        ]
        sums = None if weights is None else [w.sum() for w in weights]
        if all(g is None for g in rows):
            means.append(None)
            continue
        shape = next(g.shape[1:] for g in rows if g is not None)
        stacked = np.stack([np.broadcast_to(g, shape) for g in per_step])
        means.append(np.average(stacked, axis=0, weights=sums))
    return means


def apply_plain(model, means) -> None:
    """One update of a plain optimizer with the mean gradient of a window."""
    pairs = [
        (tf.constant(mean, tf.float32), variable)
        for mean, variable in zip(means, model.trainable_variables, strict=True)
        if mean is not None
    ]
    model.optimizer.apply_gradients(pairs)
