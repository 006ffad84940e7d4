"""What the callbacks refuse: at construction, and when a training begins."""

import keras
import numpy as np
from absl.testing import parameterized

from keras_accum.callbacks import (
    AccumulationMonitor,
    AccumulationScheduler,
    GradientNoiseScale,
    LossScaleScheduler,
    PartialWindow,
    PipelinedWeightDecay,
    SkipSeenBatches,
)
from tests import refusals
from tests.unit.test_arguments import MixedSGD, make

EVERY = {
    "AccumulationMonitor": AccumulationMonitor,
    "AccumulationScheduler": lambda: AccumulationScheduler({0: 2}),
    "GradientNoiseScale": GradientNoiseScale,
    "PartialWindow": PartialWindow,
    "PipelinedWeightDecay": lambda: PipelinedWeightDecay(0.1),
    "SkipSeenBatches": SkipSeenBatches,
}


def _fit(optimizer, *callbacks):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.ones((4, 1), "float32")
    model.fit(x, x, batch_size=1, verbose=0, callbacks=list(callbacks))
    return model


class AtTrainBeginTest(refusals.RefusalCase):
    @parameterized.parameters(*EVERY)
    def test_an_optimizer_that_does_not_accumulate(self, name):
        for optimizer in (
            keras.optimizers.Adam(),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        ):
            self.assert_refused(
                ValueError,
                lambda o=optimizer: _fit(o, EVERY[name]()),
                f"{name} needs an optimizer of keras_accum",
                "optimizer=Adam",
                "Wrap it in keras_accum.AccumulationOptimizer",
            )

    @parameterized.parameters(*EVERY)
    def test_two_that_steer_one_thing(self, name):
        if name == "AccumulationMonitor":  # which steers nothing
            _fit(make("wrapper"), EVERY[name](), EVERY[name]())
            return
        self.assert_refused(
            ValueError,
            lambda: _fit(make("wrapper"), EVERY[name](), EVERY[name]()),
            "At most one callback of a `fit` may steer",
            f"{name} and {name}",
            "Leave one out",
        )

    def test_two_in_two_trainings_are_none_too_many(self):
        model = _fit(make("wrapper"), PartialWindow())
        x = np.ones((4, 1), "float32")
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[PartialWindow()])

    def test_two_loss_scale_schedulers(self):
        self.assert_refused(
            ValueError,
            lambda: _fit(
                make("wrapper", loss_scale=8.0),
                LossScaleScheduler({0: 4.0}),
                LossScaleScheduler({1: 4.0}),
            ),
            "may steer loss_scale",
            "LossScaleScheduler and LossScaleScheduler",
        )

    @parameterized.parameters(*EVERY)
    def test_a_mixin_inside_keras_loss_scale_optimizer_is_found(self, name):
        callback = EVERY[name]()
        inner = MixedSGD(0.01, accumulation_steps=2)
        _fit(keras.optimizers.LossScaleOptimizer(inner), callback)
        self.assertIs(callback.optimizer, inner)


class AccumulationSchedulerTest(refusals.RefusalCase):
    """Vector 41."""

    def test_keys(self):
        for key in (-1, 1.0, "1", None, True):
            self.assert_refused(
                ValueError,
                lambda k=key: AccumulationScheduler({0: 1, k: 2}),
                "`schedule` must have integers >= 0 as keys",
                f"key {key!r} in schedule=",
            )
        self.assertEqual(AccumulationScheduler({np.int64(3): 2}).schedule, {3: 2})

    def test_steps(self):
        for steps in (0, -1, 2.0, "2", None, True):
            self.assert_refused(
                ValueError,
                lambda s=steps: AccumulationScheduler({2: s}),
                "`schedule[2]` must be an integer >= 1",
                f"schedule[2]={steps!r}",
            )
            self.assert_refused(
                ValueError,
                lambda s=steps: _fit(
                    make("wrapper"), AccumulationScheduler(lambda _: s)
                ),
                "`schedule(0)` must be an integer >= 1",
                f"schedule(0)={steps!r}",
            )

    def test_an_empty_one(self):
        self.assert_refused(
            ValueError,
            lambda: AccumulationScheduler({}),
            "`schedule` must have an entry",
            "schedule={}",
            "Write for example",
        )

    def test_another_type(self):
        for schedule in (4, None, "linear", [(0, 2)]):
            self.assert_refused(
                TypeError,
                lambda s=schedule: AccumulationScheduler(s),
                "`schedule` must be a callable or a dict",
                f"schedule={schedule!r}",
            )


class ForGlobalBatchTest(refusals.RefusalCase):
    """Vector 20."""

    def _steps(self, replicas, **arguments):
        scheduler = AccumulationScheduler.for_global_batch(**arguments)
        return scheduler.steps_on(replicas)

    def test_steps_are_kept(self):
        self.assertEqual(self._steps(4, micro_batch_size=3, accumulation_steps=2), 2)

    def test_they_follow_from_the_replicas(self):
        for replicas, expected in ((1, 4), (2, 2), (4, 1)):
            steps = self._steps(replicas, global_batch_size=12, micro_batch_size=3)
            self.assertEqual(steps, expected)

    @parameterized.parameters((10, 2, 12), (8, 1, 6), (1, 1, 6), (9, 2, 12))
    def test_they_are_rounded_with_a_warning(self, global_batch, steps, actual):
        with self.assertWarnsRegex(UserWarning, f"global batch size is {actual}"):
            found = self._steps(2, global_batch_size=global_batch, micro_batch_size=3)
        self.assertEqual(found, steps)

    def test_exactly_one_is_given(self):
        for arguments in ({}, {"global_batch_size": 12, "accumulation_steps": 2}):
            self.assert_refused(
                ValueError,
                lambda a=arguments: self._steps(1, micro_batch_size=3, **a),
                "Exactly one of `global_batch_size` and `accumulation_steps`",
                f"global_batch_size={arguments.get('global_batch_size')}",
            )

    def test_rows(self):
        for rows in (0, -1, 2.0, "8", True, None):
            self.assert_refused(
                ValueError,
                lambda r=rows: self._steps(1, global_batch_size=8, micro_batch_size=r),
                "`micro_batch_size` must be an integer >= 1",
                f"micro_batch_size={rows!r}",
            )


class PartialWindowTest(refusals.RefusalCase):
    def test_policy_and_end(self):
        self.assert_refused(
            ValueError,
            lambda: PartialWindow("flush"),
            "`policy` must be one of 'apply', 'carry', 'drop'",
            "policy='flush'",
        )
        self.assert_refused(
            ValueError,
            lambda: PartialWindow(at="batch"),
            "`at` must be one of 'epoch', 'train'",
            "at='batch'",
        )


class AccumulationMonitorTest(refusals.RefusalCase):
    def test_log_every(self):
        for error, value in (
            (ValueError, 0),
            (ValueError, -1),
            (ValueError, "batch"),
            (TypeError, 1.5),
            (TypeError, True),
            (TypeError, None),
        ):
            self.assert_refused(
                error,
                lambda v=value: AccumulationMonitor(v),
                '`log_every` must be "update", "epoch" or an integer >= 1',
                f"log_every={value!r}",
            )

    def test_there_is_nothing_to_draw(self):
        self.assert_refused(
            ValueError,
            lambda: AccumulationMonitor().plot_history("none.png"),
            "There must be an update to draw",
            "a history without one",
            "Pass the monitor to `fit",
        )
