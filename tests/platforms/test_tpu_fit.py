"""Under an emulated TPUStrategy `fit` and a loop train as one large batch would."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import registry, tolerances, training
from tests.platforms import tpu_evidence as evidence

UPDATES, STEPS = 4, 3

# Each number of replicas meets each surface; each option is met twice.
CASES = [
    ("tpu_2", "wrapper", "plain"),
    ("tpu_2", "wrapper", "global_clipnorm"),
    ("tpu_2", "wrapper", "weight_decay"),
    ("tpu_2", "mixin", "ema"),
    ("tpu_2", "mixin", "clipnorm"),
    ("tpu_2", "wrapper", "ema_overwrite"),
    ("tpu_8", "mixin", "plain"),
    ("tpu_8", "mixin", "global_clipnorm"),
    ("tpu_8", "mixin", "weight_decay"),
    ("tpu_8", "wrapper", "ema"),
    ("tpu_8", "wrapper", "clipnorm"),
    ("tpu_8", "mixin", "ema_overwrite"),
    ("tpu_8", "wrapper", "clipvalue"),
]


def _tokens(num_rows):
    """Rows of tokens, some of which come twice in a row, and targets."""
    random = np.random.RandomState(0)
    x = random.randint(0, 6, (num_rows, 4)).astype("int32")
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")


def _embedding_model(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(6, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


class FitTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_as_one_large_batch(self, name, surface, option):
        strategy, options = registry.STRATEGIES[name](), registry.OPTIONS[option]
        before = len(strategy.recorder.programs)
        model = evidence.trained(
            name,
            lambda: evidence.accumulating(surface, STEPS, plain=options),
            UPDATES,
            STEPS,
        )
        expected = evidence.large_batch(UPDATES, STEPS, **options)
        evidence.assert_as_large_batch(model, expected)
        plain = model.optimizer.variables[: len(expected.optimizer.variables)]
        evidence.assert_same_on_replicas(strategy, [*model.variables, *plain])
        (program,) = strategy.recorder.programs[before:]
        evidence.assert_reduces_in_the_boundary(program)
        (emulation,) = strategy.recorder.emulations[before:]
        self.assertLen(emulation.num_exchanges, UPDATES * STEPS)
        evidence.assert_reduces_once_per_window(emulation, STEPS)

    @parameterized.parameters(
        ("tpu_2", "mixin"), ("tpu_8", "wrapper"), ("tpu_8", "mixin")
    )
    def test_rows_of_an_embedding(self, name, surface):
        x, y = _tokens(UPDATES * STEPS * training.ROWS)
        expected = _embedding_model(evidence.momentum())
        rows = training.ROWS * STEPS
        expected.fit(training.batches(x, y, rows), verbose=0, shuffle=False)
        with registry.STRATEGIES[name]().scope():
            model = _embedding_model(evidence.accumulating(surface, STEPS))
        model.fit(training.batches(x, y, training.ROWS), verbose=0, shuffle=False)
        evidence.assert_as_large_batch(model, expected)

    @parameterized.parameters(("tpu_2", "wrapper"), ("tpu_8", "mixin"))
    def test_windows_of_one(self, name, surface):
        model = evidence.trained(
            name, lambda: evidence.accumulating(surface, 1), UPDATES, 1
        )
        evidence.assert_as_large_batch(model, evidence.large_batch(UPDATES, 1))

    @parameterized.parameters("running_mean", "micro_step")
    def test_other_reductions(self, reduction):
        options = {"micro_reduction": "running_mean"}
        if reduction == "micro_step":
            options = {"reduce_every": "micro_step"}
        model = evidence.trained(
            "tpu_2",
            lambda: evidence.accumulating("wrapper", STEPS, **options),
            UPDATES,
            STEPS,
        )
        evidence.assert_as_large_batch(model, evidence.large_batch(UPDATES, STEPS))


class LoopTest(parameterized.TestCase):
    @parameterized.product(
        name=["tpu_2", "tpu_8"], surface=["wrapper", "mixin"], mode=["called", "passed"]
    )
    def test_a_loop_of_ones_own(self, name, surface, mode):
        strategy = registry.STRATEGIES[name]()
        with strategy.scope():
            model = training.network(evidence.accumulating(surface, STEPS))
            model.optimizer.build(model.trainable_variables)

        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss /= strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            model.optimizer.apply_gradients(pairs)

        # TPUStrategy runs no pure eager code: a tf.function calls `run`, or is passed.
        compiled = tf.function(on_replica, autograph=False)

        def step(x, y):
            strategy.run(on_replica if mode == "called" else compiled, args=(x, y))

        run = tf.function(step, autograph=False) if mode == "called" else step
        x, y = training.rows(UPDATES * STEPS * training.ROWS)
        own = training.ROWS // strategy.num_replicas_in_sync
        for start in range(0, len(x), training.ROWS):

            def of_replica(values, start=start):
                def local(context):
                    first = start + own * context.replica_id_in_sync_group
                    return tf.constant(values[first : first + own])

                return strategy.experimental_distribute_values_from_function(local)

            run(of_replica(x), of_replica(y))
        evidence.assert_as_large_batch(model, evidence.large_batch(UPDATES, STEPS))
        evidence.assert_same_on_replicas(strategy, model.variables)


class ScheduleTest(parameterized.TestCase):
    def test_a_learning_rate_schedule_counts_updates(self):
        def plain():
            schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
                [1, 2], [0.1, 0.03, 0.01]
            )
            return keras.optimizers.SGD(schedule, momentum=0.9)

        expected = training.train(
            training.network(plain()), UPDATES, training.ROWS * STEPS
        )
        model = evidence.trained(
            "tpu_2",
            lambda: evidence.keras_accum.AccumulationOptimizer(plain(), STEPS),
            UPDATES,
            STEPS,
        )
        training.assert_same_variables(
            model.variables, expected.variables, tolerances.BY_DTYPE["float32"]
        )
