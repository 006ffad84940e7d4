"""The variables that an optimizer was built for: their order, and who they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# A `keras.Variable` or a `tf.Variable`: the engine does not know which Keras it serves.
Variable = Any


def native(variable: Variable) -> tf.Variable:
    """The `tf.Variable` behind a Keras variable; a `tf.Variable` as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def display_name(variable: Variable) -> str:
    """The path of a Keras variable, or the name of a `tf.Variable`."""
    return getattr(variable, "path", None) or variable.name


def is_overwritten(variable: Variable) -> bool:
    """Whether a variable takes its gradient as its value (float8 statistics)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _is_trainable(variable: Variable) -> bool:
    return getattr(variable, "trainable", True)


class KnownVariables(Sequence):
    """An index of variables, by identity.

    Args:
        variables: The variables, in the order of the accumulators.
        strategy: Owns them. A replica's own copy, which is what a gradient tape
            lists as watched, is found as well as the whole variable.
    """

    def __init__(
        self, variables: Sequence[Variable], strategy: tf.distribute.Strategy
    ) -> None:
        self._variables = list(variables)
        self._were_trainable = [_is_trainable(variable) for variable in variables]
        self._indices: dict[int, int] = {}
        for index, variable in enumerate(self._variables):
            whole = native(variable)
            for copy in (whole, *strategy.experimental_local_results(whole)):
                self._indices[id(copy)] = index

    def __len__(self) -> int:
        return len(self._variables)

    def __getitem__(self, index: Any) -> Any:
        return self._variables[index]

    def at(self, indices: Sequence[int]) -> list[Variable]:
        """The variables at some indices."""
        return [self._variables[index] for index in indices]

    def place(self, variable: Variable) -> int:
        """The index of a variable; KeyError when it is not known."""
        return self._indices[id(native(variable))]

    def not_frozen(self) -> list[int]:
        """The indices of all but the variables that were frozen after the build."""
        return [
            index
            for index, variable in enumerate(self._variables)
            if _is_trainable(variable) or not self._were_trainable[index]
        ]

    def padded(
        self, gradients: Sequence[Any], variables: Sequence[Variable]
    ) -> tuple[list[Any], list[Variable]]:
        """All variables in their order, with None for the gradients not given."""
        given = {self.place(v): g for g, v in zip(gradients, variables, strict=True)}
        return [given.get(i) for i in range(len(self))], list(self._variables)
