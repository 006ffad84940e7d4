"""What Graphcore's optimizers have in common."""

from __future__ import annotations

from typing import Any

import keras

from keras_accum import arguments
from keras_accum.v1_methods import V1Methods


class GraphcoreOptimizer(V1Methods):
    """Base class: what is common to Graphcore's optimizers here."""

    _objects_in_config: tuple[str, ...] = ("opt",)  # besides plain arguments

    def _factor_in_fit(self) -> float:
        # Keras's loss carries 1/replicas: reduced by mean here, or not at all.
        is_divided = self._reduction.replica == "mean" or self._groups.size == 1
        return float(self._strategy.num_replicas_in_sync) if is_divided else 1.0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        opt = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"opt": opt, "name": self.name, **self._said_arguments()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        for name in cls._objects_in_config:
            config[name] = keras.saving.deserialize_keras_object(
                config[name], custom_objects=custom_objects
            )
        return cls(**config)

    def _said_arguments(self) -> dict[str, Any]:
        return {}


def refuse_what_an_ipu_does(**options: Any) -> None:
    """Refuses options that mean something on an IPU only, unless they are off."""
    for name, value in options.items():
        if value:
            raise ValueError(
                f"`{name}` must be left out: only an IPU can do that. "
                f"Received: {name}={value!r}. Leave it out; optimizer state stays "
                "where its variables are."
            )
