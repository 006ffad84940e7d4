"""Micro steps taken by hand, where every replica is given gradients of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests import registry, training

# Every strategy with every mode that plain Keras can run there.
PLACES = [
    (strategy, mode)
    for strategy in ("default", "mirrored")
    for mode in ("eager", "graph", "xla")
    if registry.can_run(strategy, mode)
]


def spread(everywhere: Any, *in_graphs: Any) -> list[tuple]:
    """Every place with the first case, and the graphs also with the others.

    Tracing takes most of a test's time, so that the full product would be too long.
    """
    graphs = [place for place in PLACES if place[1] == "graph"]
    return [(*place, everywhere) for place in PLACES] + [
        (*place, case) for case in in_graphs for place in graphs
    ]


class Rows(NamedTuple):
    """Gradients of some rows only (`tf.IndexedSlices`), by replica."""

    indices: np.ndarray  # (R, rows), in which a row may come twice
    values: np.ndarray  # (R, rows, *shape of a row)


def num_replicas(strategy: str) -> int:
    return registry.STRATEGIES[strategy]().num_replicas_in_sync


class MicroSteps:
    """Variables, an optimizer and a way to take micro steps with it.

    Args:
        strategy: A name in `registry.STRATEGIES`.
        optimizer: Makes the optimizer; called under the strategy's scope.
        values: The variables' first values, or functions that make the variables.
        mode: A name in `registry.MODES`.
    """

    def __init__(self, strategy, optimizer, values, mode="graph"):
        self.strategy = registry.STRATEGIES[strategy]()
        with self.strategy.scope():
            self.variables = [
                value() if callable(value) else keras.Variable(value)
                for value in values
            ]
            self.optimizer = optimizer()
        self.optimizer.build(self.variables)
        self.num_traces = 0
        self._step = self._on_every_replica
        if mode != "eager":
            self._step = tf.function(
                self._on_every_replica, autograph=False, jit_compile=mode == "xla"
            )

    def __call__(self, gradients: Sequence[Any], weight: Any = None) -> None:
        """Takes one micro step.

        Args:
            gradients: By variable: None, an array whose first axis is the replica, or
                `Rows`.
            weight: None, or one weight for each replica.
        """
        self._step(
            [
                None if g is None else tf.nest.map_structure(tf.convert_to_tensor, g)
                for g in gradients
            ],
            None if weight is None else tf.convert_to_tensor(weight),
        )

    def _on_every_replica(self, gradients, weight):
        self.num_traces += 1

        def on_one_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = [
                _of_replica(gradient, replica, variable)
                for gradient, variable in zip(gradients, self.variables, strict=True)
            ]
            self.optimizer.apply_gradients(
                list(zip(own, self.variables, strict=True)),
                weight=None if weight is None else weight[replica],
            )

        self.strategy.run(on_one_replica)

    @property
    def values(self) -> list[np.ndarray]:
        return [training.numbers(variable) for variable in self.variables]

    @property
    def num_updates(self) -> int:
        return int(training.numbers(self.optimizer.iterations))


def _of_replica(gradient, replica, variable):
    if isinstance(gradient, Rows):
        return tf.IndexedSlices(
            gradient.values[replica],
            gradient.indices[replica],
            tf.constant(tuple(variable.shape), tf.int64),
        )
    return None if gradient is None else gradient[replica]


def random_gradients(shapes, strategy, num_micro_steps, seed=0):
    """For each micro step and variable an array of shape (R, *shape of variable)."""
    random = np.random.RandomState(seed)
    replicas = num_replicas(strategy)
    return [
        [random.randn(replicas, *shape).astype("float32") for shape in shapes]
        for _ in range(num_micro_steps)
    ]


def combined(
    window, shapes, weights=None, micro_reduction="mean", replica_reduction="sum"
) -> list[np.ndarray | None]:
    """What the plain optimizer ought to get of a window, by the formula, in float64.

    Args:
        window: The gradients of each micro step, as `MicroSteps` takes them.
        shapes: Of the variables.
        weights: Of each micro step, as `MicroSteps` takes them; None for 1.
        micro_reduction: "mean" ("running_mean" is the same number) or "sum".
        replica_reduction: "sum" or "mean".
    """
    replicas = next(len(tf.nest.flatten(g)[0]) for g in window[0] if g is not None)
    given_weights = [None] * len(window) if weights is None else weights
    weights = [[1.0] * replicas if w is None else w for w in given_weights]
    # R weights at a time; their mean over the replicas is the weight of a micro step.
    divisor = 1.0 if micro_reduction == "sum" else np.sum(weights) / replicas
    if replica_reduction == "mean":
        divisor *= replicas
    reduced = []
    for index, shape in enumerate(shapes):
        given = [
            (dense(step[index], shape), weight)
            for step, weight in zip(window, weights, strict=True)
            if step[index] is not None
        ]
        total = sum(np.tensordot(weight, g, axes=1) for g, weight in given)
        reduced.append(total / divisor if given else None)
    return reduced


def dense(gradient, shape) -> np.ndarray:
    """A gradient as an array of shape (R, *shape of the variable)."""
    if not isinstance(gradient, Rows):
        return np.asarray(gradient, "float64")
    full = np.zeros((len(gradient.indices), *shape))
    for replica, indices in enumerate(gradient.indices):
        np.add.at(full[replica], indices, gradient.values[replica])
    return full


def plainly(optimizer, values, updates) -> tuple[list, Any]:
    """Variables and optimizer after updates of the plain Keras optimizer.

    Args:
        optimizer: Plain; not built.
        values: The variables' first values, or functions that make the variables.
        updates: For each update one array or None per variable.
    """
    variables = [
        value() if callable(value) else keras.Variable(value) for value in values
    ]
    optimizer.build(variables)
    for gradients in updates:
        optimizer.apply_gradients(
            [
                (None if g is None else tf.constant(g, variable.dtype), variable)
                for g, variable in zip(gradients, variables, strict=True)
            ]
        )
    return variables, optimizer


def in_windows(micro_steps: Sequence[Any], length: int) -> list[Sequence[Any]]:
    """Cuts a list of micro steps into windows."""
    return [micro_steps[i : i + length] for i in range(0, len(micro_steps), length)]
