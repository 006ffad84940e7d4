"""Random sequences of micro steps and of what can happen between them.

After every command all variables, slots and counters are compared with an oracle that
is written in NumPy.
"""

import collections
import os
import tempfile

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import registry, tolerances, training
from tests.equivalence import window_oracle
from tests.equivalence.window_commands import (
    INITIAL_VALUES,
    STORES,
    Flush,
    MicroStep,
    Reset,
    SaveAndRestore,
    SetAccumulationSteps,
    sequences,
    tour,
)

INITIAL_STEPS = 3

hypothesis.settings.register_profile(
    "deterministic",
    deadline=None,  # the first micro step of each kind is traced
    derandomize=True,
    database=None,
    # Shrinking a failure takes minutes: add `hypothesis.Phase.shrink` to have it.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


class _Holder(keras.Model):
    """Two variables: what `save_weights` needs around an optimizer."""

    def __init__(self):
        super().__init__()
        for index, value in enumerate(INITIAL_VALUES):
            initializer = keras.initializers.Constant(value)
            self.add_weight(np.shape(value), initializer, name=f"variable_{index}")
        self.built = True


class _Training:
    """Variables and their accumulating optimizer under one strategy."""

    def __init__(self, strategy, is_graph, micro_reduction, replica_reduction):
        self.strategy = strategy
        with strategy.scope():
            self.model = _Holder()
            self.optimizer = keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(
                    window_oracle.LEARNING_RATE,
                    momentum=window_oracle.MOMENTUM,
                    weight_decay=window_oracle.WEIGHT_DECAY,
                ),
                INITIAL_STEPS,
                micro_reduction=micro_reduction,
                replica_reduction=replica_reduction,
            )
            self.optimizer.build(self.model.trainable_variables)
            self.model.compile(self.optimizer)
        self._all = [*self.model.variables, *self.optimizer.variables]
        self._initial = [training.numbers(v) for v in self._all]
        step = self._micro_step
        # Traced once for each pattern of None, with and without weights.
        self.micro_step = tf.function(step, autograph=False) if is_graph else step

    def _micro_step(self, gradients, weights):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            local = [g if g is None else g[replica] for g in gradients]
            self.optimizer.apply_gradients(
                zip(local, self.model.trainable_variables, strict=True),
                weight=None if weights is None else weights[replica],
            )

        self.strategy.run(on_replica)

    def start_again(self):
        for variable, value in zip(self._all, self._initial, strict=True):
            variable.assign(value)

    def restore_from(self, other, store):
        if store == "set_weights":
            values = [training.numbers(v) for v in other.optimizer.variables]
            self.optimizer.set_weights(values)
            self.model.set_weights(other.model.get_weights())
            return
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, store)
            if store == "weights.h5":
                path = os.path.join(folder, "of.weights.h5")
                other.model.save_weights(path)
                self.model.load_weights(path)
            else:
                path = other.checkpoint().write(path)
                self.checkpoint().read(path).assert_consumed()

    def checkpoint(self):
        return tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)


class _Play:
    """Runs commands on the optimizer and on the oracle, and compares them."""

    def __init__(self, trainings, oracle, seen):
        self.trainings = trainings
        self.training = next(trainings)
        self.training.start_again()
        self.oracle = oracle
        self.seen = seen

    def run(self, command):
        self._note(command)
        optimizer = self.training.optimizer
        skipped, updates = self.oracle.skipped_windows, self.oracle.iterations
        match command:
            case MicroStep():
                self._micro_step(command)
            case SetAccumulationSteps():
                optimizer.accumulation_steps = command.value
                self.oracle.set_accumulation_steps(command.value)
            case Flush():
                optimizer.flush()
                self.oracle.close()
            case Reset():
                optimizer.reset()
                self.oracle.reset()
            case SaveAndRestore():
                other = next(self.trainings)
                other.start_again()
                other.restore_from(self.training, command.store)
                self.training = other
        self.seen["a window skipped"] += self.oracle.skipped_windows - skipped
        self.seen["an update"] += self.oracle.iterations - updates
        self.compare(command)

    def _micro_step(self, command):
        gradients = command.gradients(self.oracle.num_replicas)
        weights = command.weights
        tensors = [g if g is None else tf.constant(g) for g in gradients]
        self.training.micro_step(
            tensors, None if weights is None else tf.constant(weights, tf.float32)
        )
        length, weight = self.oracle.length, self.oracle.weight
        is_last = self.oracle.position + 1 >= length
        held = [s is not None for s in self.oracle.sums]
        absent = [not (a or b) for a, b in zip(held, command.has_gradient, strict=True)]
        self.oracle.micro_step(gradients, weights and np.array(weights))
        if is_last and any(absent):
            self._event("a variable without a gradient in the whole window")
        if is_last and weight == 0 and weights and not any(weights):
            self._event("a window that weighs nothing")

    def _note(self, command):
        self._event(type(command).__name__)
        match command:
            case MicroStep(weights=weights, poison=poison):
                self._event("weights" if weights else "no weights")
                if poison is not None:
                    self._event(f"{poison}")
                    self._event(f"not finite on replica {command.poisoned_replica}")
            case SaveAndRestore(store=store):
                self._event(store)

    def _event(self, name):
        hypothesis.event(name)
        self.seen[name] += 1

    def compare(self, command):
        optimizer, oracle = self.training.optimizer, self.oracle
        tolerance = tolerances.BY_DTYPE["float32"]
        for kind, actual, expected in (
            ("variable", self.training.model.trainable_variables, oracle.values),
            ("momentum", optimizer.inner_optimizer.momentums, oracle.momentums),
        ):
            for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
                np.testing.assert_allclose(
                    training.numbers(one),
                    other,
                    rtol=tolerance.rtol,
                    atol=tolerance.atol,
                    err_msg=f"{kind} {index} after {command}",
                )
        for counter in ("iterations", "position", "skipped_windows", "has_updated"):
            actual = training.numbers(getattr(optimizer, counter))
            assert actual == getattr(oracle, counter), (
                f"{counter} is {actual} and not {getattr(oracle, counter)} after "
                f"{command}"
            )
        assert optimizer.accumulation_steps == oracle.accumulation_steps


def _trainings(strategy, is_graph, *reductions):
    """Each time another optimizer; compiled ones take turns, tracing is slow."""
    compiled = [_Training(strategy, is_graph, *reductions) for _ in range(2)]
    while True:
        yield from (
            compiled if is_graph else [_Training(strategy, is_graph, *reductions)]
        )


def _must_be_seen(num_replicas, with_weights):
    events = {"a window skipped", "an update", "MicroStep", "no weights"}
    events |= {"a variable without a gradient in the whole window"}
    events |= {"SetAccumulationSteps", "Flush", "Reset", *STORES}
    events |= {"nan", "inf", "-inf"}
    events |= {f"not finite on replica {replica}" for replica in range(num_replicas)}
    if with_weights:
        events |= {"weights", "a window that weighs nothing"}
    return events


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
class PropertyTest(parameterized.TestCase):
    @parameterized.parameters(
        ("default", "eager", "mean", "sum"),
        ("default", "eager", "sum", "mean"),
        ("default", "eager", "running_mean", "mean"),
        ("default", "graph", "mean", "mean"),
        ("default", "graph", "running_mean", "sum"),
        ("mirrored", "graph", "mean", "sum"),
        ("mirrored", "graph", "mean", "mean"),
        ("mirrored", "graph", "sum", "mean"),
        ("mirrored", "graph", "running_mean", "mean"),
    )
    def test_any_sequence(self, strategy, mode, micro_reduction, replica_reduction):
        strategy = registry.STRATEGIES[strategy]()
        num_replicas = strategy.num_replicas_in_sync
        with_weights = micro_reduction != "running_mean"
        reductions = micro_reduction, replica_reduction
        trainings = _trainings(strategy, mode == "graph", *reductions)
        seen = collections.Counter()

        @hypothesis.settings(
            hypothesis.settings.get_profile("deterministic"), max_examples=25
        )
        @hypothesis.given(sequences(num_replicas, with_weights))
        @hypothesis.example(tour())
        def any_sequence(commands):
            oracle = window_oracle.Oracle(
                INITIAL_VALUES, num_replicas, INITIAL_STEPS, *reductions
            )
            is_drawn = commands != tour()
            play = _Play(trainings, oracle, seen if is_drawn else collections.Counter())
            for command in commands:
                play.run(command)

        any_sequence()
        expected = _must_be_seen(num_replicas, with_weights)
        self.assertEmpty({name for name in expected if not seen[name]})
