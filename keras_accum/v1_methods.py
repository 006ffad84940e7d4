"""The methods of TensorFlow 1 optimizers, on top of an accumulating one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum import arguments
from keras_accum.known_variables import display_name, native
from keras_accum.wrapper import AccumulationOptimizer


class Variables(list):
    """A list that can also be called, as `variables` once was a method."""

    def __call__(self) -> list[Any]:
        """The variables."""
        return list(self)


class V1Methods(AccumulationOptimizer):
    """Base class of the facades: loops that were written for TensorFlow 1 run on it.

    A facade says what its `compute_gradients` multiplies the loss by, and what a loss
    of `fit` is multiplied by, which carries 1/replicas already.
    """

    def _factor_of_loss(self) -> float:
        """What `compute_gradients` multiplies the loss by, beside the loss scale."""
        return 1.0

    def _scaled(self, of_loss: tf.Tensor) -> tf.Tensor:
        """The gradient of the loss, with all that `compute_gradients` multiplies by."""
        return self._loss_scale.scale(of_loss * self._factor_of_loss())

    def _factor_in_fit(self) -> float:
        """What `scale_loss` multiplies a loss of `fit` by."""
        return 1.0

    def scale_loss(self, loss: Any) -> Any:
        """What `fit` takes gradients of: the loss scale and the reduction are in it."""
        scaled, factor = super().scale_loss(loss), self._factor_in_fit()
        return scaled if factor == 1.0 else scaled * factor

    def compute_gradients(
        self,
        loss: Any,
        var_list: Sequence[Any] | None = None,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Any]]:
        """Gradients of a loss of this replica, for `apply_gradients`.

        Args:
            loss: A tensor, or a callable without arguments that returns one.
            var_list: The variables; None for those that the tape watches, or that the
                optimizer was built for.
            tape: The tape that recorded a loss that is a tensor. Not needed in a
                graph, such as that of a `tf.function`.
            grad_loss: What the gradient of the loss is; None is 1.

        Returns:
            Pairs of gradient, or None, and variable.

        Raises:
            ValueError: There is nothing to take the gradient with, or of.
        """
        if tape is None and callable(loss):
            with tf.GradientTape() as tape:
                loss = loss()
        variables = self._variables_of(var_list, tape)
        of_loss = tf.ones_like(loss) if grad_loss is None else grad_loss
        of_loss = tf.cast(self._scaled(of_loss), loss.dtype)
        natives = [native(variable) for variable in variables]
        if tape is not None:
            gradients = tape.gradient([loss], natives, output_gradients=[of_loss])
        elif not tf.executing_eagerly():
            gradients = tf.gradients(loss, natives, grad_ys=of_loss)
        else:
            raise ValueError(
                "A loss that is computed eagerly needs the tape that recorded it. "
                "Received: tape=None. Pass tape=..., or a callable that computes the "
                "loss."
            )
        return list(zip(gradients, variables, strict=True))

    def _variables_of(
        self, var_list: Sequence[Any] | None, tape: tf.GradientTape | None
    ) -> list[Any]:
        if var_list is not None:
            return list(var_list)
        if self.built:
            return list(self._known_variables)
        watched = [] if tape is None else list(tape.watched_variables())
        if not watched:
            raise ValueError(
                "There must be variables to take the gradient by. Received: "
                "var_list=None, with an optimizer that is not built and no tape that "
                "watches any. Pass var_list=model.trainable_variables."
            )
        return watched

    def apply_gradients(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        grads_and_vars: Iterable,
        global_step: Any = None,
        name: str | None = None,
        weight: Any = None,
    ) -> Any:
        """Takes one micro step; an update adds 1 to `global_step`.

        Args:
            grads_and_vars: Pairs of gradient, or None, and variable.
            global_step: None, or a variable that counts updates.
            name: Ignored: there are no named operations any more.
            weight: See `AccumulationOptimizer.apply_gradients`.

        Returns:
            `iterations`.
        """
        iterations = super().apply_gradients(grads_and_vars, weight=weight)
        if global_step is not None:
            counter = native(global_step)
            counter.assign_add(tf.cast(self.has_updated, counter.dtype))
        return iterations

    def minimize(
        self,
        loss: Any,
        var_list: Sequence[Any] | None = None,
        global_step: Any = None,
        tape: tf.GradientTape | None = None,
        grad_loss: Any = None,
    ) -> Any:
        """`compute_gradients` and `apply_gradients`."""
        pairs = self.compute_gradients(loss, var_list, tape=tape, grad_loss=grad_loss)
        return self.apply_gradients(pairs, global_step=global_step)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` described."""
        config = arguments.deserialized(config, custom_objects)
        config["opt"] = keras.saving.deserialize_keras_object(
            config["opt"], custom_objects=custom_objects
        )
        return cls(**config)

    def get_name(self) -> str:
        """The optimizer's name."""
        return self.name

    @property
    def variables(self) -> Variables:
        """All variables; `variables()` works too."""
        return Variables(super().variables)

    def __dir__(self) -> list[str]:
        # `tf.train.Checkpoint` saves the slots of what lists this name; Keras's are
        # saved as variables of the inner optimizer already.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def get_slot(self, var: Any, name: str) -> Any:
        """The slot of a variable, such as `"momentum"`; None if there is none."""
        return self._slots_of(var).get(name)

    def get_slot_names(self) -> list[str]:
        """The names of the slots that variables have."""
        variables = self._known_variables if self.built else []
        names = {name for variable in variables for name in self._slots_of(variable)}
        return sorted(names)

    def _slots_of(self, variable: Any) -> dict[str, Any]:
        """By name, the slots of a variable; of those whose path is the same, its own.

        Keras names a slot by the path of its variable, and what it is, and makes the
        slots in the order of the variables.
        """
        known = list(self._known_variables) if self.built else []
        paths = [_path_in_slots(other) for other in known]
        path = _path_in_slots(variable)
        longer = tuple(f"{other}_" for other in paths if other.startswith(f"{path}_"))
        namesakes = [id(native(v)) for v in known if _path_in_slots(v) == path]
        if id(native(variable)) not in namesakes:
            return {}
        place = namesakes.index(id(native(variable)))
        slots: dict[str, list[Any]] = {}
        for slot in self._plain_variables():
            is_other = longer and slot.name.startswith(longer)
            if slot.name.startswith(f"{path}_") and not is_other:
                slots.setdefault(slot.name[len(path) + 1 :], []).append(slot)
        return {
            name: found[min(place, len(found) - 1)] for name, found in slots.items()
        }


def _path_in_slots(variable: Any) -> str:
    return display_name(variable).replace("/", "_").replace(":", "_")
