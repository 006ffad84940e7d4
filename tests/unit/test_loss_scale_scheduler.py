"""The loss scale's scheduler, hook by hook: what it sets, logs and refuses."""

import contextlib
import io
import types

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import keras_accum
from keras_accum.callbacks import LossScaleScheduler
from tests import refusals, training
from tests.unit.test_arguments import MixedSGD, make

NEEDED = "LossScaleScheduler needs an optimizer of keras_accum with a loss scale"


def _begin(scheduler, optimizer):
    """Puts the scheduler where `fit` would, at the beginning of a training."""
    scheduler.set_model(
        types.SimpleNamespace(optimizer=optimizer, steps_per_execution=1)
    )
    scheduler.on_train_begin()
    if scheduler.by == "update":
        scheduler.on_epoch_begin(0)
    return scheduler


class SchedulerCase(refusals.RefusalCase):
    def _started(self, schedule, surface="wrapper", loss_scale=8.0, steps=2, **options):
        self.variable = keras.Variable(0.0)
        self.optimizer = make(surface, steps, loss_scale=loss_scale)
        self.optimizer.build([self.variable])
        return _begin(LossScaleScheduler(schedule, **options), self.optimizer)

    def _scale(self):
        return float(self.optimizer.loss_scale)

    def _epochs(self, scheduler, numbers):
        """The scale of each epoch."""
        scales = []
        for epoch in numbers:
            scheduler.on_epoch_begin(epoch)
            scales.append(self._scale())
            scheduler.on_epoch_end(epoch, {})
        return scales

    def _micro_steps(self, scheduler, gradients):
        """The scale after each micro step."""
        scales = []
        for k, gradient in enumerate(gradients):
            scaled = self.optimizer.scale_loss(tf.constant(gradient))
            self.optimizer.apply_gradients([(scaled, self.variable)])
            scheduler.on_train_batch_end(k)
            scales.append(self._scale())
        return scales


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class ByEpochTest(SchedulerCase):
    def test_a_dict_keeps_the_last_entry(self, surface):
        scheduler = self._started({1: 16, 3: 4.0}, surface)
        scales = self._epochs(scheduler, range(5))
        self.assertEqual(scales, [8, 16, 16, 4, 4])

    def test_a_dict_in_any_order_and_from_a_later_epoch(self, surface):
        scheduler = self._started({4: 32, 0: 2, 2: 4}, surface)
        self.assertEqual(self._epochs(scheduler, [3, 4, 5]), [4, 32, 32])

    def test_a_function_of_the_epoch(self, surface):
        scheduler = self._started(lambda epoch: 2.0 ** (epoch + 5), surface)
        self.assertEqual(self._epochs(scheduler, range(3)), [32, 64, 128])

    def test_a_function_of_the_epoch_and_the_scale(self, surface):
        seen = []

        def schedule(epoch, scale):
            seen.append((epoch, scale))
            return scale * (4 if epoch < 2 else 0.5)

        scales = self._epochs(self._started(schedule, surface), range(4))
        self.assertEqual(scales, [32, 128, 64, 32])
        self.assertEqual(seen, [(0, 8.0), (1, 32.0), (2, 128.0), (3, 64.0)])
        self.assertEqual({type(scale) for _, scale in seen}, {float})

    def test_a_second_argument_with_a_default_is_none_of_ours(self, surface):
        scheduler = self._started(lambda epoch, base=3.0: base + epoch, surface)
        self.assertEqual(self._epochs(scheduler, range(2)), [3, 4])

    def test_numbers_of_numpy_and_a_schedule_of_keras(self, surface):
        for schedule, expected in (
            (lambda epoch: np.float32(epoch + 1), [1, 2, 3]),
            (
                keras.optimizers.schedules.PiecewiseConstantDecay(
                    [0, 1], [9.0, 5.0, 2.0]
                ),
                [9, 5, 2],
            ),
        ):
            scheduler = self._started(schedule, surface)
            self.assertEqual(self._epochs(scheduler, range(3)), expected)

    def test_an_open_window_keeps_its_scale(self, surface):
        scheduler = self._started({0: 16, 1: 32}, surface)
        scheduler.on_epoch_begin(0)
        self._micro_steps(scheduler, [1.0])
        scheduler.on_epoch_begin(1)
        self.assertEqual(self._scale(), 16)
        self.assertEqual(self._micro_steps(scheduler, [3.0, 1.0]), [32, 32])
        self.assertEqual(float(self.variable.numpy()), -2)

    def test_it_starts_from_a_scale_that_waits_for_its_window(self, surface):
        scheduler = self._started({5: 64}, surface)
        self._micro_steps(scheduler, [1.0])
        self.optimizer.loss_scale = 32  # for the next window
        _begin(scheduler, self.optimizer)
        self.assertEqual(self._micro_steps(scheduler, [1.0]), [32])

    def test_updates_set_nothing(self, surface):
        scheduler = self._started({0: 16, 1: 32}, surface)
        scheduler.on_epoch_begin(0)
        self.assertEqual(self._micro_steps(scheduler, [1.0] * 5), [16] * 5)


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class ByUpdateTest(SchedulerCase):
    def test_a_dict_counts_updates_not_micro_steps(self, surface):
        scheduler = self._started({0: 16, 2: 32}, surface, by="update")
        self.assertEqual(self._scale(), 16)
        scales = self._micro_steps(scheduler, [1.0] * 6)
        self.assertEqual(scales, [16, 16, 16, 32, 32, 32])

    def test_a_function_is_asked_once_for_each_update(self, surface):
        seen = []

        def schedule(update, scale):
            seen.append((update, scale))
            return scale * 2

        scheduler = self._started(schedule, surface, by="update")
        scales = self._micro_steps(scheduler, [1.0] * 5)
        self.assertEqual(scales, [16, 32, 32, 64, 64])
        self.assertEqual(seen, [(0, 8), (1, 16), (2, 32)])

    def test_a_skipped_window_is_no_update(self, surface):
        scheduler = self._started({0: 4, 1: 16, 2: 64}, surface, by="update")
        gradients = [1.0, float("nan"), 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]
        scales = self._micro_steps(scheduler, gradients)
        self.assertEqual(scales, [4, 4, 4, 16, 16, 16, 16, 64])

    def test_a_training_that_goes_on_starts_from_its_updates(self, surface):
        scheduler = self._started({0: 16, 2: 32}, surface, by="update")
        self._micro_steps(scheduler, [1.0] * 4)
        self.optimizer.loss_scale = 8
        _begin(scheduler, self.optimizer)
        self.assertEqual(self._scale(), 32)

    def test_epochs_set_nothing(self, surface):
        scheduler = self._started({0: 16, 1: 32}, surface, by="update")
        self.assertEqual(self._epochs(scheduler, range(3)), [16] * 3)


class LogsTest(SchedulerCase):
    @parameterized.parameters("epoch", "update")
    def test_the_scale_stands_in_the_logs_of_an_epoch(self, by):
        scheduler = self._started({0: 32}, by=by)
        scheduler.on_epoch_begin(0)
        logs = {"loss": 1.0}
        scheduler.on_epoch_end(0, logs)
        self.assertEqual(logs, {"loss": 1.0, "loss_scale": 32.0})
        self.assertIs(type(logs["loss_scale"]), float)
        scheduler.on_epoch_end(0)  # without logs

    def test_verbose_says_when_and_what(self):
        scheduler = self._started({1: 16.0}, verbose=1)
        said = self._said(lambda: self._epochs(scheduler, range(2)))
        self.assertLen(said, 1)
        self.assertIn("LossScaleScheduler: loss_scale is 16.0 from epoch 1", said[0])

    def _said(self, act):
        """What is printed where logging is interactive, as it is by default."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            act()
        return printed.getvalue().split("\n\n")

    def test_verbose_is_logged_where_logging_is_not_interactive(self):
        scheduler = self._started({1: 16.0}, verbose=1)
        keras.config.disable_interactive_logging()
        self.addCleanup(keras.config.enable_interactive_logging)
        with self.assertLogs(logging.get_absl_logger(), "INFO") as caught:
            self._epochs(scheduler, range(2))
        self.assertLen(caught.output, 1)
        self.assertIn("loss_scale is 16.0 from epoch 1 on", caught.output[0])

    def test_verbose_counts_updates(self):
        def act():
            scheduler = self._started(lambda k: 2.0**k, by="update", verbose=1)
            self._micro_steps(scheduler, [1.0] * 5)

        numbers = [each.split("update ")[1].split()[0] for each in self._said(act)]
        self.assertEqual(numbers, ["0", "1", "2"])

    def test_by_default_it_says_nothing(self):
        scheduler = self._started({0: 16, 1: 32})
        self.assertEqual(self._said(lambda: self._epochs(scheduler, range(3))), [""])


class RefusedScheduleTest(SchedulerCase):
    def test_what_is_neither_callable_nor_dict(self):
        for value in (8.0, None, "cosine", [(0, 8.0)], {0}):
            self.assert_refused(
                TypeError,
                lambda v=value: LossScaleScheduler(v),
                "`schedule` must be a callable or a dict {count: value}",
                f"schedule={value!r}",
            )

    def test_an_empty_dict(self):
        self.assert_refused(
            ValueError,
            lambda: LossScaleScheduler({}),
            "`schedule` must have an entry",
            "schedule={}",
            "Write for example",
        )

    def test_a_key_that_counts_nothing_is_named(self):
        for key in (-1, 1.0, "1", True, None, (0, 1)):
            self.assert_refused(
                ValueError,
                lambda k=key: LossScaleScheduler({0: 8.0, k: 8.0}),
                "`schedule` must have integers >= 0 as keys",
                f"key {key!r} in schedule=",
            )

    def test_a_value_that_is_no_scale_is_named_with_its_entry(self):
        for error, value in (
            (ValueError, 0),
            (ValueError, -8.0),
            (ValueError, float("inf")),
            (ValueError, float("nan")),
            (TypeError, None),
            (TypeError, "8"),
            (TypeError, True),
            (TypeError, [8.0, 8.0]),
        ):
            self.assert_refused(
                error,
                lambda v=value: LossScaleScheduler({0: 8.0, 3: v}),
                "`schedule[3]` must be a finite number > 0",
                f"schedule[3]={value!r}",
            )

    def test_what_it_is_by(self):
        for value in ("batch", "", None, 1):
            self.assert_refused(
                ValueError,
                lambda v=value: LossScaleScheduler({0: 8.0}, by=v),
                "`by` must be one of 'epoch', 'update'",
                f"by={value!r}",
            )

    @parameterized.parameters("epoch", "update")
    def test_a_value_that_a_function_returns_is_named_with_its_count(self, by):
        for error, value in (
            (ValueError, 0.0),
            (ValueError, -8.0),
            (ValueError, float("inf")),
            (ValueError, float("nan")),
            (TypeError, None),
            (TypeError, "8"),
            (TypeError, True),
        ):
            with self.subTest(value=value):
                scheduler = self._started(lambda k, v=value: v if k else 4.0, by=by)
                act = {
                    "epoch": lambda s=scheduler: self._epochs(s, range(2)),
                    "update": lambda s=scheduler: self._micro_steps(s, [1.0] * 2),
                }
                self.assert_refused(
                    error,
                    act[by],
                    "`schedule(1)` must be a finite number > 0",
                    f"schedule(1)={value!r}",
                )
                self.assertEqual(self._scale(), 4)

    def test_a_dict_is_copied(self):
        schedule = {0: 16}
        scheduler = self._started(schedule)
        schedule[0] = -1
        self.assertEqual(self._epochs(scheduler, [0]), [16])


class RefusedOptimizerTest(SchedulerCase):
    def _assert_refused(self, optimizer, expected, received, fix):
        for by in ("epoch", "update"):
            scheduler = LossScaleScheduler({0: 8.0}, by=by)
            self.assert_refused(
                ValueError,
                lambda s=scheduler: _begin(s, optimizer),
                expected,
                received,
                fix,
            )

    def test_a_loss_scale_optimizer_of_keras_owns_its_scale(self):
        for inner in (keras.optimizers.SGD(), MixedSGD(1.0, accumulation_steps=2)):
            self._assert_refused(
                keras.optimizers.LossScaleOptimizer(inner),
                NEEDED,
                "a LossScaleOptimizer of Keras, which owns the scale",
                "Compile with auto_scale_loss=False",
            )

    def test_a_plain_optimizer_has_none(self):
        self._assert_refused(
            keras.optimizers.Adam(),
            "LossScaleScheduler needs an optimizer of keras_accum",
            "optimizer=Adam",
            "Wrap it in keras_accum.AccumulationOptimizer(..., accumulation_steps=...)",
        )

    @parameterized.parameters("wrapper", "mixin")
    def test_an_optimizer_without_a_loss_scale_is_told_how_to_get_one(self, surface):
        optimizer = make(surface)
        for by in ("epoch", "update"):
            with self.assertRaisesRegex(ValueError, "constructed with one") as caught:
                _begin(LossScaleScheduler({0: 8.0}, by=by), optimizer)
            # 1.0 is never a loss scale: constructing it so would not help.
            self.assertNotIn("with loss_scale=1.0", str(caught.exception))

    def test_a_dict_leaves_a_dynamic_scale_alone_between_its_entries(self):
        scale = keras_accum.DynamicLossScale(8, growth_interval=1)
        scheduler = self._started({0: 64, 2: 4}, loss_scale=scale)
        scales = []
        for epoch in range(3):
            scheduler.on_epoch_begin(epoch)
            scales.append(self._scale())
            self._micro_steps(scheduler, [1.0] * 2)
        self.assertEqual(scales, [64, 128, 4])

    def test_a_dynamic_scale_can_be_set_and_moves_on(self):
        scheduler = self._started(
            {0: 64, 1: 16}, loss_scale=keras_accum.DynamicLossScale(8, 1)
        )
        scheduler.on_epoch_begin(0)
        self.assertEqual(self._micro_steps(scheduler, [1.0] * 4), [64, 128, 128, 256])
        scheduler.on_epoch_begin(1)
        self.assertEqual(self._scale(), 16)
        self.assertEqual(training.numbers(self.variable), -2)
