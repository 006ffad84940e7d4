"""The real `tf.distribute.TPUStrategy` on a machine without a TPU.

TPUStrategy asks its resolver which devices there are, and believes the answer: nothing
of TensorFlow is changed. Variables live on the CPU, and a step can be traced. To run
one fails, so that no test passes because the CPU did what a TPU was to do.
"""

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import tpu_system_metadata

MEMORY_BYTES = 16 << 30


class Resolver:
    """Answers as the resolver of one host with `num_replicas` TPU cores."""

    task_type = None
    task_id = None

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def get_tpu_system_metadata(self):
        kinds = [("CPU", 0), ("TPU_SYSTEM", 0)]
        kinds += [("TPU", core) for core in range(self.num_replicas)]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self.num_replicas,
            num_hosts=1,
            num_of_cores_per_host=self.num_replicas,
            topology=None,
            devices=[_device(kind, index) for kind, index in kinds],
        )

    def master(self, *args, **kwargs) -> str:
        return ""

    def cluster_spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec({})


def _device(kind: str, index: int):
    name = f"/job:localhost/replica:0/task:0/device:{kind}:{index}"
    return session._DeviceAttributes(name, kind, MEMORY_BYTES, 1 + index)


def strategy(num_replicas: int) -> tf.distribute.TPUStrategy:
    """A TPUStrategy that traces, and cannot run."""
    made = tf.distribute.TPUStrategy(Resolver(num_replicas))
    # One resource of all replicas exists on a TPU only; each has its own here.
    made._enable_packed_variable_in_eager_mode = False
    return made
