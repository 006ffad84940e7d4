"""Accumulation mixed into a Keras optimizer class, not put around an instance."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from keras_accum import arguments
from keras_accum.accumulation_state import AccumulationState
from keras_accum.already_reduced import GradientsAreReduced
from keras_accum.inner_optimizer import (
    check_may_surround,
    check_mixed_in,
    check_neither_by_itself,
)
from keras_accum.loss_scale import LossScale, NoLossScale
from keras_accum.optimizer import Accumulation


class AccumulationMixin(GradientsAreReduced, Accumulation):
    """Makes a Keras optimizer class accumulate by itself.

    Put it first among the bases. The arguments are those of the class, and those of
    `AccumulationOptimizer`, by keyword. A file of the plain class can be loaded, and
    `tf.train.Checkpoint` matches it too.

    Register the class with `keras.saving.register_keras_serializable` to load a model
    that was saved with it.

    Under a `mixed_float16` policy, `compile` puts Keras's own `LossScaleOptimizer`
    around any optimizer it does not know to scale: compile with
    `auto_scale_loss=False`. Inside one the mixin leaves scaling to it.

    Example:

    >>> class AccumulatingSGD(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    ...     pass
    >>> optimizer = AccumulatingSGD(1.0, momentum=0.9, accumulation_steps=2)
    >>> variable = keras.Variable(1.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy()), int(optimizer.iterations.numpy())
    (-1.0, 1)
    """

    def __init__(
        self,
        *args: Any,
        accumulation_steps: int,
        micro_reduction: str = "mean",
        replica_reduction: str = "sum",
        accumulator_dtype: arguments.AccumulatorDType = None,
        loss_scale: float | str | LossScale | None = None,
        on_nonfinite: str = "skip_window",
        reduce_every: str = "window",
        replica_groups: arguments.ReplicaGroupsArgument = None,
        **kwargs: Any,
    ) -> None:
        arguments.check_backend()
        check_mixed_in(self, kwargs)
        scale = arguments.resolved_loss_scale(loss_scale)
        super().__init__(*args, **kwargs)
        check_neither_by_itself(self)
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
        return self

    def _plain_class(self) -> Any:
        """The methods of the class that the mixin stands before."""
        return super(AccumulationState, self)

    def _build_plain(self, variables: list[Any]) -> None:
        self._plain_class().build(variables)

    def _apply_plain(self, gradients: list[Any], variables: list[Any]) -> None:
        self._plain_class().apply(gradients, variables)

    def _reduced_gradients(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # `GradientsAreReduced` says so for good

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """As the plain optimizer's method; call it before `build`."""
        self._plain_class().exclude_from_weight_decay(var_list, var_names)
        self._note_excluded(var_list, var_names)

    def _plain_variables(self) -> list[Any]:
        return self._plain_class().variables

    def _set_plain_weights(self, weights: list[Any]) -> None:
        for variable, weight in zip(self._plain_variables(), weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """Writes what the plain optimizer writes; the window is saved beside it."""
        for index, variable in enumerate(self._plain_variables()):
            store[str(index)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads what a plain optimizer of the class wrote."""
        variables = self._plain_variables()
        if len(store.keys()) != len(variables):
            warnings.warn(
                f"Skipping the variables of optimizer {self.name!r}, which has "
                f"{len(variables)} of them where the saved one has "
                f"{len(store.keys())}.",
                stacklevel=2,
            )
            return
        for index, variable in enumerate(variables):
            variable.assign(store[str(index)])

    def get_config(self) -> dict[str, Any]:
        """The class's arguments and those of the accumulation."""
        return {**self._plain_class().get_config(), **self._accumulation_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        plain_class: Any = super(AccumulationState, cls)
        return plain_class.from_config(config, custom_objects=custom_objects)

    def _hear_loss_scale_factor(self, value: Any, surrounding: Any) -> None:
        check_may_surround(surrounding)
        if value is not None:
            raise ValueError(
                "An accumulating optimizer has a loss scale of its own. "
                f"Received: loss_scale_factor={value}. Pass it loss_scale."
            )
        self._has_default_scale = False
        if not isinstance(self._loss_scale, NoLossScale):
            self._loss_scale = NoLossScale()
            self._loss_scale_argument = 1.0
            self.window_state.give_up(self._names_of_scale)
            warnings.warn(
                "A LossScaleOptimizer was put around an accumulating optimizer. It "
                "scales the loss from now on, and judges local gradients before they "
                "are reduced. To keep the scale that is counted in updates, compile "
                "with auto_scale_loss=False. Keras does not save that argument: "
                "instead of load_model, construct, compile and build the optimizer "
                "anew, then load_weights; or use keras_accum.AccumulationOptimizer.",
                stacklevel=2,
            )
