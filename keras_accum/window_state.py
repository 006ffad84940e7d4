"""What is saved of a window, beside the optimizer's own variables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from keras_accum.part_of_variable import PartOfVariable

LENGTHS = ("length", "next_length")
# What is a sum over micro-batches times their weights.
SUMS = ("weight", "accumulator_")


@keras.saving.register_keras_serializable(package="keras_accum")
class WindowState(keras.layers.Layer):
    """Holds the counters and accumulators of a window, and saves and restores them.

    A layer, because layers are what Keras saves wherever it finds them. An optimizer
    that has one as an attribute keeps its own variables as a plain optimizer has
    them, so that files can be exchanged: a plain optimizer's file has no window, and
    a plain optimizer does not look for one.

    Counters are kept by name and accumulators by the index of their variable. Names
    made of variables would differ from one instance of a model to the next.

    Args:
        strategy: Owns the variables.
        reset: Empties the window; called when a file holds none.
        make_room: Called with a window's length before such a window is loaded.
        is_running_mean: Whether the accumulators hold means, not sums.
        can_be_saved: Whether one file can hold what all replicas have.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        reset: Callable[[], None],
        make_room: Callable[[int], None],
        is_running_mean: bool,
        can_be_saved: bool = True,
    ) -> None:
        super().__init__(name="window_state")
        self._strategy = strategy
        self._reset = reset
        self._make_room = make_room
        self._is_running_mean = is_running_mean
        self._can_be_saved = can_be_saved
        self.checkpoints = _Checkpoints(self)
        self._names: list[str] = []
        self._held: list[keras.Variable] = []
        self._largest: set[str] = set()
        self._to_be_loaded: Any = None

    def new_variable(
        self,
        name: str,
        *,
        shape: Any = (),
        dtype: str = "int32",
        initial: float = 0,
        synchronization: str = "auto",
        aggregation: str = "none",
        keeps_largest: bool = False,
    ) -> tf.Variable:
        """Makes a variable that is saved and restored; returns the `tf.Variable`.

        With `keeps_largest`, the largest of its copies is saved.
        """
        variable = keras.Variable(
            keras.initializers.Constant(initial),
            shape=shape,
            dtype=dtype,
            trainable=False,
            synchronization=synchronization,
            aggregation=aggregation,
            name=name,
        )
        self._names.append(name)
        self._held.append(variable)
        if keeps_largest:
            self._largest.add(name)
        setattr(self, name, variable)
        return variable.value

    def new_shared(
        self, names: list[str], *, shapes: list[Any], dtype: str, aggregation: str
    ) -> tf.Variable:
        """Makes one variable for several values, which are saved one by one.

        Args:
            names: Of the values.
            shapes: Of the values, which lie end to end.
            dtype: Of all of them.
            aggregation: As in `new_variable`; it is synchronised on read.
        """
        ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int).tolist()
        variable = keras.Variable(
            keras.initializers.Zeros(),
            shape=(ends[-1],),
            dtype=dtype,
            trainable=False,
            synchronization="on_read",
            aggregation=aggregation,
            name="accumulators",
        )
        self._held.append(variable)
        starts = [0, *ends[:-1]]
        for name, shape, start, end in zip(names, shapes, starts, ends, strict=True):
            self._names.append(name)
            part = PartOfVariable(variable.value, start, end, shape, self._strategy)
            setattr(self, name, part)
        return variable.value

    @property
    def names(self) -> list[str]:
        """Of the variables, in the order in which they were made."""
        return list(self._names)

    def finish(self) -> None:
        """All variables are made: loads what was to be loaded before that."""
        self.built = True
        store, self._to_be_loaded = self._to_be_loaded, None
        if store is not None:
            self.load_own_variables(store)

    def give_up(self, names: list[str]) -> None:
        """Neither saves nor loads these variables any more."""
        given_up = [getattr(self, name) for name in names]
        self._names = [name for name in self._names if name not in names]
        self._held = [
            variable
            for variable in self._held
            if not any(variable is each for each in given_up)
        ]

    @property
    def held(self) -> list[keras.Variable]:
        """The variables, in the order in which they were made."""
        return list(self._held)

    @property
    def longest(self) -> int:
        """The length of the present window or the next one, as far as it is known."""
        if not tf.executing_eagerly():  # in the graph of a `tf.saved_model`
            return 2 if hasattr(self, "has_gradient") else 1
        return max(int(getattr(self, name).numpy()) for name in LENGTHS)

    def save_own_variables(self, store: Any) -> None:
        """Writes what a resumed training needs, whatever the number of replicas."""
        self._check_can_be_saved()
        for name in self._names:
            variable = getattr(self, name)
            if name in self._largest:
                copies = self._strategy.experimental_local_results(variable.value)
                store[name] = np.max([copy.numpy() for copy in copies], axis=0)
            else:
                store[name] = variable.numpy()
        store["is_running_mean"] = np.asarray(int(self._is_running_mean))
        store["replicas"] = np.asarray(self._strategy.num_replicas_in_sync)

    def load_own_variables(self, store: Any) -> None:
        """Takes up the window that was saved; an empty store is an empty window."""
        self._check_can_be_saved()
        saved = set(store.keys())
        if not saved:
            self._reset()
            return
        self._make_room(max(int(np.asarray(store[name])) for name in LENGTHS))
        if not self.built:  # the accumulators are not there yet
            self._to_be_loaded = {name: np.asarray(store[name]) for name in saved}
            for name in LENGTHS:
                getattr(self, name).assign(self._to_be_loaded[name])
            return
        self._check(saved, store)
        constructed_with = int(self.next_length.numpy())
        self._reset()  # a file of windows of one has no accumulators to assign
        factor = self._rows_factor(store)
        for name in self._names:
            if name in saved:
                variable, value = getattr(self, name), np.asarray(store[name])
                if name.startswith(SUMS) and name not in self._largest:
                    value = (value * factor).astype(value.dtype)
                variable.assign(value)
        restored = int(self.next_length.numpy())
        if restored != constructed_with:
            logging.warning(
                "accumulation_steps is %d, as saved; the optimizer was constructed "
                "with %d. Set `optimizer.accumulation_steps` after loading to change "
                "it.",
                restored,
                constructed_with,
            )

    def _check_can_be_saved(self) -> None:
        if not self._can_be_saved:
            raise ValueError(
                "An optimizer must have one group of replicas to be saved or loaded: a "
                "file holds one copy of a variable, and each group has its own. "
                "Received: replica_groups of several groups. Leave replica_groups out."
            )

    def _rows_factor(self, store: Any) -> float:
        """What sums are multiplied by, so that weights mean the same as before.

        A replica's weight is its rows, and of the same rows each of more replicas has
        fewer. Without weights a micro step weighs 1 on any number of them.
        """
        if not int(np.asarray(store["is_weighted"])):
            return 1.0
        saved_on = int(np.asarray(store["replicas"]))
        return saved_on / self._strategy.num_replicas_in_sync

    def _check(self, saved: set[str], store: Any) -> None:
        in_file = sum(name.startswith("accumulator_") for name in saved)
        here = sum(name.startswith("accumulator_") for name in self._names)
        position = int(np.asarray(store["position"]))
        if in_file and here and in_file != here:
            raise ValueError(
                "The saved window must hold one accumulator for each variable of the "
                f"optimizer. Received: {in_file} saved accumulators for {here} "
                "variables. Load it into an optimizer of the model that was saved."
            )
        if position == 0:
            return
        scale = float(np.asarray(store["loss_scale"])) if "loss_scale" in saved else 1.0
        has_scale = "loss_scale" in self._names
        if has_scale != ("loss_scale" in saved):
            raise ValueError(
                "The saved window is open, and must be finished with a loss scale if "
                f"it was begun with one, without if not. Received: loss_scale={scale} "
                "in the file. Construct the optimizer with the loss_scale it was "
                "saved with."
            )
        if bool(np.asarray(store["is_running_mean"])) != self._is_running_mean:
            raise ValueError(
                "The saved window is open, and a running mean cannot be finished as a "
                "sum, nor a sum as a running mean. Received: a file with another "
                "micro_reduction. Construct the optimizer with the one it was saved "
                "with."
            )


class _Checkpoints(tf.train.experimental.PythonState):
    """Asked by `tf.train.Checkpoint`, which assigns variables past their owner."""

    def __init__(self, window_state: WindowState) -> None:
        super().__init__()
        self._window_state = weakref.ref(window_state)

    def _owner(self) -> Any:
        owner: Any = self._window_state()
        owner._check_can_be_saved()
        return owner

    def serialize(self) -> str:
        """What must be known before variables are restored."""
        return str(self._owner().longest)

    def deserialize(self, string_value: str) -> None:
        """Makes room for a window as long as the one that was saved."""
        self._owner()._make_room(int(string_value))
