"""What the constructors accept and refuse, and what they say."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import arguments
from tests import refusals, registry


class MixedSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    """The mixin on a plain optimizer."""


def make(surface, accumulation_steps=2, **options):
    """An accumulating SGD with a learning rate of 1."""
    options = {"accumulation_steps": accumulation_steps, **options}
    if surface == "mixin":
        return MixedSGD(1.0, **options)
    return keras_accum.AccumulationOptimizer(keras.optimizers.SGD(1.0), **options)


NOT_A_LENGTH = [
    True,
    False,
    0,
    -1,
    2.5,
    2.0,
    "4",
    None,
    [2],
    np.float32(2),
    np.int64(0),
]


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class AccumulationStepsTest(refusals.RefusalCase):
    def test_what_is_not_an_integer_of_at_least_one_is_refused(self, surface):
        for value in NOT_A_LENGTH:
            with self.subTest(value=repr(value)):
                self.assert_refused(
                    ValueError,
                    lambda value=value: make(surface, value),
                    "`accumulation_steps` must be an integer >= 1",
                    f"accumulation_steps={value!r} (of type {type(value).__name__})",
                )

    def test_setting_it_is_checked_alike(self, surface):
        optimizer = make(surface, 3)
        for value in NOT_A_LENGTH:
            with self.subTest(value=repr(value)):
                self.assert_refused(
                    ValueError,
                    lambda value=value: setattr(optimizer, "accumulation_steps", value),
                    "`accumulation_steps` must be an integer >= 1",
                    f"accumulation_steps={value!r}",
                )
        self.assertEqual(optimizer.accumulation_steps, 3)

    def test_integers_of_numpy_are_converted(self, surface):
        for value in (np.int64(4), np.int32(4), np.uint8(4)):
            optimizer = make(surface, value)
            self.assertIs(type(optimizer.accumulation_steps), int)
            self.assertEqual(optimizer.accumulation_steps, 4)
            self.assertIs(type(optimizer.get_config()["accumulation_steps"]), int)
            checked = arguments.checked_accumulation_steps(value)
            self.assertIs(type(checked), int)

    def test_it_has_no_default(self, surface):
        with self.assertRaisesRegex(TypeError, "accumulation_steps"):
            if surface == "mixin":
                MixedSGD(1.0)
            else:
                keras_accum.AccumulationOptimizer(keras.optimizers.SGD(1.0))


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class ChoicesTest(refusals.RefusalCase):
    CHOICES = (
        ("micro_reduction", "'mean', 'sum', 'running_mean'"),
        ("replica_reduction", "'sum', 'mean'"),
        ("on_nonfinite", "'skip_window', 'skip_micro_batch', 'propagate'"),
    )

    def test_unknown_names_are_refused_and_the_known_ones_listed(self, surface):
        for argument, names in self.CHOICES:
            for value in ("max", "", None, 3, True, ["mean"]):
                with self.subTest(argument=argument, value=value):
                    self.assert_refused(
                        ValueError,
                        lambda a=argument, v=value: make(surface, **{a: v}),
                        f"`{argument}` must be one of {names}",
                        f"{argument}={value!r}",
                    )

    def test_every_name_that_is_listed_is_accepted(self, surface):
        for argument, names in self.CHOICES:
            for name in names.replace("'", "").split(", "):
                config = make(surface, **{argument: name}).get_config()
                self.assertEqual(config[argument], name)

    def test_a_running_mean_cannot_leave_micro_batches_out(self, surface):
        self.assert_refused(
            ValueError,
            lambda: make(
                surface,
                micro_reduction="running_mean",
                on_nonfinite="skip_micro_batch",
            ),
            'on_nonfinite="skip_micro_batch" cannot be used with '
            'micro_reduction="running_mean"',
            "on_nonfinite='skip_micro_batch', micro_reduction='running_mean'",
            'Use micro_reduction="mean"',
        )

    def test_options_are_keywords(self, surface):
        with self.assertRaises(TypeError):
            if surface == "mixin":
                MixedSGD(1.0, 0.0, False, None, None, None, None, False, 0.99, 3, 4, 5)
            else:
                keras_accum.AccumulationOptimizer(keras.optimizers.SGD(), 2, "mean")


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class AccumulatorDTypeTest(refusals.RefusalCase):
    EXPECTED = (
        "`accumulator_dtype` must be None, a floating dtype, or a callable that takes "
        "a variable and returns a floating dtype"
    )

    def test_what_is_no_floating_dtype_is_refused(self, surface):
        for error, value in (
            (ValueError, "int32"),
            (ValueError, "bool"),
            (ValueError, np.int8),
            (ValueError, tf.complex64),
            (TypeError, "nonsense"),
            (TypeError, []),
        ):
            with self.subTest(value=value):
                self.assert_refused(
                    error,
                    lambda v=value: make(surface, accumulator_dtype=v),
                    self.EXPECTED,
                    f"accumulator_dtype={value!r}",
                )

    def test_what_a_callable_returns_is_checked_at_build(self, surface):
        for error, value in ((ValueError, "int32"), (TypeError, "nonsense")):
            optimizer = make(surface, accumulator_dtype=lambda _, value=value: value)
            self.assert_refused(
                error,
                lambda optimizer=optimizer: optimizer.build([keras.Variable(1.0)]),
                self.EXPECTED,
                f"accumulator_dtype={value!r}",
            )

    def test_floating_dtypes_are_accepted_in_every_form(self, surface):
        for value in ("float64", tf.float64, np.float64, np.dtype("float64")):
            config = make(surface, accumulator_dtype=value).get_config()
            self.assertEqual(config["accumulator_dtype"], "float64")


class DTypesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("float16", None, "float32", "float16"),
        ("bfloat16", None, "float32", "bfloat16"),
        ("float32", None, "float32", "float32"),
        ("float64", None, "float64", "float64"),
        ("float16", "float16", "float16", "float16"),
        ("float32", "float16", "float16", "float32"),
        ("float32", "float64", "float64", "float64"),
        ("float16", "float32", "float32", "float32"),
    )
    def test_of_accumulator_and_of_what_the_inner_optimizer_receives(
        self, variable, chosen, accumulator, received
    ):
        variable = keras.Variable(1.0, dtype=variable)
        for choice in (chosen, None if chosen is None else lambda _: chosen):
            self.assertEqual(
                arguments.dtype_of_accumulator(variable, choice), accumulator
            )
            self.assertEqual(arguments.dtype_of_reduced(variable, choice), received)


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class LossScaleArgumentTest(refusals.RefusalCase):
    def test_what_is_no_finite_number_above_zero_is_refused(self, surface):
        for error, value in (
            (ValueError, 0),
            (ValueError, 0.0),
            (ValueError, -1),
            (ValueError, float("inf")),
            (ValueError, float("nan")),
            (ValueError, np.float32("nan")),
            (ValueError, "static"),
            (ValueError, ""),
            (TypeError, True),
            (TypeError, []),
            (TypeError, {}),
            (TypeError, np.ones(2)),
            (TypeError, tf.constant(2.0)),
        ):
            with self.subTest(value=repr(value)):
                self.assert_refused(
                    error,
                    lambda v=value: make(surface, loss_scale=v),
                    '`loss_scale` must be None, "dynamic", a finite number > 0, or one '
                    "of DynamicLossScale, ScheduledLossScale, AutomaticLossScale",
                    f"loss_scale={value!r}",
                )

    def test_numbers_are_static_and_one_is_none(self, surface):
        for value in (8, 8.0, np.float32(8), np.int64(8)):
            optimizer = make(surface, loss_scale=value)
            self.assertEqual(float(optimizer.loss_scale), 8)
            self.assertEqual(float(optimizer.scale_loss(tf.constant(3.0))), 24)
            self.assertEqual(optimizer.get_config()["loss_scale"], 8)
        for value in (1, 1.0):
            keras.mixed_precision.set_dtype_policy("mixed_float16")
            loss = tf.constant(3.0)
            self.assertIs(make(surface, loss_scale=value).scale_loss(loss), loss)

    def test_a_scale_that_is_an_object_is_taken(self, surface):
        for scale, first in (
            (keras_accum.DynamicLossScale(initial=8), 8),
            (keras_accum.ScheduledLossScale(lambda updates: 4), 4),
            (keras_accum.AutomaticLossScale(initial=2), 2),
        ):
            optimizer = make(surface, loss_scale=scale)
            self.assertEqual(float(optimizer.loss_scale), first)
            self.assertEqual(float(optimizer.scale_loss(tf.constant(3.0))), 3 * first)

    def test_a_class_in_place_of_an_object_is_refused(self, surface):
        self.assert_refused(
            TypeError,
            lambda: make(surface, loss_scale=keras_accum.DynamicLossScale),
            "`loss_scale` must be None",
            "loss_scale=<class",
        )

    def test_none_is_resolved_at_construction(self, surface):
        for policy, scale, config in (
            ("float32", 1, 1.0),
            ("mixed_bfloat16", 1, 1.0),
            ("mixed_float16", 2**15, "dynamic"),
        ):
            keras.mixed_precision.set_dtype_policy(policy)
            optimizer = make(surface)
            keras.mixed_precision.set_dtype_policy("float32")
            self.assertEqual(float(optimizer.loss_scale), scale)
            self.assertEqual(optimizer.get_config()["loss_scale"], config)

    def test_dynamic_has_the_first_scale_of_keras(self, surface):
        of_keras = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        optimizer = make(surface, loss_scale="dynamic")
        self.assertEqual(float(optimizer.loss_scale), of_keras.initial_scale)


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class StrategiesTest(refusals.RefusalCase):
    EXPECTED = (
        "The strategy must be one of OneDeviceStrategy, MirroredStrategy, "
        "MultiWorkerMirroredStrategy, TPUStrategy, or none"
    )

    def test_central_storage_is_refused_by_name(self, surface):
        strategy = tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=["CPU:0"], parameter_device="CPU:0"
        )
        with strategy.scope():
            self.assert_refused(
                ValueError,
                lambda: make(surface),
                self.EXPECTED,
                "strategy=CentralStorageStrategy",
            )

    def test_parameter_server_is_refused_by_name(self, surface):
        # A real one needs a cluster before it can be constructed.
        strategy = object.__new__(tf.distribute.ParameterServerStrategy)
        with (
            mock.patch.object(tf.distribute, "get_strategy", return_value=strategy),
            mock.patch.object(tf.distribute, "has_strategy", return_value=True),
        ):
            self.assert_refused(
                ValueError,
                lambda: make(surface),
                self.EXPECTED,
                "strategy=ParameterServerStrategy",
            )

    def test_the_supported_ones_are_accepted(self, surface):
        for strategy in registry.STRATEGIES.values():
            with strategy().scope():
                self.assertEqual(make(surface).accumulation_steps, 2)

    def test_another_backend_is_refused(self, surface):
        with mock.patch.object(keras.backend, "backend", return_value="jax"):
            self.assert_refused(
                ValueError,
                lambda: make(surface),
                "keras_accum needs the TensorFlow backend of Keras",
                "backend=jax",
                "KERAS_BACKEND=tensorflow",
            )
