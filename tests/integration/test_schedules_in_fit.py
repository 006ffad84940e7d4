"""Accumulation steps that follow a schedule, through `fit`."""

import keras
import numpy as np
from absl.testing import parameterized

from keras_accum.callbacks import AccumulationScheduler, PartialWindow
from tests import registry, tolerances, training
from tests.integration.scheduled import (
    fit,
    large_batches,
    make_model,
    momentum,
    windows,
)


class AccumulationSchedulerTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        surface=["wrapper", "mixin"],
        mode=["graph", "eager"],
    )
    def test_lightnings_schedule(self, strategy, surface, mode):
        """Vector 40: {1: 2, 3: 4} over 4 epochs of 10 batches, leftovers applied."""
        model = make_model(strategy, surface, **registry.MODES[mode])
        seen = fit(
            model,
            PartialWindow("apply"),
            AccumulationScheduler({1: 2, 3: 4}),
            epochs=4,
        )
        self.assertEqual(list(np.diff([0, *seen.by_epoch])), [10, 5, 5, 3])
        lists = [w for n in (1, 2, 2, 4) for w in windows(10, n)]
        training.assert_same_variables(
            model.variables,
            large_batches(lists).variables,
            tolerances.BY_DTYPE["float32"],
        )
        if mode == "graph":
            self.assertEqual(model.num_traces, _num_traces_of_keras(strategy))

    def test_optax_schedule_by_update(self):
        """Vector 36: 1 while updates < 2, then 3: updates on calls 1, 2, 5, 8, 11."""
        for schedule in ({0: 1, 2: 3}, lambda updates: 1 if updates < 2 else 3):
            model = make_model()
            seen = fit(model, AccumulationScheduler(schedule, by="update"), batches=11)
            calls = 1 + np.flatnonzero(np.diff([0, *seen.by_batch]))
            self.assertEqual(list(calls), [1, 2, 5, 8, 11])
            self.assertEqual(model.num_traces, _num_traces_of_keras("default"))

    def test_a_schedule_in_the_threads(self):
        """Vector 44: 8 rows one at a time, N=2 in epoch 0, then 4: 4 + 2 updates."""
        model = make_model(steps=2)
        traces = []
        seen = fit(
            model,
            AccumulationScheduler({0: 2, 1: 4}),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: traces.append(model.num_traces)
            ),
            batches=8,
            epochs=2,
        )
        self.assertEqual(seen.by_epoch, [4, 6])
        self.assertLen(set(traces), 1)  # none after the first step

    @parameterized.parameters("dict", "function")
    def test_a_model_that_was_fitted_with_windows_of_one(self, kind):
        schedule = {0: 1, 1: 5} if kind == "dict" else lambda epoch: 5 if epoch else 1
        model = make_model()
        fit(model)
        seen = fit(model, AccumulationScheduler(schedule), epochs=2)
        self.assertEqual(list(np.diff([10, *seen.by_epoch])), [10, 2])

    def test_the_last_value_and_the_optimizers_own_are_kept(self):
        model = make_model(steps=5)
        seen = fit(model, AccumulationScheduler({1: 2}), epochs=3)
        self.assertEqual(list(np.diff([0, *seen.by_epoch])), [2, 5, 5])
        model = make_model(steps=5)
        seen = fit(model, AccumulationScheduler({1: 2}), epochs=4, initial_epoch=2)
        self.assertEqual(seen.by_epoch, [5, 10])

    def test_an_open_window_keeps_its_length(self):
        model = make_model(steps=4)
        seen = fit(model, AccumulationScheduler({0: 4, 1: 1}), batches=6, epochs=2)
        # Six micro steps: one window and two of the next one, which two more fill.
        self.assertEqual(seen.by_batch, [0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 5, 6])

    def test_within_one_execution_nothing_is_set(self):
        model = make_model(steps_per_execution=5)
        schedule = AccumulationScheduler({0: 1, 2: 5}, by="update")
        seen = fit(model, schedule, batches=20)
        # Five updates of one micro step before it is looked at.
        self.assertEqual(seen.by_batch, [5, 6, 7, 8])

    def test_it_is_logged(self):
        model = make_model()
        fit(model, AccumulationScheduler({0: 2, 1: 4}), epochs=2)
        self.assertEqual(model.history.history["accumulation_steps"], [2, 4])

    def test_a_global_batch_on_the_replicas_there_are(self):
        for strategy, steps in (("default", 4), ("mirrored", 2)):
            model = make_model(strategy)
            scheduler = AccumulationScheduler.for_global_batch(32, 8)
            seen = fit(model, scheduler, batches=8)
            self.assertEqual(scheduler.accumulation_steps, steps)
            self.assertEqual(scheduler.global_batch_size, 32)
            self.assertEqual(seen.by_epoch, [8 // steps])


def _num_traces_of_keras(strategy):
    """How often Keras traces the step of a plain optimizer: once more at the start."""
    replicas = registry.STRATEGIES[strategy]().num_replicas_in_sync
    model = make_model(strategy)
    with registry.STRATEGIES[strategy]().scope():
        model.compile(momentum(), "mse")
    fit(model, epochs=2)
    assert model.num_traces >= replicas
    return model.num_traces
