"""One small training, run as a large batch or accumulated, and compared."""

import keras
import numpy as np
import tensorflow as tf

from tests import tolerances

ROWS = 8  # of a global micro-batch; every number of replicas in the suite divides it
FEATURES = 6


def numbers(variable) -> np.ndarray:
    """A variable's value, whatever strategy it belongs to."""
    return np.asarray(variable.numpy())


def rows(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a regression; every row is different."""
    random = np.random.RandomState(seed)
    x = random.randn(num_rows, FEATURES).astype("float32")
    y = np.sin(x @ np.arange(1.0, FEATURES + 1.0))[:, None].astype("float32")
    return x, y


def batches(x, y, batch_size: int) -> tf.data.Dataset:
    """The rows in their order, in batches of static shape."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.batch(batch_size, drop_remainder=True)


def network(optimizer, seed: int = 0, constraint=None, **compile_arguments):
    """A compiled two-layer network; the same seed gives the same weights."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(5, activation="tanh", kernel_constraint=constraint),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, loss="mse", **compile_arguments)
    return model


def train(
    model, num_updates: int, rows_per_step: int, steps_per_update: int = 1, **fit
):
    """Fits `num_updates` windows, each on rows that no other has."""
    x, y = rows(num_updates * rows_per_step * steps_per_update)
    model.fit(batches(x, y, rows_per_step), verbose=0, **{"shuffle": False, **fit})
    return model


def assert_same_variables(actual, expected, tolerance: tolerances.Tolerance) -> None:
    """Compares two lists of variables, one by one."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            numbers(one),
            numbers(other),
            rtol=tolerance.rtol,
            atol=tolerance.atol,
            err_msg=getattr(other, "path", ""),
        )
