"""What an optimizer with the mixin saves, and what it does inside another optimizer."""

from __future__ import annotations

import warnings
from typing import Any

from keras_accum import arguments
from keras_accum.accumulation_state import AccumulationState
from keras_accum.inner_optimizer import check_may_surround


class MixingIn(AccumulationState):
    """The plain optimizer is this one's own class, further down its bases."""

    def _plain_variables(self) -> list[Any]:
        return super(AccumulationState, self).variables

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
        return {**super().get_config(), **self._accumulation_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        return super().from_config(config, custom_objects=custom_objects)

    def _hear_loss_scale_factor(self, value: Any, surrounding: Any) -> None:
        check_may_surround(surrounding)
        if value is not None:
            raise ValueError(
                "An accumulating optimizer has a loss scale of its own. "
                f"Received: loss_scale_factor={value}. Pass it loss_scale."
            )
        if self._loss_scale is not None:
            self._loss_scale = None
            warnings.warn(
                "A LossScaleOptimizer was put around an accumulating optimizer. It "
                "scales the loss from now on, and judges local gradients before they "
                "are reduced. To keep the scale that is counted in updates, compile "
                "with auto_scale_loss=False.",
                stacklevel=2,
            )
