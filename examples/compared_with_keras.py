"""Measures keras_accum and Keras's own gradient accumulation against the large batch.

Each case is run three times: with the plain optimizer on the large batch, with
`gradient_accumulation_steps`, and with keras_accum. The table shows by how much the
weights then differ from the large batch's (0 is right, 1e-7 is rounding), or the error
that a case ended with.

    python examples/compared_with_keras.py
"""

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the table is easily lost in logs

import keras
import numpy as np
import tensorflow as tf
from absl import app

import keras_accum

N = 4  # accumulation steps
ROWS = 8  # of a micro-batch, over all replicas
UPDATES = 10

Optimizer = Any  # a `keras.optimizers.Optimizer`
Values = list[np.ndarray]
# Makes the optimizer of a case, given the arguments of the plain one.
Make = Callable[..., Optimizer]


def large_batch(**arguments: Any) -> Optimizer:
    """The plain optimizer, which the other two are to equal."""
    return keras.optimizers.SGD(**arguments)


def with_keras(**arguments: Any) -> Optimizer:
    """Keras's own way."""
    return keras.optimizers.SGD(**arguments, gradient_accumulation_steps=N)


def with_keras_accum(**arguments: Any) -> Optimizer:
    """This library's."""
    return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(**arguments), N)


@functools.cache
def two_replicas() -> tf.distribute.MirroredStrategy:
    """Two logical CPUs; TensorFlow wants one instance in a process."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def values(variables: Sequence[Any]) -> Values:
    """What variables hold, whatever strategy they belong to."""
    return [np.asarray(variable.numpy()) for variable in variables]


def fit(make: Make, num_windows: float, on_replicas: bool, **arguments: Any) -> Values:
    """Trains a small network with `fit`, for one epoch."""
    is_large = make is large_batch
    strategy = tf.distribute.get_strategy()
    if on_replicas and not is_large:
        strategy = two_replicas()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(make(**arguments), "mse", jit_compile=False)
    num_rows = int(num_windows * N * ROWS)
    x = np.random.default_rng(0).normal(size=(num_rows, 6)).astype("float32")
    y = np.sin(x @ np.arange(1.0, 7.0))[:, None].astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y))
    model.fit(data.batch(N * ROWS if is_large else ROWS), verbose=0)
    if hasattr(model.optimizer, "flush"):
        model.optimizer.flush()
    return values(model.trainable_variables)


def fit_on_two_replicas(make: Make) -> Values:
    """`fit` under MirroredStrategy."""
    return fit(make, UPDATES, on_replicas=True, learning_rate=0.05, momentum=0.9)


def schedule(make: Make) -> Values:
    """A learning rate that falls after the third update."""
    falling = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])
    return fit(make, UPDATES, on_replicas=False, learning_rate=falling)


def average(make: Make) -> Values:
    """A moving average of the weights, taken over at the end."""
    average = {"use_ema": True, "ema_momentum": 0.8}
    return fit(make, UPDATES, on_replicas=False, learning_rate=0.05, **average)


def leftover(make: Make) -> Values:
    """Two windows and a half: the half is a smaller batch, which `flush` applies."""
    return fit(make, 2.5, on_replicas=False, learning_rate=0.05, momentum=0.9)


def clipping_on_two_replicas(make: Make) -> Values:
    """Replicas 0 and 1 have gradients 10 and -9.5; their mean is within the norm."""
    if make is large_batch:
        variable, optimizer = keras.Variable(0.0), make(learning_rate=1.0, clipnorm=1.0)
        optimizer.apply_gradients([(tf.constant(0.25), variable)])
        return values([variable])
    with two_replicas().scope():
        variable, optimizer = keras.Variable(0.0), make(learning_rate=1.0, clipnorm=1.0)
        optimizer.build([variable])
    for _ in range(N):
        run_on_two_replicas(optimizer, variable, 10.0, -9.5)
    return values([variable])


def run_on_two_replicas(
    optimizer: Optimizer, variable: Any, first: float, second: float
) -> None:
    """One micro step with a gradient for each replica, of a loss that carries 1/2."""
    gradient = two_replicas().experimental_distribute_values_from_function(
        lambda context: tf.constant([first, second][context.replica_id_in_sync_group])
    )
    two_replicas().run(
        lambda g: optimizer.apply_gradients([(g / 2.0, variable)]), args=(gradient,)
    )


def saved_in_mid_window(make: Make) -> Values:
    """Saved and restored after half a window, on replicas whose gradients differ."""
    if make is large_batch:
        variable, optimizer = keras.Variable(0.0), make(learning_rate=1.0)
        optimizer.apply_gradients([(tf.constant(2.0), variable)])
        return values([variable])

    def state() -> tuple[Any, Optimizer, tf.train.Checkpoint]:
        with two_replicas().scope():
            variable, optimizer = keras.Variable(0.0), make(learning_rate=1.0)
            optimizer.build([variable])
        checkpoint = tf.train.Checkpoint(variable=variable, optimizer=optimizer)
        return variable, optimizer, checkpoint

    variable, optimizer, checkpoint = state()
    for _ in range(N // 2):
        run_on_two_replicas(optimizer, variable, 1.0, 3.0)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(f"{folder}/checkpoint")
        variable, optimizer, checkpoint = state()
        checkpoint.restore(path).assert_existing_objects_matched()
    for _ in range(N // 2):
        run_on_two_replicas(optimizer, variable, 1.0, 3.0)
    return values([variable])


def last_gradient_is_none(make: Make) -> Values:
    """A weight whose loss does not take part in the last micro-batch of the window."""
    always, often = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = make(learning_rate=1.0)
    one, absent = tf.constant(1.0), None
    if make is large_batch:
        optimizer.apply_gradients([(one, always), (tf.constant(0.75), often)])
    else:
        for gradient in [one] * (N - 1) + [absent]:
            optimizer.apply_gradients([(one, always), (gradient, often)])
    return values([always, often])


def float16(make: Make) -> Values:
    """A float16 weight with gradients of 30,000: four of them exceed float16."""
    variable = keras.Variable(0.0, dtype="float16")
    optimizer = make(learning_rate=2.0**-14)
    for _ in range(1 if make is large_batch else N):
        optimizer.apply_gradients([(tf.constant(30000.0, tf.float16), variable)])
    return values([variable])


CASES = {
    "fit on two replicas": fit_on_two_replicas,
    "learning rate schedule": schedule,
    "moving average of the weights": average,
    "half a window left over": leftover,
    "clipping, two replicas": clipping_on_two_replicas,
    "saved in mid-window, two replicas": saved_in_mid_window,
    "last gradient of a window is None": last_gradient_is_none,
    "float16 weights": float16,
}


def difference(case: Callable[[Make], Values], make: Make) -> float | str:
    """The largest difference of a weight from the large batch's, or the error."""
    expected = case(large_batch)
    try:
        actual = case(make)
    except Exception as error:
        return type(error).__name__
    with np.errstate(invalid="ignore"):
        return max(
            float(np.abs(a.astype("float32") - b.astype("float32")).max())
            for a, b in zip(actual, expected, strict=True)
        )


def compare() -> dict[str, tuple[float | str, float | str]]:
    """For each case, what Keras's own way and keras_accum end with."""
    return {
        name: (difference(case, with_keras), difference(case, with_keras_accum))
        for name, case in CASES.items()
    }


def main(_: Sequence[str]) -> int:
    """Prints the table; 1 if keras_accum differs from a large batch."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    results = compare()
    print(f"Keras {keras.__version__}, TensorFlow {tf.__version__}, N = {N}.")
    print("Largest difference of a weight from the large batch's:\n")
    print(f"{'':35}{'Keras':>14}{'keras_accum':>14}")
    for name, columns in results.items():
        cells = [c if isinstance(c, str) else f"{c:.1e}" for c in columns]
        print(f"{name:35}{cells[0]:>14}{cells[1]:>14}")
    is_exact = all(
        not isinstance(ours, str) and ours < 1e-6 for _, ours in results.values()
    )
    return 0 if is_exact else 1


if __name__ == "__main__":
    app.run(main)
