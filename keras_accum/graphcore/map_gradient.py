"""Graphcore's MapGradientOptimizer: a function over gradients and variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum.arguments import serialized
from keras_accum.graphcore.graphcore_optimizer import GraphcoreOptimizer


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class MapGradientOptimizer(GraphcoreOptimizer):
    """Maps each gradient, with its variable, before the optimizer sees it.

    `compute_gradients` returns mapped gradients, and the call of `apply_gradients` that
    follows takes them, or what was made of them, as they are. Without one, as in `fit`,
    `apply_gradients` maps.

    Args:
        wrapped_optimizer: Any Keras optimizer.
        gradient_mapping_function: From gradient and variable to a gradient. It is not
            called for a gradient of None.
        name: Of the optimizer.

    Raises:
        TypeError: The function is not callable.

    Example:

    >>> optimizer = keras_accum.graphcore.MapGradientOptimizer(
    ...     keras.optimizers.SGD(1.0), lambda gradient, variable: 0.5 * gradient)
    >>> variable = keras.Variable(3.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(2.0), variable)])
    >>> float(variable.numpy())
    2.0

    Source: Graphcore's `ipu.optimizers.MapGradientOptimizer`.
    """

    _objects_in_config = ("wrapped_optimizer", "gradient_mapping_function")

    def __init__(
        self,
        wrapped_optimizer: Any,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str = "MapGradientOptimizer",
    ) -> None:
        if not callable(gradient_mapping_function):
            raise TypeError(
                "`gradient_mapping_function` must be a callable that takes a gradient "
                "and a variable. Received: gradient_mapping_function="
                f"{gradient_mapping_function!r}. Pass for example lambda g, v: g + "
                "0.01 * v."
            )
        super().__init__(wrapped_optimizer, 1, name=name)
        self._map = gradient_mapping_function
        self._num_computed = 0  # and not yet applied, over all replicas

    def _mapped_pair(self, gradient: Any, variable: Any) -> tuple[Any, Any]:
        if gradient is None:
            return None, variable
        return self._map(gradient, variable), variable

    def compute_gradients(
        self,
        loss: Any,
        var_list: Sequence[Any] | None = None,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Any]]:
        """As the base class's, and mapped."""
        pairs = super().compute_gradients(loss, var_list, tape, grad_loss)
        self._num_computed += 1
        return [self._mapped_pair(gradient, variable) for gradient, variable in pairs]

    def scale_loss(self, loss: Any) -> Any:
        """As the base class's: what `fit` calls before it takes the gradients."""
        self._num_computed = 0
        return super().scale_loss(loss)

    def apply_gradients(
        self,
        grads_and_vars: Iterable,
        global_step: Any = None,
        name: str | None = None,
        weight: Any = None,
    ) -> Any:
        """As the base class's; maps what `compute_gradients` has not."""
        pairs = list(grads_and_vars)
        if self._num_computed:
            self._num_computed -= 1
        else:
            pairs = [
                self._mapped_pair(gradient, variable) for gradient, variable in pairs
            ]
        return super().apply_gradients(pairs, global_step, name, weight)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        config["wrapped_optimizer"] = config.pop("opt")
        mapping = serialized(self._map)
        return {**config, "gradient_mapping_function": mapping}
