"""Accumulation put around a Keras optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from keras_accum import arguments
from keras_accum.already_reduced import gradients_are_reduced
from keras_accum.inner_optimizer import (
    check_neither_accumulates_nor_scales,
    checked_inner_optimizer,
    is_multi_optimizer,
)
from keras_accum.loss_scale import LossScale
from keras_accum.optimizer import Accumulation


def _delegated(name: str) -> Any:
    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # Keras's constructor sets its defaults before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`; settable.")


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumulationOptimizer(Accumulation, keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer so that N micro-batches train as one large batch.

    Gradients are added up where they arise, reduced over the replicas once per
    window, divided, unscaled, checked, and handed once to the inner optimizer, which
    clips, decays, moves its average and counts as if it had seen one large batch.

    It is a `keras.optimizers.LossScaleOptimizer` for one reason: `compile` then sees
    that it scales its own loss, and puts no other one around it.

    What the window holds is saved with the model, by all of Keras's formats and by
    `tf.train.Checkpoint`, and taken up again on any number of replicas. As with a
    learning rate, the `accumulation_steps` of a file replace those of the
    constructor. A window with weights that is finished on another number of replicas
    takes them for rows, which are fewer on each of more replicas; `tf.train.Checkpoint`
    cannot do that. Under MultiWorkerMirroredStrategy a save in mid-window sums over the
    workers, so all of them must call it.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, `MultiOptimizer` included,
            that neither accumulates nor scales the loss by itself.
        accumulation_steps: Micro steps per update, an int >= 1. Windows of one need
            and have no accumulators.
        micro_reduction: How the gradients of a window combine. `"mean"`: their
            weighted mean. `"sum"`: their weighted sum. `"running_mean"`: the mean,
            kept while the window fills, so that a float16 accumulator cannot overflow
            by the length of the window; takes no weights.
        replica_reduction: How they combine over replicas. `"sum"` is right for losses
            that carry 1/R already, as Keras's do in `fit`; else `"mean"`.
        accumulator_dtype: What gradients are added up in: a floating dtype, or a
            callable from variable to dtype. None is float32 for float16 and bfloat16
            variables, else the variable's own. The inner optimizer receives the
            variable's dtype, or a wider one that was chosen here.
        loss_scale: None, `"dynamic"`, a finite number > 0, or a `DynamicLossScale`,
            `ScheduledLossScale` or `AutomaticLossScale`. None is dynamic under a
            `mixed_float16` policy, else no scale; 1.0 is never one.
        on_nonfinite: What becomes of an infinity or a NaN. `"skip_window"`: a window
            whose reduced gradient holds one makes no update on any replica, and is
            counted in `skipped_windows`. `"skip_micro_batch"`: a micro-batch that
            holds one leaves the window and its divisor, on the replica where it was,
            and is counted in `skipped_micro_batches`; costs a pass over each
            micro-gradient. `"propagate"`: it reaches the variables.
        reduce_every: `"window"` reduces over the replicas once per window.
            `"micro_step"` reduces each micro-batch and accumulates what is reduced: the
            same numbers, for N times the traffic.
        replica_groups: None; the size of groups of consecutive replicas; or a list of
            lists of replica ids. Replicas sum inside their group only, so that the
            copies of a variable part ways from group to group, and nothing can be
            saved. It costs as many times the traffic as there are groups, and one more
            collective of a few scalars, for one verdict over all groups.
        name: Of the optimizer.

    Raises:
        TypeError: The inner optimizer is none, or an argument's type is wrong.
        ValueError: An argument's value is wrong; the inner optimizer accumulates or
            scales; a strategy that is not supported.

    Example:

    >>> optimizer = keras_accum.AccumulationOptimizer(
    ...     keras.optimizers.SGD(1.0), accumulation_steps=2)
    >>> variable = keras.Variable([1.0, 2.0])
    >>> for gradient in ([1.0, 1.0], [3.0, 1.0]):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    ...     print(variable.numpy(), int(optimizer.position), int(optimizer.iterations))
    [1. 2.] 1 0
    [-1.  1.] 0 1
    """

    def __init__(
        self,
        inner_optimizer: Any,
        accumulation_steps: int,
        *,
        micro_reduction: str = "mean",
        replica_reduction: str = "sum",
        accumulator_dtype: arguments.AccumulatorDType = None,
        loss_scale: float | str | LossScale | None = None,
        on_nonfinite: str = "skip_window",
        reduce_every: str = "window",
        replica_groups: arguments.ReplicaGroupsArgument = None,
        name: str | None = None,
    ) -> None:
        arguments.check_backend()
        inner_optimizer = checked_inner_optimizer(inner_optimizer, Accumulation)
        arguments.check_inner_scope(inner_optimizer, arguments.supported_strategy())
        scale = arguments.resolved_loss_scale(loss_scale)
        super().__init__(inner_optimizer, name=name)  # pyright: ignore[reportCallIssue]
        self._set_up(
            accumulation_steps,
            micro_reduction,
            replica_reduction,
            accumulator_dtype,
            scale,
            on_nonfinite,
            reduce_every,
            replica_groups,
            is_default_scale=loss_scale is None,
        )

    def _plain(self) -> Any:
        return self.inner_optimizer

    def _build_plain(self, variables: list[Any]) -> None:
        self.inner_optimizer.build(variables)
        check_neither_accumulates_nor_scales(self.inner_optimizer, Accumulation)

    def _apply_plain(self, gradients: list[Any], variables: list[Any]) -> None:
        if is_multi_optimizer(self.inner_optimizer):
            gradients, variables = self._known_variables.padded(gradients, variables)
        self.inner_optimizer.apply(gradients, variables)

    def _reduced_gradients(self) -> contextlib.AbstractContextManager:
        return gradients_are_reduced(self.inner_optimizer)

    # The members that are the inner optimizer's.

    learning_rate = _delegated("learning_rate")
    weight_decay = _delegated("weight_decay")
    clipnorm = _delegated("clipnorm")
    clipvalue = _delegated("clipvalue")
    global_clipnorm = _delegated("global_clipnorm")
    use_ema = _delegated("use_ema")
    ema_momentum = _delegated("ema_momentum")
    ema_overwrite_frequency = _delegated("ema_overwrite_frequency")

    @property
    def iterations(self) -> Any:
        """Updates made: the inner optimizer's counter."""
        return self.inner_optimizer.iterations

    @property
    def optimizers(self) -> list[Any]:
        """The children of a `MultiOptimizer` inside; else not an attribute."""
        return self.inner_optimizer.optimizers

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """As the inner optimizer's method; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)
        self._note_excluded(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """As the inner optimizer's method: moves its EMA into the model."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as by all of Keras's optimizers on TensorFlow.

        Raises:
            ValueError: Always.
        """
        return self.inner_optimizer.stateless_apply(*args, **kwargs)

    # What is saved.

    def _plain_variables(self) -> list[Any]:
        return self.inner_optimizer.variables

    def _set_plain_weights(self, weights: list[Any]) -> None:
        self.inner_optimizer.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes what the inner optimizer writes; the window is saved beside it."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what a plain optimizer of the inner one's class wrote."""
        self.inner_optimizer.load_own_variables(store)

    def __dir__(self) -> list[str]:
        # Keras saves what it finds here, and has the inner variables already.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        """The arguments, with a `loss_scale` of None as what it was resolved to."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **self._accumulation_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        inner_optimizer = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner_optimizer, **config)  # pyright: ignore[reportCallIssue]

    def _hear_loss_scale_factor(self, value: Any, surrounding: Any) -> None:
        setter = "you" if surrounding is None else type(surrounding).__name__
        raise ValueError(
            "An AccumulationOptimizer scales its own loss, and cannot stand inside "
            "another optimizer. "
            f"Received: loss_scale_factor={value}, set by {setter}. Put it outermost, "
            "and pass it loss_scale."
        )
