"""Graphcore's IPUOptimizer: everything in one, mapped on the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum.arguments import checked_accumulation_steps, serialized
from keras_accum.graphcore.graphcore_optimizer import (
    GraphcoreOptimizer,
    refuse_what_an_ipu_does,
)
from keras_accum.loss_scale import checked_scale
from keras_accum.weight_decay import checked_rate


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
def decays_nothing(variable: Any) -> bool:
    """The default filter: no variable decays."""
    return False


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class IPUOptimizer(GraphcoreOptimizer):
    """Accumulates, reduces, unscales and decays, as Graphcore's `IPUOptimizer`.

    The update is made with the mean over all replicas, of all workers, of the mean
    over N micro-batches of g + weight_decay x variable, divided by `grad_scale`. In
    detail, and where the original differs:

    - Callers multiply the loss by `grad_scale`, and give the decay in such units:
      `weight_decay` times `grad_scale` for a decay of `weight_decay`. In `fit` the loss
      is multiplied for them.
    - `grad_scale` divides every gradient except those of statistics, whose name
      contains "batch_norm/moving_" or is Keras's moving_mean or moving_variance.
    - With `pipelining`, `apply_gradients` is called on the last micro-batch of a
      window only, with what the caller has added up; `compute_gradients` divides by N.
    - The decay is the same in both modes, whatever the number of workers. The original
      adds it once per worker.
    - A gradient of None passes.

    Args:
        optimizer: Any Keras optimizer.
        sharded: Of an IPU; False.
        replicas: Replicas of each worker, of the strategy in whose scope it is made.
        gradients_to_accumulate: N, an int >= 1.
        pipelining: Whether the caller accumulates.
        grad_scale: What gradients are divided by, > 0.
        weight_decay: Of the coupled form, in scaled units, >= 0.
        weight_decay_filter_fn: From variable to whether it decays; by default none.
        var_list: What `compute_gradients` takes gradients by; None for its own.
        gradient_accumulation_count: The later name of `gradients_to_accumulate`.
        name: Of the optimizer.

    Raises:
        ValueError: An argument's value is wrong, `replicas` do not fit the strategy, or
            only an IPU can do it.

    Example:

    >>> optimizer = keras_accum.graphcore.IPUOptimizer(
    ...     keras.optimizers.SGD(1.0), sharded=False, replicas=1,
    ...     gradients_to_accumulate=2, weight_decay=0.5,
    ...     weight_decay_filter_fn=lambda variable: True)
    >>> variable = keras.Variable(2.0)
    >>> for gradient in (0.0, 1.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    0.5

    Source: the `IPUOptimizer` of Graphcore's public training examples.
    """

    _objects_in_config = ("optimizer", "weight_decay_filter_fn")

    def __init__(
        self,
        optimizer: Any,
        sharded: bool,
        replicas: int,
        gradients_to_accumulate: int | None = None,
        pipelining: bool = False,
        grad_scale: float = 1.0,
        weight_decay: float = 0.0,
        weight_decay_filter_fn: Callable[[Any], bool] = decays_nothing,
        var_list: Sequence[Any] | None = None,
        gradient_accumulation_count: int | None = None,
        name: str = "IPUOptimizer",
    ) -> None:
        refuse_what_an_ipu_does(sharded=sharded)
        count = _one_of(gradients_to_accumulate, gradient_accumulation_count)
        scale = checked_scale("grad_scale", grad_scale)
        rate = checked_rate("weight_decay", weight_decay)
        _check_replicas(replicas)
        super().__init__(
            optimizer,
            1 if pipelining else count,
            replica_reduction="mean",
            loss_scale=scale,
            name=name,
        )
        self._count = count
        self.__dict__["_var_list"] = var_list  # not to be saved with the optimizer
        self._arguments = {
            "sharded": False,
            "replicas": replicas,
            "gradients_to_accumulate": count,
            "pipelining": bool(pipelining),
            "grad_scale": scale,
            "weight_decay": rate,
        }
        self._filter = weight_decay_filter_fn
        if rate > 0:
            self.decay_weights(
                rate / scale, decoupled=False, filter=weight_decay_filter_fn
            )

    def _scaled(self, of_loss: tf.Tensor) -> tf.Tensor:
        # The loss scale is in the loss already.
        return of_loss / self._count if self._arguments["pipelining"] else of_loss

    def compute_gradients(
        self,
        loss: Any,
        var_list: Sequence[Any] | None = None,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Any]]:
        """As the base class's, of a loss that the caller has scaled."""
        variables = self._var_list if var_list is None else var_list
        return super().compute_gradients(loss, variables, tape, grad_loss)

    def get_config(self) -> dict[str, Any]:
        """The arguments, without `var_list`."""
        config = super().get_config()
        config["optimizer"] = config.pop("opt")
        decay_filter = serialized(self._filter)
        return {**config, **self._arguments, "weight_decay_filter_fn": decay_filter}


def _one_of(gradients_to_accumulate: Any, gradient_accumulation_count: Any) -> int:
    if (gradients_to_accumulate is None) == (gradient_accumulation_count is None):
        raise ValueError(
            "Exactly one of `gradients_to_accumulate` and its later name "
            "`gradient_accumulation_count` must be given. Received: "
            f"gradients_to_accumulate={gradients_to_accumulate!r}, "
            f"gradient_accumulation_count={gradient_accumulation_count!r}. Leave one "
            "out."
        )
    if gradients_to_accumulate is None:
        name = "gradient_accumulation_count"
        return checked_accumulation_steps(gradient_accumulation_count, name)
    return checked_accumulation_steps(
        gradients_to_accumulate, "gradients_to_accumulate"
    )


def _check_replicas(replicas: Any) -> None:
    in_sync = tf.distribute.get_strategy().num_replicas_in_sync
    is_integer = isinstance(replicas, int) and not isinstance(replicas, bool)
    if not is_integer or replicas < 1 or in_sync % replicas:
        raise ValueError(
            "`replicas` must be those that each worker of the strategy has. Received: "
            f"replicas={replicas!r}, under a strategy of {in_sync} replicas in all. "
            "Construct the optimizer in the scope of the strategy."
        )
