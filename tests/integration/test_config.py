"""What an accumulating optimizer says of itself is enough to make it again."""

import copy
import json

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from tests import registry, training
from tests.integration import stepping


@keras.saving.register_keras_serializable(package="keras_accum_tests")
def dtype_by_rank(variable):
    """float64 for kernels, float32 for biases."""
    return "float64" if len(variable.shape) > 1 else "float32"


DEFAULTS = {
    "accumulation_steps": 4,
    "micro_reduction": "mean",
    "replica_reduction": "sum",
    "accumulator_dtype": None,
    "loss_scale": 1.0,
    "on_nonfinite": "skip_window",
}

# What is passed, and what the config says of it where that is another thing.
ARGUMENTS = {
    "defaults": ({}, {}),
    "micro_reduction": ({"micro_reduction": "running_mean"}, {}),
    "replica_reduction": ({"replica_reduction": "mean"}, {}),
    "dtype": ({"accumulator_dtype": "float64"}, {}),
    "numpy_dtype": (
        {"accumulator_dtype": np.float64},
        {"accumulator_dtype": "float64"},
    ),
    "static_loss_scale": ({"loss_scale": 512.0}, {}),
    "dynamic_loss_scale": ({"loss_scale": "dynamic"}, {}),
    "no_loss_scale": ({"loss_scale": 1}, {"loss_scale": 1.0}),
    "on_nonfinite": ({"on_nonfinite": "skip_window"}, {}),
    "skip_micro_batch": ({"on_nonfinite": "skip_micro_batch"}, {}),
    "propagate": ({"on_nonfinite": "propagate"}, {}),
    "name": ({"name": "large"}, {}),
    "all": (
        {
            "micro_reduction": "sum",
            "replica_reduction": "mean",
            "accumulator_dtype": "float64",
            "loss_scale": 8.0,
            "on_nonfinite": "skip_window",
            "name": "all",
        },
        {},
    ),
}


def wrapper(**arguments):
    inner = keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=2.0)
    return keras_accum.AccumulationOptimizer(inner, 4, **arguments)


def mixin(**arguments):
    return stepping.AccumulatingSGD(
        0.05, momentum=0.9, clipnorm=2.0, accumulation_steps=4, **arguments
    )


SURFACES = {"wrapper": wrapper, "mixin": mixin}


class ConfigTest(parameterized.TestCase):
    @parameterized.product(surface=[*SURFACES], arguments=[*ARGUMENTS])
    def test_every_argument_goes_round(self, surface, arguments):
        given, resolved = ARGUMENTS[arguments]
        optimizer = SURFACES[surface](**given)
        expected = {**DEFAULTS, **given, **resolved}
        config = json.loads(json.dumps(optimizer.get_config()))
        self.assertEqual({key: config[key] for key in expected}, expected)
        again = type(optimizer).from_config(copy.deepcopy(config))
        self.assertEqual(again.get_config(), config)
        inner = again.inner_optimizer if surface == "wrapper" else again
        self.assertEqual(inner.momentum, 0.9)
        self.assertEqual(inner.clipnorm, 2.0)
        self.assertAlmostEqual(float(again.learning_rate.numpy()), 0.05)

    @parameterized.parameters(*SURFACES)
    def test_a_registered_callable_dtype_goes_round(self, surface):
        optimizer = SURFACES[surface](accumulator_dtype=dtype_by_rank)
        config = json.loads(json.dumps(optimizer.get_config()))
        again = type(optimizer).from_config(copy.deepcopy(config))
        model = stepping.layered("default", lambda: again)
        dtypes = [v.dtype for v in model.optimizer.variables if "accumulator" in v.path]
        self.assertEqual(dtypes, ["float64", "float32"])
        self.assertEqual(again.get_config(), config)

    @parameterized.parameters(*SURFACES)
    def test_from_config_leaves_its_argument_as_it_was(self, surface):
        optimizer = SURFACES[surface](accumulator_dtype=dtype_by_rank)
        config = optimizer.get_config()
        given = copy.deepcopy(config)
        type(optimizer).from_config(given)
        self.assertEqual(given, config)

    @parameterized.parameters(*SURFACES)
    def test_serialize_and_deserialize(self, surface):
        optimizer = SURFACES[surface](loss_scale=2.0)
        serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        for make in (keras.optimizers.deserialize, keras.optimizers.get):
            again = make(serialized)
            self.assertIs(type(again), type(optimizer))
            self.assertEqual(again.get_config(), optimizer.get_config())

    @parameterized.parameters(*SURFACES)
    def test_the_config_follows_what_was_set(self, surface):
        optimizer = SURFACES[surface]()
        optimizer.accumulation_steps = 7
        optimizer.learning_rate = 0.25
        again = type(optimizer).from_config(optimizer.get_config())
        self.assertEqual(again.accumulation_steps, 7)
        self.assertEqual(float(again.learning_rate.numpy()), 0.25)

    @parameterized.parameters(*SURFACES)
    def test_the_policy_is_resolved_once(self, surface):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        scaled = SURFACES[surface]().get_config()
        self.assertEqual(scaled["loss_scale"], "dynamic")
        keras.mixed_precision.set_dtype_policy("float32")
        unscaled = SURFACES[surface]().get_config()
        made = type(SURFACES[surface]()).from_config
        self.assertEqual(float(made(scaled).loss_scale), 2.0**15)
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        self.assertEqual(float(made(unscaled).loss_scale), 1.0)

    def test_a_schedule_goes_round(self):
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.SGD(schedule), 2)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        inner = again.inner_optimizer.get_config()["learning_rate"]
        self.assertEqual(inner["class_name"], "CosineDecay")
        self.assertEqual(inner["config"], schedule.get_config())

    @parameterized.parameters(*registry.OPTIMIZERS)
    def test_every_inner_optimizer_goes_round(self, name):
        inner = registry.OPTIMIZERS[name](clipnorm=1.5)
        optimizer = keras_accum.AccumulationOptimizer(inner, 2)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        self.assertIs(type(again.inner_optimizer), type(inner))
        self.assertEqual(again.inner_optimizer.get_config(), inner.get_config())

    def test_a_clone_trains_from_the_start(self):
        model = stepping.layered("default", wrapper)
        for rows in stepping.gradients(5):
            stepping.micro_step(model, "default", rows)
        clone = type(model.optimizer).from_config(model.optimizer.get_config())
        self.assertEqual(int(clone.position), 0)
        self.assertEqual(int(training.numbers(clone.iterations)), 0)
        self.assertEqual(int(model.optimizer.position), 1)
        self.assertIsNot(clone.inner_optimizer, model.optimizer.inner_optimizer)
