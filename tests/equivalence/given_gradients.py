"""Two variables whose gradients a test gives, each replica its own."""

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from tests import registry, training

INITIAL_VALUES = (
    np.array([-1.0, 2.0], "float32"),
    np.array([[0.5, -0.5], [1.0, 3.0], [-2.0, 0.25]], "float32"),
)


PLAIN = {"learning_rate": 0.5, "momentum": 0.5}


class AccumulatingSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    """The mixin over the optimizer that the wrapper wraps."""


def wrapped(accumulation_steps, cls=keras_accum.AccumulationOptimizer, **plain):
    """SGD with momentum inside a wrapper."""
    inner = keras.optimizers.SGD(**PLAIN, **plain)
    return cls(inner, accumulation_steps)


def mixed_in(accumulation_steps, **plain):
    """The same with the mixin."""
    return AccumulatingSGD(**PLAIN, **plain, accumulation_steps=accumulation_steps)


SURFACES = {"wrapper": wrapped, "mixin": mixed_in}


def random_gradients(num_replicas, seed):
    """Multiples of 1/4, whose sums float32 holds exactly; the replicas come first."""
    random = np.random.RandomState(seed)
    return [
        random.randint(-8, 9, (num_replicas, *v.shape)).astype("float32") / 4
        for v in INITIAL_VALUES
    ]


class GivenGradients:
    """Runs micro steps with the gradients it is given.

    Args:
        strategy: A name of the registry.
        mode: "graph" or "eager".
        make: Makes the optimizer, under the strategy's scope.
    """

    def __init__(self, strategy, mode, make):
        self.strategy = registry.STRATEGIES[strategy]()
        self.num_replicas = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            self.variables = [keras.Variable(value) for value in INITIAL_VALUES]
            self.optimizer = make()
            self.optimizer.build(self.variables)
        self.num_traces = 0
        self.micro_step = self._micro_step
        if mode == "graph":
            self.micro_step = tf.function(self._micro_step, autograph=False)

    def _micro_step(self, gradients, weights=None):
        self.num_traces += 1
        self.strategy.run(self._on_replica, args=(gradients, weights))

    def _on_replica(self, gradients, weights):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        weight = None if weights is None else weights[replica]
        pairs = zip([g[replica] for g in gradients], self.variables, strict=True)
        self.optimizer.apply_gradients(pairs, weight=weight)

    def step(self, gradients, weights=None):
        """One micro step; arrays of which the first axis is the replicas."""
        gradients = [tf.constant(g) for g in gradients]
        weights = weights if weights is None else tf.constant(weights, tf.float32)
        self.micro_step(gradients, weights)

    def inner_variables(self):
        """What a plain SGD would have: two counters, averages if any, momentums."""
        per_variable = 2 if self.optimizer.use_ema else 1
        return self.optimizer.variables[: 2 + per_variable * len(self.variables)]

    def copies(self, variables):
        """Bytes of every replica's copy of every variable."""
        return [
            [copy.numpy().tobytes() for copy in self.local(variable)]
            for variable in variables
        ]

    def local(self, variable):
        """Each replica's copy of a variable."""
        return self.strategy.experimental_local_results(
            getattr(variable, "value", variable)
        )

    def moved_by_updates(self):
        """The bytes that nothing but an update may change."""
        return self.copies([*self.variables, *self.inner_variables()])

    def values(self):
        """The variables' values."""
        return [training.numbers(v) for v in self.variables]
