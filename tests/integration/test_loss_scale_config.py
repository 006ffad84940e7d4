"""Loss scales as values: their configs go round, and optimizers share no state."""

import copy
import json

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry
from tests.integration import stepping


@keras.saving.register_keras_serializable(package="keras_accum_tests")
def is_bias(variable):
    """Leaves biases unscaled."""
    return variable.name == "bias"


@keras.saving.register_keras_serializable(package="keras_accum_tests")
def doubled_every_update(updates):
    """8, 16, 32, ..."""
    return 8.0 * 2.0 ** tf.cast(updates, tf.float32)


DYNAMIC = {
    "initial": 64.0,
    "growth_interval": 3,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "minimum": 0.5,
    "maximum": 1024.0,
    "hysteresis": 2,
}
AUTOMATIC = {
    "initial": 4.0,
    "factor": 4.0,
    "maximum": 256.0,
    "period": 3,
    "edge": 100.0,
    "ratio": 0.25,
}
# A loss scale, and what its config says of it.
SCALES = {
    "dynamic": (lambda: keras_accum.DynamicLossScale(**DYNAMIC), DYNAMIC),
    "automatic": (lambda: keras_accum.AutomaticLossScale(**AUTOMATIC), AUTOMATIC),
    "function": (lambda: keras_accum.ScheduledLossScale(doubled_every_update), {}),
    "schedule": (
        lambda: keras_accum.ScheduledLossScale(
            keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [64.0, 8.0, 2.0])
        ),
        {},
    ),
    "unscaled": (
        lambda: keras_accum.DynamicLossScale(**DYNAMIC, unscaled=is_bias),
        DYNAMIC,
    ),
    "automatic_unscaled": (
        lambda: keras_accum.AutomaticLossScale(**AUTOMATIC, unscaled=is_bias),
        AUTOMATIC,
    ),
    "function_unscaled": (
        lambda: keras_accum.ScheduledLossScale(doubled_every_update, unscaled=is_bias),
        {},
    ),
}


def wrapper(loss_scale):
    inner = keras.optimizers.SGD(1.0)
    return keras_accum.AccumulationOptimizer(inner, 2, loss_scale=loss_scale)


def mixin(loss_scale):
    return stepping.AccumulatingSGD(1.0, accumulation_steps=2, loss_scale=loss_scale)


SURFACES = {"wrapper": wrapper, "mixin": mixin}


def through_json(serialized):
    return json.loads(json.dumps(serialized))


def scales(optimizer, gradients):
    """The scale after each micro step, whose scaled gradient is what is given."""
    variable = keras.Variable(0.0)
    seen = []
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        seen.append(float(optimizer.loss_scale))
    return seen


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(*SCALES)
    def test_a_scale_goes_round(self, name):
        make, expected = SCALES[name]
        loss_scale = make()
        serialized = through_json(keras.saving.serialize_keras_object(loss_scale))
        again = keras.saving.deserialize_keras_object(copy.deepcopy(serialized))
        self.assertIs(type(again), type(loss_scale))
        self.assertEqual(again.get_config(), loss_scale.get_config())
        config = through_json(again.get_config())
        self.assertEqual({key: config[key] for key in expected}, expected)
        if expected:
            self.assertEqual(set(config), {*expected, "unscaled"})
        self.assertEqual({name: getattr(again, name) for name in expected}, expected)
        has_function = name.endswith("unscaled")
        self.assertIs(again.unscaled, is_bias if has_function else None)
        # Made again of the class's own config, too.
        cloned = type(loss_scale).from_config(loss_scale.get_config())
        self.assertEqual(cloned.get_config(), loss_scale.get_config())

    @parameterized.product(scale=[*SCALES], surface=[*SURFACES])
    def test_it_goes_round_within_an_optimizer(self, scale, surface):
        optimizer = SURFACES[surface](SCALES[scale][0]())
        again = type(optimizer).from_config(through_json(optimizer.get_config()))
        self.assertEqual(again.get_config(), optimizer.get_config())
        through_keras = keras.optimizers.deserialize(
            through_json(keras.optimizers.serialize(optimizer))
        )
        self.assertEqual(through_keras.get_config(), optimizer.get_config())

    @parameterized.parameters(*SURFACES)
    def test_what_came_back_scales_alike(self, surface):
        infinite = float("inf")
        for scale, gradients, expected in (
            (
                "dynamic",
                [1.0, 1.0, infinite, 1.0, infinite, 1.0, *[1.0] * 6],
                [64, 64, 64, 64, 64, 16, 16, 16, 16, 16, 16, 64],
            ),
            ("function", [1.0] * 5, [8, 16, 16, 32, 32]),
            ("schedule", [1.0] * 9, [64, 64, 64, 8, 8, 8, 8, 2, 2]),
            ("automatic", [1.0] * 5 + [1.0] + [101.0] * 6, [4] * 5 + [16] * 6 + [4]),
        ):
            optimizer = SURFACES[surface](SCALES[scale][0]())
            again = type(optimizer).from_config(through_json(optimizer.get_config()))
            self.assertEqual(scales(again, gradients), expected, scale)

    @parameterized.parameters(*SURFACES)
    def test_a_filter_came_back_with_its_scale(self, surface):
        optimizer = SURFACES[surface](
            keras_accum.DynamicLossScale(8.0, unscaled=is_bias)
        )
        again = type(optimizer).from_config(through_json(optimizer.get_config()))
        kernel = keras.Variable(0.0, name="kernel")
        bias = keras.Variable(0.0, name="bias")
        for _ in range(2):
            again.apply_gradients([(tf.constant(8.0), each) for each in (kernel, bias)])
        self.assertEqual([float(v.numpy()) for v in (kernel, bias)], [-1, -8])

    def test_an_unregistered_function_comes_back_by_custom_objects(self):
        def unregistered(updates):
            return 4.0

        optimizer = wrapper(keras_accum.ScheduledLossScale(unregistered))
        serialized = through_json(keras.optimizers.serialize(optimizer))
        again = keras.optimizers.deserialize(
            serialized, custom_objects={"unregistered": unregistered}
        )
        self.assertEqual(float(again.loss_scale), 4)
        self.assertEqual(again.get_config(), optimizer.get_config())


@parameterized.product(surface=[*SURFACES], strategy=["default", "mirrored"])
class SharedTest(parameterized.TestCase):
    """One value for two optimizers."""

    def test_the_state_is_each_ones_own(self, surface, strategy):
        values = {
            "dynamic": keras_accum.DynamicLossScale(8.0, growth_interval=1),
            "automatic": keras_accum.AutomaticLossScale(8.0, period=1),
            "scheduled": keras_accum.ScheduledLossScale(doubled_every_update),
        }
        distribution = registry.STRATEGIES[strategy]()
        for name, value in values.items():
            held = dict(vars(value))
            with distribution.scope():
                first, second = (SURFACES[surface](value) for _ in range(2))
                variables = [keras.Variable(0.0) for _ in range(2)]
            first.build(variables[:1])
            second.build(variables[1:])

            def step(optimizer, variable):
                optimizer.apply_gradients([(tf.constant(1.0), variable)])

            for _ in range(2):
                distribution.run(step, args=(first, variables[0]))
            self.assertEqual(float(first.loss_scale), 16, name)
            self.assertEqual(float(second.loss_scale), 8, name)
            if name != "scheduled":  # which refuses to be set
                second.loss_scale = 2.0
            self.assertEqual(float(first.loss_scale), 16, name)
            # The value itself holds its arguments, and nothing of a training.
            self.assertEqual(vars(value), held)
            ours, others = (
                {id(variable) for variable in each.window_state.held}
                for each in (first, second)
            )
            self.assertEmpty(ours & others)

    def test_every_counter_of_a_scale_is_saved(self, surface, strategy):
        expected = {
            "dynamic": {"finite_updates", "tolerated"},
            "automatic": {
                "num_large_here",
                "num_counted_here",
                "num_large",
                "num_counted",
                "windows_in_period",
            },
            "function": set(),
        }
        with registry.STRATEGIES[strategy]().scope():
            static = SURFACES[surface](8.0)
        for name, counters in expected.items():
            with registry.STRATEGIES[strategy]().scope():
                optimizer = SURFACES[surface](SCALES[name][0]())
            stores = ({}, {})
            for each, store in zip((optimizer, static), stores, strict=True):
                each.window_state.save_own_variables(store)
            self.assertEqual(set(stores[0]) - set(stores[1]), counters)
            first = SCALES[name][0]().initial
            np.testing.assert_array_equal(stores[0]["loss_scale"], first)
            np.testing.assert_array_equal(stores[0]["next_loss_scale"], first)
