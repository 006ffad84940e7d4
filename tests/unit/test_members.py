"""The members that answer at any time: before `build`, in eager and in a graph."""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import engine, registry
from tests.unit.test_arguments import make

NAN = float("nan")
TENSORS = (
    "position",
    "has_updated",
    "skipped_windows",
    "skipped_micro_batches",
    "loss_scale",
)
VARIABLES = ("iterations", "learning_rate")


def _read(optimizer):
    """Every member that a callback or a train step may ask for."""
    tensors = {name: getattr(optimizer, name) for name in TENSORS}
    variables = {
        name: tf.convert_to_tensor(getattr(optimizer, name)) for name in VARIABLES
    }
    return {**tensors, **variables, "steps": optimizer.accumulation_steps}


def _numbers(members):
    return {name: float(value) for name, value in members.items()}


FRESH = {
    "position": 0,
    "has_updated": 0,
    "skipped_windows": 0,
    "skipped_micro_batches": 0,
    "loss_scale": 8,
    "iterations": 0,
    "learning_rate": 1,
    "steps": 3,
}


@parameterized.product(
    strategy=["default", "one_device", "mirrored"], surface=["wrapper", "mixin"]
)
class MembersTest(parameterized.TestCase):
    def _make(self, strategy, surface, accumulation_steps=3):
        self.strategy = registry.STRATEGIES[strategy]()
        with self.strategy.scope():
            self.optimizer = make(surface, accumulation_steps, loss_scale=8)

    def _step(self, gradient=8.0):
        """One micro step in a graph; the optimizer is built on the first."""
        if not self.optimizer.built:
            with self.strategy.scope():
                self.variable = keras.Variable(0.0)

            def one_replica(gradient):
                own = tf.identity(gradient)  # plain Keras needs one on each replica too
                self.optimizer.apply_gradients([(own, self.variable)])

            @tf.function
            def step(gradient):
                self.strategy.run(one_replica, args=(gradient,))

            self.traced_step = step
        self.traced_step(tf.constant(gradient))

    def _from_everywhere(self):
        """What is read in eager, under the scope, in graphs and in the replicas."""
        read = functools.partial(_read, self.optimizer)
        yield read()
        with self.strategy.scope():
            yield read()
            yield tf.function(read)()
        yield tf.function(read)()
        yield from engine.on_replicas(self.strategy, read)

    def test_before_build(self, strategy, surface):
        self._make(strategy, surface)
        for members in self._from_everywhere():
            self.assertEqual(_numbers(members), FRESH)
        self.assertFalse(self.optimizer.built)

    def test_after_an_update_and_a_micro_step(self, strategy, surface):
        self._make(strategy, surface, accumulation_steps=1)
        self._step()
        self.optimizer.learning_rate = 0.25
        expected = {**FRESH, "steps": 1, "iterations": 1, "has_updated": 1}
        for members in self._from_everywhere():
            self.assertEqual(_numbers(members), {**expected, "learning_rate": 0.25})

    def test_tensors_are_scalars_of_their_dtype(self, strategy, surface):
        self._make(strategy, surface)
        for name, dtype in (
            ("position", "int32"),
            ("skipped_windows", "int32"),
            ("skipped_micro_batches", "int32"),
            ("has_updated", "bool"),
            ("loss_scale", "float32"),
        ):
            value = getattr(self.optimizer, name)
            self.assertEqual((value.dtype, value.shape), (dtype, ()))

    def test_a_function_traced_before_build_reads_no_constant(self, strategy, surface):
        self._make(strategy, surface)
        read = tf.function(
            lambda: [self.optimizer.position, self.optimizer.has_updated]
        )
        seen = [[int(each) for each in read()]]
        for _ in range(4):
            self._step()
            seen.append([int(each) for each in read()])
        self.assertEqual(seen, [[0, 0], [1, 0], [2, 0], [0, 1], [1, 0]])

    def test_has_updated_after_an_update_a_skip_and_a_reset(self, strategy, surface):
        self._make(strategy, surface, accumulation_steps=2)
        seen = []
        for gradient in (1.0, 1.0, 1.0, NAN, 1.0, 1.0):
            self._step(gradient)
            seen.append(bool(self.optimizer.has_updated))
        self.assertEqual(seen, [False, True, False, False, False, True])
        self.assertEqual(int(self.optimizer.skipped_windows), 1)
        self.assertEqual(int(np.asarray(self.optimizer.iterations.numpy())), 2)
        self.optimizer.reset()
        self.assertFalse(bool(self.optimizer.has_updated))
        self.assertEqual(int(self.optimizer.skipped_windows), 1)

    def test_has_updated_after_a_flush(self, strategy, surface):
        self._make(strategy, surface)
        self._step()
        self.optimizer.flush()
        self.assertTrue(bool(self.optimizer.has_updated))
        self.assertEqual(int(self.optimizer.position), 0)
        self.optimizer.flush()  # an empty window: nothing happens
        self.assertEqual(int(np.asarray(self.optimizer.iterations.numpy())), 1)
        self.assertTrue(bool(self.optimizer.has_updated))

    def test_flush_and_reset_before_build_do_nothing(self, strategy, surface):
        self._make(strategy, surface)
        self.optimizer.flush()
        self.optimizer.reset()
        self.assertEqual(_numbers(_read(self.optimizer)), FRESH)
        self.assertFalse(self.optimizer.built)

    def test_accumulation_steps_read_back_as_they_were_set(self, strategy, surface):
        self._make(strategy, surface)
        self._step()
        self.optimizer.accumulation_steps = 5
        self.assertEqual(self.optimizer.accumulation_steps, 5)
        self._step()
        self.assertEqual(int(self.optimizer.position), 2)
        self._step()
        self.assertTrue(bool(self.optimizer.has_updated))
