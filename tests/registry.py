"""The strategies, optimizers and options that the suites run over.

A new strategy, optimizer or option is entered here once, and every suite has it.
"""

import functools
import os

import keras
import tensorflow as tf

from tests import tolerances
from tests.platforms import tpu_emulation

# MirroredStrategy shares its collectives within a process: one instance, of one size.
# Other sizes run in a process of their own, with this variable set.
NUM_REPLICAS = int(os.environ.get("KERAS_ACCUM_TEST_REPLICAS", "2"))


@functools.cache
def mirrored() -> tf.distribute.MirroredStrategy:
    """The one MirroredStrategy of this process."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM_REPLICAS)])


@functools.cache
def one_device() -> tf.distribute.OneDeviceStrategy:
    """A strategy of a single device."""
    return tf.distribute.OneDeviceStrategy("CPU:0")


@functools.cache
def emulated_tpu(num_replicas: int) -> tf.distribute.TPUStrategy:
    """The real TPUStrategy, whose steps run on the CPU: a thread for each replica."""
    return tpu_emulation.strategy(num_replicas)


STRATEGIES = {
    "default": tf.distribute.get_strategy,
    "one_device": one_device,
    "mirrored": mirrored,
    "tpu_2": functools.partial(emulated_tpu, 2),
    "tpu_4": functools.partial(emulated_tpu, 4),
    "tpu_8": functools.partial(emulated_tpu, 8),
}

# Slow learning rates: the tests compare ten updates, not a trained model.
OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.05, **kw),
    "momentum": lambda **kw: keras.optimizers.SGD(0.05, momentum=0.9, **kw),
    "nesterov": lambda **kw: keras.optimizers.SGD(
        0.05, momentum=0.9, nesterov=True, **kw
    ),
    "adadelta": lambda **kw: keras.optimizers.Adadelta(0.5, **kw),
    "adafactor": lambda **kw: keras.optimizers.Adafactor(0.01, **kw),
    "adagrad": lambda **kw: keras.optimizers.Adagrad(0.05, **kw),
    "adam": lambda **kw: keras.optimizers.Adam(0.01, **kw),
    "amsgrad": lambda **kw: keras.optimizers.Adam(0.01, amsgrad=True, **kw),
    "adamax": lambda **kw: keras.optimizers.Adamax(0.01, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(0.01, **{"weight_decay": 0.05, **kw}),
    "ftrl": lambda **kw: keras.optimizers.Ftrl(0.05, **kw),
    "lamb": lambda **kw: keras.optimizers.Lamb(0.01, **kw),
    "lion": lambda **kw: keras.optimizers.Lion(0.001, **kw),
    "muon": lambda **kw: keras.optimizers.Muon(0.01, **kw),
    "nadam": lambda **kw: keras.optimizers.Nadam(0.01, **kw),
    "rmsprop": lambda **kw: keras.optimizers.RMSprop(0.01, **kw),
}

if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free_adamw"] = lambda **kw: keras.optimizers.ScheduleFreeAdamW(
        0.01, **kw
    )

if hasattr(keras.optimizers, "MultiOptimizer"):

    def _multi(**kw):
        momentum = keras.optimizers.SGD(0.05, momentum=0.9, **kw)
        by_name = {".*bias": keras.optimizers.Adam(0.01, **kw)}
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(momentum, by_name)
        )

    OPTIMIZERS["multi"] = _multi

# Not optimizers of their own: base classes and wrappers.
NOT_INNER = {"Optimizer", "LossScaleOptimizer", "OptimizerMap"}

if keras.__version__.startswith("3.10."):
    # Its Muon asks the TensorFlow variable for a path, and fails by itself.
    del OPTIMIZERS["muon"]
    NOT_INNER.add("Muon")

EXACT = {"sgd", "momentum", "nesterov"}


def tolerance(optimizer: str) -> tolerances.Tolerance:
    """What two float32 trainings with this optimizer may differ by."""
    if optimizer in EXACT:
        return tolerances.BY_DTYPE["float32"]
    return tolerances.ADAPTIVE


# What an optimizer is constructed with, beside its learning rate.
OPTIONS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.7},
    "clipvalue": {"clipvalue": 0.2},
    "weight_decay": {"weight_decay": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema_overwrite": {
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 3,
    },
}

# How a step is run.
MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
}


def can_run(strategy: str, mode: str) -> bool:
    """Plain Keras fails to compile with XLA for several logical CPUs."""
    return not (strategy == "mirrored" and mode == "xla" and NUM_REPLICAS > 1)
