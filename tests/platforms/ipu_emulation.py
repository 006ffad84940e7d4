"""Graphcore's operations, emulated: a program on several replicas, a thread for each.

The threads run the same eager code. An operation that exchanges values waits for all of
them. The numbers are the published ones: a sum, a division by the number of replicas,
zeros while a window fills and its sum when it is full.
"""

import contextlib
import importlib.machinery
import sys
import threading
import types

import numpy as np
import tensorflow as tf

TIME_LIMIT_S = 60
PACKAGES = (
    "tensorflow.python.ipu",
    "tensorflow.python.ipu.ipu_strategy",
    "tensorflow.compiler.plugin",
    "tensorflow.compiler.plugin.poplar",
    "tensorflow.compiler.plugin.poplar.ops",
    "tensorflow.compiler.plugin.poplar.ops.gen_popops_ops",
    "tensorflow.compiler.plugin.poplar.ops.gen_poputil_ops",
)


class IPUStrategyV1(tf.distribute.OneDeviceStrategy):
    """To TensorFlow one replica, whatever the program has."""

    def __init__(self):
        super().__init__("CPU:0")


IPUStrategyV1.__module__ = "tensorflow.python.ipu.ipu_strategy"


class Emulation:
    """A program of some replicas, and the operations that it calls."""

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas
        self._barrier = threading.Barrier(num_replicas, timeout=TIME_LIMIT_S)
        self._values = [None] * num_replicas
        self._local = threading.local()
        self.called = []

    def run(self, program):
        """Runs `program(replica)` on every replica; returns what they return."""
        results, errors = [None] * self.num_replicas, []

        def on(replica):
            self._local.replica, self._local.windows = replica, {}
            try:
                results[replica] = program(replica)
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=on, args=(replica,), daemon=True)
            for replica in range(self.num_replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIME_LIMIT_S)
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (first or errors)[0]
        return results

    def _exchanged(self, x):
        self._values[self._local.replica] = np.asarray(x)
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # all have read before one writes again
        return values

    def ipu_cross_replica_sum(self, x, replica_group_size=None):
        """Of all replicas, or of consecutive groups."""
        self.called.append("ipu_cross_replica_sum")
        size = replica_group_size or self.num_replicas
        first = self._local.replica // size * size
        return tf.constant(sum(self._exchanged(x)[first : first + size]), x.dtype)

    def ipu_replication_normalise(self, x):
        """Divided by the number of replicas."""
        self.called.append("ipu_replication_normalise")
        return x / tf.cast(self.num_replicas, x.dtype)

    def ipu_stateful_gradient_accumulate(self, x, num_mini_batches, verify_usage=True):
        """One call in the program; its state is the thread's."""
        self.called.append("ipu_stateful_gradient_accumulate")
        window = self._local.windows.setdefault(num_mini_batches, [])
        window.append(x)
        if len(window) < num_mini_batches:
            return tf.zeros_like(x)
        total = tf.add_n(window)
        window.clear()
        return total

    @contextlib.contextmanager
    def installed(self):
        """While inside, Graphcore's packages can be imported."""
        before = {name: sys.modules.get(name) for name in PACKAGES}
        for name in PACKAGES:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        sys.modules[PACKAGES[1]].IPUStrategyV1 = IPUStrategyV1
        sys.modules[PACKAGES[5]].ipu_cross_replica_sum = self.ipu_cross_replica_sum
        for name in ("ipu_replication_normalise", "ipu_stateful_gradient_accumulate"):
            setattr(sys.modules[PACKAGES[6]], name, getattr(self, name))
        try:
            yield self
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
