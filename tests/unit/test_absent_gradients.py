"""An update passes by the variables without a gradient, as Keras does for a None.

The expected values come from the plain optimizer, which is given None.
"""

import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.absent_gradients import passed_by
from tests import registry, tolerances, training

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.2),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.2),
    "ema": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=None
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["multi"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.2),
            {"second|fourth": keras.optimizers.AdamW(0.01, weight_decay=0.2)},
        )
    )

# Which of the first two variables have a gradient, update by update. The others always
# have: plain Keras refuses an optimizer without any gradient.
PRESENT = [(True, True), (False, True), (True, False), (False, False), (True, True)]
VALUES = {"first": [1, 2], "second": 3, "third": [4, 5, 6], "fourth": [[7, 8]]}


def _gradients(update):
    random = np.random.RandomState(update)
    return [
        tf.constant(random.randn(*np.shape(value)), tf.float32)
        for value in VALUES.values()
    ]


def _without(update, absent):
    """The gradients of an update, with `absent(gradient)` for those not present."""
    has = (*PRESENT[update], True, True)
    return [
        gradient if is_there else absent(gradient)
        for gradient, is_there in zip(_gradients(update), has, strict=True)
    ]


class PassedByTest(parameterized.TestCase):
    def _build(self, optimizer, strategy):
        with strategy.scope():
            variables = [
                keras.Variable(np.float32(value), name=name)
                for name, value in VALUES.items()
            ]
            optimizer = OPTIMIZERS[optimizer]()
            optimizer.build(variables)
        return optimizer, variables

    @parameterized.product(
        optimizer=sorted(OPTIMIZERS),
        strategy=["default", "mirrored"],
        is_graph=[False, True],
    )
    def test_value_slots_and_decay(self, optimizer, strategy, is_graph):
        plain, expected = self._build(optimizer, tf.distribute.get_strategy())
        for update in range(len(PRESENT)):
            self._apply_plain(plain, _without(update, lambda g: None), expected)

        strategy = registry.STRATEGIES[strategy]()
        subject, variables = self._build(optimizer, strategy)
        # The optimizer's own sum over replicas meets one gradient, and zeros.
        flags = [tf.Variable(True) for _ in variables[:2]]

        def step(*gradients):
            def apply(_, gradients):
                with passed_by(subject, list(zip(variables, flags, strict=False))):
                    tf.distribute.get_strategy().extended.call_for_each_replica(
                        lambda: subject.apply(self._once(gradients), variables)
                    )

            context = tf.distribute.get_replica_context()
            context.merge_call(apply, args=(list(gradients),))

        def run(*gradients):
            strategy.run(step, args=gradients)

        if is_graph:
            run = tf.function(run, autograph=False)
        for update, present in enumerate(PRESENT):
            for flag, has in zip(flags, present, strict=False):
                flag.assign(has)
            run(*_without(update, tf.zeros_like))
        tolerance = tolerances.BY_DTYPE["float32"]
        training.assert_same_variables(variables, expected, tolerance)
        training.assert_same_variables(subject.variables, plain.variables, tolerance)

    def _apply_plain(self, plain, gradients, variables):
        with warnings.catch_warnings():
            # Keras says that a gradient is None: it is meant to be.
            warnings.simplefilter("ignore", UserWarning)
            plain.apply(gradients, variables)

    def _once(self, gradients):
        """Local gradients whose sum over the replicas is the gradient."""
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        return [tf.where(is_first, g, tf.zeros_like(g)) for g in gradients]

    def test_the_optimizer_is_left_as_it_was(self):
        subject, variables = self._build("momentum", tf.distribute.get_strategy())
        before = dict(subject.__dict__)
        with (
            self.assertRaisesRegex(RuntimeError, "inside"),
            passed_by(subject, [(variables[0], tf.constant(False))]),
        ):
            raise RuntimeError("inside")
        self.assertEqual(dict(subject.__dict__), before)

    def test_without_optional_variables_nothing_is_touched(self):
        subject, _ = self._build("momentum", tf.distribute.get_strategy())
        before = dict(subject.__dict__)
        with passed_by(subject, []):
            self.assertEqual(dict(subject.__dict__), before)
