"""Which optimizers can be wrapped, mixed into, or put around: the rest is refused."""

import keras
import tensorflow as tf
from absl.testing import absltest

import keras_accum
from tests import refusals

SGD = keras.optimizers.SGD
HAS_MULTI = hasattr(keras.optimizers, "MultiOptimizer")


class MixedSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    """The mixin on a plain optimizer."""


def wrap(inner_optimizer, **options):
    return keras_accum.AccumulationOptimizer(inner_optimizer, 2, **options)


def mixed(**options):
    return MixedSGD(1.0, accumulation_steps=2, **options)


class WrappedTest(refusals.RefusalCase):
    def test_what_is_no_optimizer_is_refused(self):
        for value in (SGD, "sgd", None, {"class_name": "SGD", "config": {}}):
            with self.subTest(value=value):
                self.assert_refused(
                    TypeError,
                    lambda value=value: wrap(value),
                    "`inner_optimizer` must be an instance of",
                    f"inner_optimizer={value!r} (of type {type(value).__name__})",
                    "keras.optimizers.get(",
                )

    def test_one_that_accumulates_as_keras_does_is_refused(self):
        self.assert_refused(
            ValueError,
            lambda: wrap(SGD(gradient_accumulation_steps=3)),
            "`inner_optimizer` must not accumulate by itself",
            "SGD with gradient_accumulation_steps=3",
            "pass accumulation_steps",
        )

    def test_one_that_scales_the_loss_is_refused(self):
        self.assert_refused(
            ValueError,
            lambda: wrap(SGD(loss_scale_factor=4.0)),
            "`inner_optimizer` must not scale the loss by itself",
            "SGD with loss_scale_factor=4.0",
            "pass loss_scale",
        )

    def test_a_refused_optimizer_is_left_as_it_was(self):
        inner = SGD(loss_scale_factor=4.0)
        with self.assertRaises(ValueError):
            wrap(inner)
        self.assertEqual(inner.loss_scale_factor, 4.0)

    def test_a_loss_scale_optimizer_is_refused(self):
        self.assert_refused(
            ValueError,
            lambda: wrap(keras.optimizers.LossScaleOptimizer(SGD())),
            "`inner_optimizer` must not scale the loss by itself",
            "inner_optimizer=LossScaleOptimizer",
            'loss_scale="dynamic"',
        )

    def test_an_accumulating_optimizer_is_refused(self):
        for inner in (wrap(SGD()), mixed()):
            name = type(inner).__name__
            self.assert_refused(
                ValueError,
                lambda inner=inner: wrap(inner),
                "`inner_optimizer` must not accumulate by itself",
                f"inner_optimizer={name}",
                "Pass the optimizer without accumulation",
            )


class MixedIntoTest(refusals.RefusalCase):
    def test_the_mixin_alone_is_refused(self):
        class Alone(keras_accum.AccumulationMixin):
            pass

        self.assert_refused(
            TypeError,
            lambda: Alone(accumulation_steps=2),
            "AccumulationMixin must be mixed into a Keras optimizer",
            "Alone",
            "class Alone(AccumulationMixin, keras.optimizers.Adam)",
        )

    def test_wrappers_are_refused(self):
        class Scaling(
            keras_accum.AccumulationMixin, keras.optimizers.LossScaleOptimizer
        ):
            pass

        refused = [lambda: Scaling(SGD(), accumulation_steps=2)]
        if HAS_MULTI:

            class Scattering(
                keras_accum.AccumulationMixin, keras.optimizers.MultiOptimizer
            ):
                pass

            refused.append(lambda: Scattering(lambda _: SGD(), accumulation_steps=2))
        for construct in refused:
            self.assert_refused(
                TypeError,
                construct,
                "must be mixed into an optimizer that updates variables by itself",
                "Sca",
                "Use keras_accum.AccumulationOptimizer",
            )

    def test_the_arguments_of_keras_are_refused(self):
        for argument in ("gradient_accumulation_steps", "loss_scale_factor"):
            self.assert_refused(
                ValueError,
                lambda argument=argument: mixed(**{argument: 4}),
                f"`{argument}` must be None",
                f"{argument}=4",
                "Use accumulation_steps and loss_scale",
            )
            self.assertEqual(mixed(**{argument: None}).accumulation_steps, 2)


class SurroundedTest(refusals.RefusalCase):
    def test_a_wrapper_inside_a_loss_scale_optimizer_is_refused(self):
        self.assert_refused(
            ValueError,
            lambda: keras.optimizers.LossScaleOptimizer(wrap(SGD())),
            "cannot stand inside another optimizer",
            "LossScaleOptimizer",
            "pass it loss_scale",
        )

    def test_a_mixin_inside_one_leaves_scaling_to_it(self):
        for options in ({}, {"loss_scale": 1.0}):
            outer = keras.optimizers.LossScaleOptimizer(mixed(**options))
            self.assertEqual(float(outer.inner_optimizer.loss_scale), 1)

    def test_a_mixin_with_a_scale_inside_one_says_that_it_gives_way(self):
        for scale in (8, "dynamic"):
            subject = mixed(loss_scale=scale)
            with self.assertWarnsRegex(UserWarning, "auto_scale_loss=False"):
                keras.optimizers.LossScaleOptimizer(subject)
            self.assertEqual(float(subject.loss_scale), 1)
            loss = tf.constant(3.0)
            self.assertIs(subject.scale_loss(loss), loss)

    def test_a_loss_scale_factor_cannot_be_set(self):
        self.assert_refused(
            ValueError,
            lambda: setattr(mixed(), "loss_scale_factor", 4.0),
            "An accumulating optimizer has a loss scale of its own",
            "loss_scale_factor=4.0",
            "Pass it loss_scale",
        )
        self.assert_refused(
            ValueError,
            lambda: setattr(wrap(SGD()), "loss_scale_factor", 4.0),
            "scales its own loss",
            "loss_scale_factor=4.0",
            "pass it loss_scale",
        )


# Each puts an optimizer into a MultiOptimizer in another way.
MULTI = {}
if HAS_MULTI:
    MultiOptimizer = keras.optimizers.MultiOptimizer
    OptimizerMap = keras.optimizers.OptimizerMap
    MULTI = {
        "default": lambda child: MultiOptimizer(OptimizerMap(child)),
        "map": lambda child: MultiOptimizer(OptimizerMap(SGD(), {".*": child})),
        "callable": lambda child: MultiOptimizer(lambda _: child),
    }


@absltest.skipUnless(HAS_MULTI, "Keras has no MultiOptimizer before 3.11")
class MultiOptimizerTest(refusals.RefusalCase):
    def _build(self, optimizer):
        optimizer.build([keras.Variable(1.0, name="weight")])

    def test_a_mixin_inside_is_refused(self):
        for name, around in MULTI.items():
            for is_wrapped in (False, True):

                def build(around=around, is_wrapped=is_wrapped):
                    multi = around(mixed())
                    self._build(wrap(multi) if is_wrapped else multi)

                with self.subTest(name=name, is_wrapped=is_wrapped):
                    self.assert_refused(
                        ValueError,
                        build,
                        "cannot stand inside a MultiOptimizer",
                        "MultiOptimizer",
                        "Put keras_accum.AccumulationOptimizer around",
                    )

    def test_a_mixin_with_a_loss_scale_inside_is_refused_alike(self):
        for name, around in MULTI.items():
            with (
                self.subTest(name=name),
                self.assertRaisesRegex(ValueError, "inside a MultiOptimizer"),
            ):
                self._build(around(mixed(loss_scale=8)))

    def test_a_wrapper_inside_is_refused(self):
        for name in ("default", "map"):
            with self.subTest(name=name):
                self.assert_refused(
                    ValueError,
                    lambda name=name: MULTI[name](wrap(SGD())),
                    "cannot stand inside another optimizer",
                    "MultiOptimizer",
                    "Put it outermost",
                )
        # What a callable returns, Keras looks at itself.
        with self.assertRaisesRegex(ValueError, "inside an MultiOptimizer"):
            self._build(MULTI["callable"](wrap(SGD())))

    def test_a_child_that_accumulates_is_refused(self):
        for name, around in MULTI.items():
            child = SGD(gradient_accumulation_steps=3)
            with self.subTest(name=name):
                self.assert_refused(
                    ValueError,
                    lambda around=around, child=child: self._build(wrap(around(child))),
                    "`inner_optimizer` must not accumulate by itself",
                    "SGD with gradient_accumulation_steps=3",
                    "pass accumulation_steps",
                )

    def test_a_child_that_scales_is_refused(self):
        # Keras takes the scale of a child away when it is put into the MultiOptimizer.
        child = SGD()
        multi = MULTI["default"](child)
        child.loss_scale_factor = 4.0
        late = wrap(MULTI["callable"](SGD()))
        late.inner_optimizer.loss_scale_factor = 4.0
        for refused in (
            lambda: wrap(multi),
            lambda: wrap(MultiOptimizer(OptimizerMap(SGD()), loss_scale_factor=4.0)),
            lambda: self._build(late),
        ):
            self.assert_refused(
                ValueError,
                refused,
                "`inner_optimizer` must not scale the loss by itself",
                "with loss_scale_factor=4.0",
                "pass loss_scale",
            )

    def test_a_loss_scale_optimizer_as_a_child_is_refused(self):
        for name in ("default", "map"):
            child = keras.optimizers.LossScaleOptimizer(SGD())
            self.assert_refused(
                ValueError,
                lambda name=name, child=child: wrap(MULTI[name](child)),
                "`inner_optimizer` must not scale the loss by itself",
                "inner_optimizer=LossScaleOptimizer",
                'loss_scale="dynamic"',
            )
