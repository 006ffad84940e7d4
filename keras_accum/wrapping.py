"""What a wrapper shows of the optimizer inside, and what it saves."""

from __future__ import annotations

from typing import Any

import keras

from keras_accum import arguments
from keras_accum.accumulation_state import AccumulationState


def _delegated(name: str) -> Any:
    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # Keras's constructor sets its defaults before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`; settable.")


class Wrapping(AccumulationState):
    """The members of a wrapper that are its inner optimizer's, and its saving."""

    inner_optimizer: Any

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

    def finalize_variable_values(self, var_list: Any) -> None:
        """As the inner optimizer's method: moves its EMA into the model."""
        self.inner_optimizer.finalize_variable_values(var_list)

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
            "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            **self._accumulation_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        inner_optimizer = keras.optimizers.deserialize(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner_optimizer, **config)  # pyright: ignore[reportCallIssue]

    def _hear_loss_scale_factor(self, value: Any, surrounding: Any) -> None:
        raise ValueError(
            "An AccumulationOptimizer scales its own loss and cannot stand inside "
            "another optimizer. "
            f"Received: loss_scale_factor={value}, set by {surrounding}. Put it "
            "outermost, and pass it loss_scale."
        )
