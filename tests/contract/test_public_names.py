"""The public names: a change of them is a decision, taken here as well."""

import inspect
import operator

import keras
from absl.testing import absltest

import keras_accum

NAMES = [
    "AccumulationMixin",
    "AccumulationOptimizer",
    "AutomaticLossScale",
    "CrossShardOptimizer",
    "DynamicLossScale",
    "ScheduledLossScale",
]
# Modules whose own names are public.
MODULES = {
    "callbacks": [
        "AccumulationMonitor",
        "AccumulationScheduler",
        "GradientNoiseScale",
        "LossScaleScheduler",
        "PartialWindow",
        "PipelinedWeightDecay",
        "SkipSeenBatches",
    ],
    "graphcore": [
        "CrossReplicaGradientAccumulationOptimizer",
        "CrossReplicaGradientAccumulationOptimizerV2",
        "CrossReplicaOptimizer",
        "GradientAccumulationOptimizer",
        "GradientAccumulationOptimizerV2",
        "GradientAccumulationReductionMethod",
        "IPUOptimizer",
        "MapGradientOptimizer",
    ],
    "ops": [
        "check_usage",
        "cross_replica_mean",
        "cross_replica_sum",
        "gradient_accumulator_add_with_scale",
        "repeat",
        "replication_index",
        "replication_normalise",
        "stateful_gradient_accumulate",
        "stateful_gradient_accumulate_with_momentum",
    ],
}

# What both surfaces add to a Keras optimizer, or answer for themselves.
SHARED = {
    "accumulation_steps",
    "apply",
    "apply_gradients",
    "batches_seen",
    "build",
    "decay_weights",
    "flush",
    "forget_traces",
    "from_config",
    "get_config",
    "gradient_noise_scale",
    "gradient_norm",
    "has_updated",
    "load_own_variables",
    "loss_scale",
    "measure_gradients",
    "micro_steps_left",
    "next_loss_scale",
    "pipelined_weight_decay",
    "position",
    "reset",
    "save_own_variables",
    "scale_loss",
    "set_weights",
    "skipped_micro_batches",
    "skipped_windows",
    "variables",
    "window_changes",
}
# What the wrapper hands on to its inner optimizer.
DELEGATED = {
    "clipnorm",
    "clipvalue",
    "ema_momentum",
    "ema_overwrite_frequency",
    "exclude_from_weight_decay",
    "finalize_variable_values",
    "global_clipnorm",
    "iterations",
    "learning_rate",
    "optimizers",
    "stateless_apply",
    "use_ema",
    "weight_decay",
}

OPTIONS = {
    "micro_reduction": "mean",
    "replica_reduction": "sum",
    "accumulator_dtype": None,
    "loss_scale": None,
    "on_nonfinite": "skip_window",
    "reduce_every": "window",
    "replica_groups": None,
}


# Names and defaults of what the values for `loss_scale` and the callbacks take.
EMPTY = inspect.Parameter.empty
ARGUMENTS = {
    "AutomaticLossScale": {
        "initial": 1.0,
        "factor": 2.0,
        "maximum": 2.0**15,
        "period": 8,
        "edge": 2.0**13,
        "ratio": 1e-5,
        "unscaled": None,
    },
    "DynamicLossScale": {
        "initial": 2.0**15,
        "growth_interval": 2000,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "minimum": 2.0**-14,
        "maximum": 2.0**24,
        "hysteresis": 1,
        "unscaled": None,
    },
    "ScheduledLossScale": {"schedule": EMPTY, "unscaled": None},
    "CrossShardOptimizer": {
        "opt": EMPTY,
        "reduction": "mean",
        "name": "CrossShardOptimizer",
        "group_assignment": None,
        "accumulation_steps": 1,
        "loss_scale": None,
        "on_nonfinite": "skip_window",
    },
    "callbacks.AccumulationMonitor": {
        "log_every": "update",
        "tensorboard": None,
        "micro_batch_size": None,
    },
    "callbacks.AccumulationScheduler": {
        "schedule": EMPTY,
        "by": "epoch",
        "verbose": 0,
    },
    "callbacks.GradientNoiseScale": {"micro_batch_size": None, "momentum": 0.95},
    "callbacks.PartialWindow": {"policy": "apply", "at": "epoch"},
    "callbacks.SkipSeenBatches": {},
    "callbacks.PipelinedWeightDecay": {
        "weight_decay": EMPTY,
        "schedule": None,
        "decoupled": True,
        "filter": None,
        "times_learning_rate": True,
        "by": "epoch",
        "beside_inner": False,
        "verbose": 0,
    },
    "callbacks.LossScaleScheduler": {"schedule": EMPTY, "verbose": 0, "by": "epoch"},
}


def _own_public_members(cls):
    """The public names that classes of the package define, itself or a base."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.split(".")[0] == "keras_accum"
        for name in vars(base)
        if not name.startswith("_")
    }


def _arguments(function):
    """Names, kinds and defaults of the arguments, without `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    return [(each.name, each.kind, each.default) for each in parameters[1:]]


class PublicNamesTest(absltest.TestCase):
    def test_of_the_package(self):
        self.assertEqual(sorted(keras_accum.__all__), [*NAMES, *MODULES])
        public = {
            name
            for name, value in vars(keras_accum).items()
            if not name.startswith("_") and not inspect.ismodule(value)
        }
        self.assertEqual(sorted(public), NAMES)

    def test_of_its_modules(self):
        for module, names in MODULES.items():
            self.assertEqual(sorted(getattr(keras_accum, module).__all__), names)

    def test_arguments_of_the_other_classes(self):
        for name, expected in ARGUMENTS.items():
            cls = operator.attrgetter(name)(keras_accum)
            arguments = _arguments(cls.__init__)
            positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
            self.assertLessEqual({kind for _, kind, _ in arguments}, {positional}, name)
            self.assertEqual(
                [(argument, default) for argument, _, default in arguments],
                list(expected.items()),
            )

    def test_it_has_a_version(self):
        self.assertRegex(keras_accum.__version__, r"^\d+\.\d+\.\d+")

    def test_of_the_wrapper(self):
        members = _own_public_members(keras_accum.AccumulationOptimizer)
        self.assertEqual(members, SHARED | DELEGATED)

    def test_of_the_mixin(self):
        members = _own_public_members(keras_accum.AccumulationMixin)
        self.assertEqual(members, SHARED | {"exclude_from_weight_decay"})

    def test_the_wrapper_has_its_inner_optimizer(self):
        inner = keras.optimizers.SGD()
        optimizer = keras_accum.AccumulationOptimizer(inner, 2)
        self.assertIs(optimizer.inner_optimizer, inner)
        self.assertIsInstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def test_nothing_else_public_is_kept_on_an_instance(self):
        class Mixed(keras_accum.AccumulationMixin, keras.optimizers.SGD):
            pass

        plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        for optimizer, host in (
            (keras_accum.AccumulationOptimizer(keras.optimizers.SGD(), 2), plain),
            (Mixed(accumulation_steps=2), keras.optimizers.SGD()),
        ):
            kept = {name for name in vars(optimizer) if not name.startswith("_")}
            # The layer that Keras saves the window by: an attribute must be public.
            self.assertLessEqual(kept - set(vars(host)), {"window_state"})

    def test_arguments_of_the_wrapper(self):
        empty, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.assertEqual(
            _arguments(keras_accum.AccumulationOptimizer.__init__),
            [
                ("inner_optimizer", positional, empty),
                ("accumulation_steps", positional, empty),
                *((name, keyword, default) for name, default in OPTIONS.items()),
                ("name", keyword, None),
            ],
        )

    def test_arguments_of_the_mixin(self):
        empty, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        self.assertEqual(
            _arguments(keras_accum.AccumulationMixin.__init__),
            [
                ("args", inspect.Parameter.VAR_POSITIONAL, empty),
                ("accumulation_steps", keyword, empty),
                *((name, keyword, default) for name, default in OPTIONS.items()),
                ("kwargs", inspect.Parameter.VAR_KEYWORD, empty),
            ],
        )

    def test_arguments_of_a_micro_step(self):
        cls = keras_accum.AccumulationOptimizer
        names = {
            name: [argument for argument, _, _ in _arguments(getattr(cls, name))]
            for name in ("apply_gradients", "apply", "flush", "reset", "set_weights")
        }
        self.assertEqual(
            names,
            {
                "apply_gradients": ["grads_and_vars", "weight"],
                "apply": ["grads", "trainable_variables", "weight"],
                "flush": [],
                "reset": [],
                "set_weights": ["weights"],
            },
        )

    def test_keras_finds_classes_by_their_registered_names(self):
        for name in NAMES:
            if name == "AccumulationMixin":  # no optimizer without a base
                continue
            found = keras.saving.get_registered_object(f"keras_accum>{name}")
            self.assertIs(found, getattr(keras_accum, name))
