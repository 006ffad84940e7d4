"""However a micro step is taken, the window trains as one large batch.

The expected values come from the plain optimizer on the large batch.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import micro_steps, registry, tolerances, training
from tests.micro_steps import PLACES, MicroSteps, spread

FLOAT32 = tolerances.BY_DTYPE["float32"]
STEPS, NUM_UPDATES = 3, 4


def options():
    return {"learning_rate": 0.05, "momentum": 0.9, "global_clipnorm": 0.7}


class AccumulatingSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    pass


SURFACES = {
    "wrapper": lambda steps: keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(**options()), steps
    ),
    "mixin": lambda steps: AccumulatingSGD(accumulation_steps=steps, **options()),
}


@functools.cache
def large_batch_weights():
    model = training.network(keras.optimizers.SGD(**options()))
    training.train(model, NUM_UPDATES, training.ROWS * STEPS)
    return model.get_weights()


class CustomTrainStep(keras.Sequential):
    """Takes its gradients itself, and hands them over by `apply`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit(model, **arguments):
    training.train(model, NUM_UPDATES, training.ROWS, STEPS, **arguments)


def train_on_batches(model):
    x, y = training.rows(NUM_UPDATES * STEPS * training.ROWS)
    for start in range(0, len(x), training.ROWS):
        rows = slice(start, start + training.ROWS)
        model.train_on_batch(x[rows], y[rows])


class KerasTest(parameterized.TestCase):
    """The ways that go through a compiled model."""

    @parameterized.parameters(
        ("default", "wrapper", "fit", {}),
        ("default", "mixin", "fit", {"steps_per_execution": 3}),
        ("default", "wrapper", "fit", {"steps_per_execution": 3, "jit_compile": True}),
        ("default", "wrapper", "train_on_batch", {}),
        ("default", "mixin", "train_on_batch", {"run_eagerly": True}),
        ("default", "wrapper", "train_on_batch", {"jit_compile": True}),
        ("default", "mixin", "train_step", {"jit_compile": True}),
        ("default", "wrapper", "train_step", {"run_eagerly": True}),
        ("mirrored", "mixin", "fit", {}),
        ("mirrored", "wrapper", "train_on_batch", {}),
        ("mirrored", "wrapper", "train_step", {}),
        ("mirrored", "mixin", "train_step", {"run_eagerly": True}),
    )
    def test_equals_the_large_batch(self, strategy, surface, way, arguments):
        with registry.STRATEGIES[strategy]().scope():
            model = training.network(SURFACES[surface](STEPS))
            if way == "train_step":
                model = CustomTrainStep(model.layers)
            model.compile(SURFACES[surface](STEPS), loss="mse", **arguments)
        if way == "train_on_batch":
            train_on_batches(model)
        else:
            fit(model)
        for value, expected in zip(
            model.get_weights(), large_batch_weights(), strict=True
        ):
            np.testing.assert_allclose(
                value, expected, rtol=FLOAT32.rtol, atol=FLOAT32.atol
            )
        updates = int(training.numbers(model.optimizer.iterations))
        self.assertEqual(updates, NUM_UPDATES)


SHAPES = [(2,), (2, 2)]
VALUES = [np.full(shape, 0.5, "float32") for shape in SHAPES]


def assert_equals_plain(variables, taken):
    updates = [
        micro_steps.combined(window, SHAPES)
        for window in micro_steps.in_windows(taken, STEPS)
    ]
    plain = keras.optimizers.SGD(**options())
    expected, _ = micro_steps.plainly(plain, VALUES, updates)
    training.assert_same_variables(variables, expected, FLOAT32)


class LoopTest(parameterized.TestCase):
    """The ways of a training loop of one's own."""

    @parameterized.parameters(
        *spread(
            ("wrapper", "apply_gradients", False),
            ("wrapper", "apply", True),
            ("mixin", "apply", False),
            ("mixin", "apply_gradients", True),
        )
    )
    def test_equals_the_large_batch(self, name, mode, case):
        """Not built, it is built by its first call, inside `strategy.run`."""
        surface, method, is_built = case
        strategy = registry.STRATEGIES[name]()
        with strategy.scope():
            variables = [keras.Variable(value) for value in VALUES]
            optimizer = SURFACES[surface](STEPS)
        if is_built:
            optimizer.build(variables)

        def micro_step(gradients):
            def on_one_replica():
                context = tf.distribute.get_replica_context()
                own = [g[context.replica_id_in_sync_group] for g in gradients]
                if method == "apply":
                    # Without variables, those that it was built for are meant.
                    return optimizer.apply(own, None if is_built else variables)
                return optimizer.apply_gradients(zip(own, variables, strict=True))

            strategy.run(on_one_replica)

        if mode != "eager":
            micro_step = tf.function(micro_step, jit_compile=mode == "xla")
        taken = micro_steps.random_gradients(SHAPES, name, 2 * STEPS)
        for gradients in taken:
            micro_step([tf.constant(g) for g in gradients])
        assert_equals_plain(variables, taken)

    @parameterized.parameters("wrapper", "mixin")
    def test_returns_the_number_of_updates(self, surface):
        optimizer, variable = SURFACES[surface](2), keras.Variable(1.0)
        returned = [
            int(optimizer.apply_gradients([(tf.constant(1.0), variable)]))
            for _ in range(5)
        ]
        self.assertEqual(returned, [0, 1, 1, 2, 2])

    @parameterized.parameters("default", "mirrored")
    def test_many_micro_steps_in_one_function(self, strategy):
        """A loop in the graph, as Keras has for `steps_per_execution`."""
        step = MicroSteps(strategy, lambda: SURFACES["wrapper"](STEPS), VALUES)
        taken = micro_steps.random_gradients(SHAPES, strategy, 2 * STEPS)

        @tf.function
        def loop(gradients):
            for index in tf.range(2 * STEPS):
                step([g[index] for g in gradients])

        loop([tf.stack(of_one) for of_one in zip(*taken, strict=True)])
        assert_equals_plain(step.variables, taken)


class LengthTest(parameterized.TestCase):
    @parameterized.product(place=PLACES, surface=["wrapper", "mixin"])
    def test_a_change_takes_effect_at_the_next_window(self, place, surface):
        strategy, mode = place
        step = MicroSteps(strategy, lambda: SURFACES[surface](3), VALUES, mode)
        optimizer = step.optimizer
        # What is set before a micro step; then the position and whether it updated.
        story = [
            (None, 1, False),
            (2, 2, False),  # this window keeps its length of 3
            (None, 0, True),
            (None, 1, False),
            (4, 0, True),  # set in mid-window: it closes after 2 all the same
            (1, 0, True),  # set between two windows: for the one that opens now
            (None, 0, True),
            (5, 1, False),
            (3, 2, False),
            (2, 3, False),  # of two changes in a window the last one counts
            (None, 4, False),
            (None, 0, True),
            (None, 1, False),
            (None, 0, True),
        ]
        taken = micro_steps.random_gradients(SHAPES, strategy, len(story))
        self.assertEqual(int(optimizer.position), 0)
        self.assertFalse(bool(optimizer.has_updated))
        num_updates, windows, window, length = 0, [], [], 3
        num_traces = None
        for (change, position, has_updated), gradients in zip(
            story, taken, strict=True
        ):
            if change is not None:
                optimizer.accumulation_steps = length = change
            self.assertEqual(optimizer.accumulation_steps, length)
            step(gradients)
            num_traces = num_traces or step.num_traces
            self.assertEqual(int(optimizer.position), position)
            self.assertEqual(bool(optimizer.has_updated), has_updated)
            num_updates += has_updated
            self.assertEqual(step.num_updates, num_updates)
            window.append(gradients)
            if has_updated:
                windows.append(window)
                window = []
        if mode != "eager":
            self.assertEqual(step.num_traces, num_traces)
        updates = [micro_steps.combined(window, SHAPES) for window in windows]
        plain = keras.optimizers.SGD(**options())
        expected, _ = micro_steps.plainly(plain, VALUES, updates)
        training.assert_same_variables(step.variables, expected, FLOAT32)

    @parameterized.parameters("default", "mirrored")
    def test_a_callback_changes_it_under_fit_without_a_retrace(self, strategy):
        num_traces = []

        class CountsTraces(keras.Sequential):
            def train_step(self, data):
                num_traces.append(None)
                return super().train_step(data)

        class Lengthens(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.optimizer.accumulation_steps = 2 * (epoch + 1)

        with registry.STRATEGIES[strategy]().scope():
            layers = training.network(SURFACES["wrapper"](2)).layers
            model = CountsTraces(layers)
            model.compile(SURFACES["wrapper"](2), loss="mse")
        batches = training.batches(*training.rows(8 * training.ROWS), training.ROWS)
        of_first_epoch = []

        class Watches(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                of_first_epoch.append(len(num_traces))

        model.fit(
            batches,
            epochs=2,
            callbacks=[Lengthens(), Watches()],
            verbose=0,
            shuffle=False,
        )
        self.assertEqual(int(training.numbers(model.optimizer.iterations)), 4 + 2)
        self.assertEqual(of_first_epoch[1], of_first_epoch[0])
