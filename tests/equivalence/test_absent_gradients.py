"""A variable without a gradient is treated as the plain optimizer treats None.

Whether it got one is known only when the window closes: micro steps of several traces,
with None at different places, meet in one window. The expected values come from the
plain optimizer, called with None where NumPy found no gradient in the window.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training
from tests.micro_steps import MicroSteps, Rows, spread

FLOAT32 = tolerances.BY_DTYPE["float32"]
SHAPES = [(2,), (3,), (2, 2)]
VALUES = [np.full(shape, 0.5, "float32") for shape in SHAPES]

# Which variables get a gradient, micro step by micro step, for windows of two.
PATTERNS = [
    [(1, 1, 0), (1, 0, 0)],  # the second in one of two, the third in none
    [(0, 0, 1), (0, 1, 1)],  # the first, which has momentum by now, in none
    [(1, 0, 0), (1, 1, 0)],  # the third again in none, now with momentum
]


class AccumulatingSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    pass


def options():
    return {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "use_ema": True,
        "ema_momentum": 0.5,
        "global_clipnorm": 1.0,
    }


def wrapped(steps):
    plain = keras.optimizers.SGD(**options())
    return keras_accum.AccumulationOptimizer(plain, steps)


def mixed_in(steps):
    return AccumulatingSGD(accumulation_steps=steps, **options())


def with_patterns(windows, strategy):
    """Random gradients, with None where a pattern says so."""
    patterns = [pattern for window in windows for pattern in window]
    taken = micro_steps.random_gradients(SHAPES, strategy, len(patterns))
    return [
        [
            g if is_given else None
            for g, is_given in zip(gradients, pattern, strict=True)
        ]
        for gradients, pattern in zip(taken, patterns, strict=True)
    ]


def assert_same(step, plain, taken, steps, tolerance=FLOAT32, shapes=SHAPES):
    """Compares with the plain optimizer: the variables, and all that it keeps."""
    windows = micro_steps.in_windows(taken, steps)
    updates = [micro_steps.combined(window, shapes) for window in windows]
    values = [np.full(shape, 0.5, "float32") for shape in shapes]
    variables, optimizer = micro_steps.plainly(plain, values, updates)
    training.assert_same_variables(step.variables, variables, tolerance)
    inner = step.optimizer.variables[: len(optimizer.variables)]
    training.assert_same_variables(inner, optimizer.variables, tolerance)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
class AbsentGradientsTest(parameterized.TestCase):
    @parameterized.parameters(*spread(wrapped, mixed_in))
    def test_patterns_that_meet_in_a_window(self, strategy, mode, make):
        step = MicroSteps(strategy, lambda: make(2), VALUES, mode)
        taken = with_patterns(PATTERNS, strategy)
        for gradients in taken:
            step(gradients)
        assert_same(step, keras.optimizers.SGD(**options()), taken, 2)

    @parameterized.parameters(
        ("default", "adam"),
        ("default", "adafactor"),
        ("default", "multi"),
        ("mirrored", "adam"),
        ("mirrored", "multi"),
    )
    def test_slots_of_other_optimizers(self, strategy, optimizer):
        if optimizer not in registry.OPTIMIZERS:
            return  # Keras before 3.11 has no MultiOptimizer.
        make = registry.OPTIMIZERS[optimizer]
        step = MicroSteps(
            strategy,
            lambda: keras_accum.AccumulationOptimizer(make(), 2),
            VALUES,
            mode="eager",
        )
        taken = with_patterns(PATTERNS, strategy)
        for gradients in taken:
            step(gradients)
        assert_same(step, make(), taken, 2, registry.tolerance(optimizer))

    @parameterized.parameters(("default", "graph"), ("mirrored", "eager"))
    def test_none_in_windows_of_one(self, strategy, mode):
        step = MicroSteps(strategy, lambda: wrapped(1), VALUES, mode)
        taken = with_patterns(PATTERNS, strategy)
        for gradients in taken:
            step(gradients)
        assert_same(step, keras.optimizers.SGD(**options()), taken, 1)

    @parameterized.parameters("default", "mirrored")
    def test_sparse_or_none(self, strategy):
        replicas = micro_steps.num_replicas(strategy)
        step = MicroSteps(strategy, lambda: wrapped(2), VALUES, mode="eager")
        taken = with_patterns(
            [[(1, 0, 1), (1, 1, 0)], [(1, 1, 0), (1, 0, 0)]], strategy
        )
        indices = np.stack([[r % 2, r % 2] for r in range(replicas)])
        taken[0][2] = Rows(indices, np.ones((replicas, 2, 2), "float32"))
        for gradients in taken:
            step(gradients)
        assert_same(step, keras.optimizers.SGD(**options()), taken, 2)

    @parameterized.parameters("default", "mirrored")
    def test_a_flushed_window_knows_what_it_did_not_get(self, strategy):
        step = MicroSteps(strategy, lambda: wrapped(4), VALUES, mode="eager")
        taken = with_patterns(PATTERNS, strategy)
        for gradients in micro_steps.in_windows(taken, 2):
            step(gradients[0])
            step(gradients[1])
            step.optimizer.flush()
        assert_same(step, keras.optimizers.SGD(**options()), taken, 2)

    @parameterized.parameters(*spread(2, 1))
    def test_alternating_calls_with_disjoint_variables(self, strategy, mode, steps):
        """As in a GAN: two calls for the critic, then one for the generator."""
        shapes = [(2,), (2,), (3,), (3,)]
        values = [np.full(shape, 0.5, "float32") for shape in shapes]
        step = MicroSteps(strategy, lambda: wrapped(steps), values, mode)
        taken = micro_steps.random_gradients(shapes, strategy, 6)

        def call(part):
            def on_every_replica(*gradients):
                def on_one_replica():
                    context = tf.distribute.get_replica_context()
                    own = [g[context.replica_id_in_sync_group] for g in gradients]
                    pairs = zip(own, step.variables[part], strict=True)
                    step.optimizer.apply_gradients(pairs)

                step.strategy.run(on_one_replica)

            if mode == "eager":
                return on_every_replica
            jit_compile = mode == "xla"
            return tf.function(
                on_every_replica, autograph=False, jit_compile=jit_compile
            )

        parts = [slice(0, 2), slice(2, 4)]
        calls = [call(part) for part in parts]
        # In windows of two: the critic alone, then both, in either order.
        for gradients, which in zip(taken, [0, 0, 1, 0, 0, 1], strict=True):
            calls[which](*gradients[parts[which]])
            gradients[parts[1 - which]] = [None, None]
        plain = keras.optimizers.SGD(**options())
        assert_same(step, plain, taken, steps, shapes=shapes)


def scale(value=0.25):
    """As float8 layers flag their scales: its gradient is its next value."""
    variable = keras.Variable(value)
    variable.overwrite_with_gradient = True
    return variable


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
class OverwrittenTest(parameterized.TestCase):
    @parameterized.parameters(*spread(wrapped, mixed_in))
    def test_the_largest_value_is_kept(self, strategy, mode, make):
        values = [VALUES[0], scale]
        step = MicroSteps(strategy, lambda: make(2), values, mode)
        replicas = micro_steps.num_replicas(strategy)
        taken = micro_steps.random_gradients([(2,)], strategy, 6)
        largest = []
        for window in range(3):
            # The largest comes from another micro step and replica each time, and
            # the scale falls as well as rises.
            given = 3.0 - window + np.arange(2.0 * replicas).reshape(2, replicas)
            given = np.roll(given, window + 1).astype("float32")
            largest.append(given.max())
            for position in range(2):
                taken[2 * window + position].append(given[position])
                step(taken[2 * window + position])
            self.assertEqual(step.values[1], largest[-1])
        windows = micro_steps.in_windows([g[:1] for g in taken], 2)
        updates = [
            [*micro_steps.combined(window, SHAPES[:1]), value]
            for window, value in zip(windows, largest, strict=True)
        ]
        plain = keras.optimizers.SGD(**options())
        variables, plain = micro_steps.plainly(plain, values, updates)
        training.assert_same_variables(step.variables, variables, FLOAT32)
        inner = step.optimizer.variables[: len(plain.variables)]
        training.assert_same_variables(inner, plain.variables, FLOAT32)

    @parameterized.parameters(*spread(2, 1))
    def test_absent_in_a_window_it_keeps_its_value(self, strategy, mode, steps):
        step = MicroSteps(strategy, lambda: wrapped(steps), [VALUES[0], scale], mode)
        replicas = micro_steps.num_replicas(strategy)
        [[gradient]] = micro_steps.random_gradients([(2,)], strategy, 1)
        seven = np.full(replicas, 7.0, "float32")
        for window in range(4):
            for position in range(steps):
                # In the last window only the first micro step has a value for it.
                is_given = window == 1 or (window == 3 and position == 0)
                step([gradient, seven + window if is_given else None])
            self.assertEqual(step.values[1], [0.25, 8.0, 8.0, 10.0][window])
        self.assertEqual(step.num_updates, 4)
