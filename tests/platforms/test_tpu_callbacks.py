"""The callbacks under an emulated TPUStrategy, through `fit`."""

import keras
import numpy as np
from absl.testing import parameterized

from keras_accum import callbacks
from tests import registry, tolerances, training
from tests.integration import scheduled
from tests.platforms import tpu_evidence as evidence


def _assert_large_batches(model, lists, **large_batches):
    training.assert_same_variables(
        model.variables,
        scheduled.large_batches(lists, **large_batches).variables,
        tolerances.BY_DTYPE["float32"],
    )


class ScheduleTest(parameterized.TestCase):
    @parameterized.product(name=["tpu_2", "tpu_8"], surface=["wrapper", "mixin"])
    def test_the_steps_of_each_epoch(self, name, surface):
        strategy = registry.STRATEGIES[name]()
        before = len(strategy.recorder.programs)
        model = scheduled.make_model(name, surface)
        seen = scheduled.fit(
            model,
            callbacks.PartialWindow("apply"),
            callbacks.AccumulationScheduler({1: 2, 3: 4}),
            epochs=4,
        )
        self.assertEqual(list(np.diff([0, *seen.by_epoch])), [10, 5, 5, 3])
        lists = [w for n in (1, 2, 2, 4) for w in scheduled.windows(10, n)]
        _assert_large_batches(model, lists)
        # The train step and the flush, once each.
        self.assertLen(strategy.recorder.programs[before:], 2)

    def test_the_steps_by_update(self):
        model = scheduled.make_model("tpu_2")
        schedule = callbacks.AccumulationScheduler({0: 1, 2: 3}, by="update")
        seen = scheduled.fit(model, schedule, batches=11)
        calls = 1 + np.flatnonzero(np.diff([0, *seen.by_batch]))
        self.assertEqual(list(calls), [1, 2, 5, 8, 11])

    def test_a_global_batch(self):
        model = scheduled.make_model("tpu_2")
        scheduler = callbacks.AccumulationScheduler.for_global_batch(32, 4)
        seen = scheduled.fit(model, scheduler, batches=8)
        self.assertEqual(scheduler.accumulation_steps, 4)
        self.assertEqual(model.optimizer.accumulation_steps, 4)
        self.assertEqual(seen.by_epoch, [2])

    def test_the_loss_scale(self):
        with registry.STRATEGIES["tpu_2"]().scope():
            model = training.network(
                evidence.accumulating("wrapper", 2, loss_scale=8.0)
            )
        x, y = training.rows(4 * training.ROWS)
        history = model.fit(
            training.batches(x, y, training.ROWS),
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[callbacks.LossScaleScheduler({0: 8.0, 1: 64.0})],
        )
        self.assertEqual(history.history["loss_scale"], [8.0, 64.0])
        expected = training.network(evidence.momentum())
        rows = 2 * training.ROWS
        expected.fit(training.batches(x, y, rows), epochs=2, shuffle=False, verbose=0)
        evidence.assert_as_large_batch(model, expected)

    @parameterized.parameters("apply", "carry", "drop")
    def test_what_becomes_of_an_open_window(self, policy):
        model = scheduled.make_model("tpu_2", steps=4)
        scheduled.fit(model, callbacks.PartialWindow(policy), epochs=2)
        epoch = scheduled.windows(10, 4)
        full = epoch[:2]
        lists = {
            "apply": [*epoch, *epoch],
            "drop": [*full, *full],
            # The third one is filled by the next epoch's first two micro-batches.
            "carry": [*full, [8, 9, 0, 1], *scheduled.windows(10, 4, start=2)],
        }
        _assert_large_batches(model, lists[policy])


class DecayTest(parameterized.TestCase):
    @parameterized.parameters("tpu_2", "tpu_8")
    def test_once_per_window(self, name):
        model = scheduled.make_model(name, steps=5)
        scheduled.fit(model, callbacks.PipelinedWeightDecay(0.1))
        lists = scheduled.windows(10, 5)
        _assert_large_batches(model, lists, weight_decay=0.1)
        # Without the decay it is another model.
        with self.assertRaises(AssertionError):
            _assert_large_batches(model, lists)


class MonitorTest(parameterized.TestCase):
    @parameterized.parameters("tpu_2", "tpu_8")
    def test_what_is_logged(self, name):
        model = scheduled.make_model(name, steps=5)
        monitor = callbacks.AccumulationMonitor()
        scheduled.fit(model, monitor, callbacks.GradientNoiseScale(), epochs=2)
        history = model.history.history
        self.assertEqual(history["updates"], [2, 4])
        self.assertEqual(history["global_batch_size"], [5 * training.ROWS] * 2)
        self.assertEqual(history["skipped_windows"], [0, 0])
        one = scheduled.make_model("default", steps=5)
        scheduled.fit(
            one,
            callbacks.AccumulationMonitor(),
            callbacks.GradientNoiseScale(),
            epochs=2,
        )
        expected = one.history.history
        np.testing.assert_allclose(
            history["gradient_norm"], expected["gradient_norm"], rtol=1e-5
        )
        # The same rows, in more and smaller micro-batches: another estimate.
        self.assertTrue(np.all(np.isfinite(history["gradient_noise_scale"])))

    def test_the_noise_scale_of_the_same_micro_batches(self):
        def noise(name, batch_size, steps):
            model = scheduled.make_model(name, steps=steps)
            x, y = training.rows(16)
            model.fit(
                training.batches(x, y, batch_size),
                shuffle=False,
                verbose=0,
                callbacks=[callbacks.GradientNoiseScale()],
            )
            return model.history.history["gradient_noise_scale"]

        # Four micro-batches of four rows: in time, or also over two replicas.
        np.testing.assert_allclose(
            noise("tpu_2", 8, 2), noise("default", 4, 4), rtol=1e-4
        )


class SkipSeenBatchesTest(parameterized.TestCase):
    def test_an_epoch_is_not_replayed(self):
        def interrupt(batch, logs=None):
            if batch == 6:
                raise InterruptedError

        model = scheduled.make_model("tpu_2", steps=5)
        skip = callbacks.SkipSeenBatches()
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        with self.assertRaises(InterruptedError):
            scheduled.fit(model, skip, stop)
        scheduled.fit(model, skip)
        _assert_large_batches(model, scheduled.windows(10, 5))


class RefusalTest(parameterized.TestCase):
    def test_a_plain_optimizer(self):
        with registry.STRATEGIES["tpu_2"]().scope():
            model = training.network(evidence.momentum())
        with self.assertRaisesRegex(ValueError, "PartialWindow needs an optimizer"):
            scheduled.fit(model, callbacks.PartialWindow())
