"""Under an emulated IPUStrategy: the published numbers, by Graphcore's operations."""

import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import graphcore, ops
from tests import refusals, tolerances, training
from tests.platforms.ipu_emulation import Emulation, IPUStrategyV1

STEPS, WINDOWS = 3, 4


def _gradients(replicas):
    random = np.random.RandomState(0)
    return random.randn(WINDOWS * STEPS, replicas, 2).astype("float32")


def _plain(updates):
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    for update in updates:
        optimizer.apply_gradients([(tf.constant(update, tf.float32), variable)])
    return variable


class OptimizerTest(refusals.RefusalCase):
    def _trained(self, replicas, gradients, weights=None, make=None, **options):
        """The variable of each replica of the program."""

        def program(replica):
            strategy = IPUStrategyV1()
            with strategy.scope():
                variable = keras.Variable([1.0, 2.0])
                inner = keras.optimizers.SGD(0.05, momentum=0.9)
                if make is None:
                    optimizer = keras_accum.AccumulationOptimizer(
                        inner, STEPS, **options
                    )
                else:
                    optimizer = make(inner)
                optimizer.build([variable])

            def step(gradient, weight):
                optimizer.apply_gradients([(gradient, variable)], weight=weight)

            for k, gradient in enumerate(gradients[:, replica]):
                weight = None if weights is None else tf.constant(weights[k, replica])
                strategy.run(step, args=(tf.constant(gradient), weight))
            return variable.numpy(), int(optimizer.skipped_windows)

        emulation = Emulation(replicas)
        with emulation.installed():
            return emulation.run(program), emulation

    @parameterized.parameters(1, 2, 4)
    def test_the_mean_over_windows_and_replicas(self, replicas):
        gradients = _gradients(replicas)
        results, emulation = self._trained(replicas, gradients)
        expected = _plain(gradients.reshape(WINDOWS, -1, 2).mean(axis=1))
        tolerance = tolerances.BY_DTYPE["float32"]
        for value, _ in results:
            np.testing.assert_allclose(value, expected.numpy(), atol=tolerance.atol)
        self.assertEqual(
            set(emulation.called),
            {"ipu_cross_replica_sum", "ipu_replication_normalise"},
        )

    def test_weights_of_rows(self):
        gradients = _gradients(2)
        weights = np.float32([[1, 5], [0, 2], [3, 1]] * WINDOWS)
        empty = gradients.copy()
        empty[1::STEPS, 0] = np.nan  # of no rows
        results, _ = self._trained(2, empty, weights)
        sums = (gradients * weights[..., None]).reshape(WINDOWS, -1, 2).sum(axis=1)
        expected = _plain(sums / weights.reshape(WINDOWS, -1).sum(axis=1)[:, None])
        for value, _ in results:
            np.testing.assert_allclose(value, expected.numpy(), atol=1e-6)

    @parameterized.parameters(0, 1)
    def test_a_bad_gradient_on_one_replica_skips_on_all(self, bad):
        gradients = _gradients(2)
        broken = gradients.copy()
        broken[STEPS + 1, bad] = np.inf
        results, _ = self._trained(2, broken)
        updates = gradients.reshape(WINDOWS, -1, 2).mean(axis=1)
        expected = _plain(np.delete(updates, 1, axis=0))
        for value, skipped in results:
            self.assertEqual(skipped, 1)
            np.testing.assert_allclose(value, expected.numpy(), atol=1e-6)

    @parameterized.parameters(2, 3)
    def test_graphcores_own_optimizers(self, replicas):
        gradients = _gradients(replicas)
        updates = gradients.reshape(WINDOWS, -1, 2).mean(axis=1)

        def cross_replica(inner):
            return graphcore.CrossReplicaGradientAccumulationOptimizerV2(
                inner, STEPS, reduction_method="mean"
            )

        results, _ = self._trained(replicas, gradients, make=cross_replica)
        for value, _ in results:
            np.testing.assert_allclose(value, _plain(updates).numpy(), atol=1e-6)

    @parameterized.parameters((4, 3), (1, 2))
    def test_vector_13(self, steps_per_execution, steps):
        emulation = Emulation(1)

        def program(_):
            with IPUStrategyV1().scope():
                inner = keras.optimizers.SGD()
                model = training.network(
                    keras_accum.AccumulationOptimizer(inner, steps),
                    steps_per_execution=steps_per_execution,
                    run_eagerly=True,
                )
            x, y = training.rows(8)
            model.fit(x, y, batch_size=2, verbose=0)

        with emulation.installed():
            self.assert_refused(
                ValueError,
                lambda: emulation.run(program),
                "`steps_per_execution` must be a multiple of `accumulation_steps`",
                f"={steps_per_execution}, accumulation_steps={steps}",
                f"Compile with steps_per_execution={steps}",
            )

    def test_executions_of_whole_windows_are_fine(self):
        emulation = Emulation(1)

        def program(_):
            with IPUStrategyV1().scope():
                inner = keras.optimizers.SGD()
                model = training.network(
                    keras_accum.AccumulationOptimizer(inner, 2),
                    steps_per_execution=4,
                    run_eagerly=True,
                )
            x, y = training.rows(8)
            model.fit(x, y, batch_size=2, verbose=0)
            return int(training.numbers(model.optimizer.iterations))

        with emulation.installed():
            self.assertEqual(emulation.run(program), [2])


class OperationsTest(refusals.RefusalCase):
    def _values(self, replicas, emitted, steps=10, start=10.0):
        emulation = Emulation(replicas)

        def program(replica):
            strategy, value = IPUStrategyV1(), start
            with strategy.scope():
                for _ in range(steps):
                    value += float(strategy.run(emitted, args=(replica,)))
            return value

        with emulation.installed():
            return emulation.run(program)

    def _accumulated(self, gradient):
        return ops.stateful_gradient_accumulate(gradient, 5, verify_usage=False)

    def test_vectors_1_to_3(self):
        one = tf.constant(1.0)

        def accumulate_then_reduce(_):
            return ops.cross_replica_sum(self._accumulated(one))

        def reduce_then_accumulate(_):
            return self._accumulated(ops.cross_replica_sum(one))

        def normalised(_):
            summed = ops.cross_replica_sum(one)
            return self._accumulated(ops.replication_normalise(summed))

        self.assertEqual(self._values(1, lambda _: self._accumulated(one)), [20])
        self.assertEqual(self._values(2, accumulate_then_reduce), [30, 30])
        self.assertEqual(self._values(2, reduce_then_accumulate), [30, 30])
        self.assertEqual(self._values(2, normalised), [20, 20])

    def test_vectors_8_and_9(self):
        def half(_):
            return ops.replication_normalise(tf.constant(1.0))

        def of_pairs(replica):
            return ops.cross_replica_sum(
                tf.constant(10.0**replica), replica_group_size=2
            )

        def mean(replica):
            return ops.cross_replica_mean(tf.constant(10.0**replica))

        self.assertEqual(self._values(2, half, 1, 0.0), [0.5, 0.5])
        self.assertEqual(self._values(4, of_pairs, 1, 0.0), [11, 11, 1100, 1100])
        self.assertEqual(self._values(2, mean, 1, 0.0), [5.5, 5.5])

    def test_groups_are_of_consecutive_replicas(self):
        self.assert_refused(
            ValueError,
            lambda: self._values(
                1, lambda _: ops.cross_replica_sum(tf.constant(1.0), [[0]])
            ),
            "`group_assignment` must be None on an IPU",
            "group_assignment=[[0]]",
            "Pass replica_group_size",
        )


PROBE = """
import sys
import {module}
names = [n for n in sys.modules if n.startswith({package!r})]
print(len(names))
"""


class ImportTest(parameterized.TestCase):
    def _imported(self, module, folder):
        root = pathlib.Path(keras_accum.__file__).parents[1]
        path = os.pathsep.join([str(folder), str(root)])
        finished = subprocess.run(
            [
                sys.executable,
                "-c",
                PROBE.format(module=module, package="tensorflow.python.ipu"),
            ],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return int(finished.stdout.strip().splitlines()[-1])

    def test_without_an_ipu_nothing_of_it_is_imported(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self._imported("keras_accum", folder), 0)

    def test_a_package_that_imports_it_is_found_out(self):
        with tempfile.TemporaryDirectory() as folder:
            source = (
                "import sys, types\n"
                "sys.modules['tensorflow.python.ipu'] = types.ModuleType('ipu')\n"
                "import tensorflow.python.ipu\n"
            )
            pathlib.Path(folder, "greedy.py").write_text(source, encoding="utf-8")
            self.assertEqual(self._imported("greedy", folder), 1)
