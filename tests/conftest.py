"""Sets up TensorFlow before anything uses it: logical CPUs, quiet start."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

from tests import registry

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * max(2, registry.NUM_REPLICAS),
)
# An emulated TPU core that waits for the others keeps a thread: eight, and to spare.
tf.config.threading.set_inter_op_parallelism_threads(32)


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Each test finds the float32 policy, and leaves no state behind."""
    keras.mixed_precision.set_dtype_policy("float32")
    yield
    keras.mixed_precision.set_dtype_policy("float32")
    keras.backend.clear_session(free_memory=False)  # collecting garbage is slow
