"""A stretch of a flat variable, saved and restored as if it were one by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# The name that TensorFlow's checkpoints give to the value of a variable.
VALUE = "VARIABLE_VALUE"


class PartOfVariable(tf.Module):
    """So small accumulators share a variable, and a file does not show it.

    Read in cross-replica context it is the sum (or the mean) over the replicas, and a
    restore gives each of them its share, as with a variable that is synchronised on
    read.

    Args:
        variable: Flat, synchronised on read, of aggregation sum or mean.
        start: The first element.
        end: After the last element.
        shape: Of the part.
        strategy: Owns the variable.
    """

    def __init__(
        self,
        variable: tf.Variable,
        start: int,
        end: int,
        shape: tuple[int, ...],
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__()
        # In a function, so that it is not tracked: it is saved by its parts only.
        self._whole = lambda: variable
        self._place = (start, end)
        self.shape = tuple(shape)
        self._strategy = strategy

    def numpy(self) -> np.ndarray:
        """Its value over all replicas."""
        start, end = self._place
        return np.reshape(self._whole().numpy()[start:end], self.shape)

    def assign(self, value: Any) -> Any:
        """Gives each replica its share of a value of all of them."""
        variable, (start, end) = self._whole(), self._place
        value = tf.cast(value, variable.dtype)
        if not value.shape.is_compatible_with(self.shape):  # unknown in a SavedModel
            raise ValueError(
                "A value must have the shape of the accumulator that it is loaded "
                f"into. Received: a value of shape {value.shape} for one of shape "
                f"{self.shape}. Load it into an optimizer of the model that was saved."
            )
        copies = self._strategy.experimental_local_results(variable)
        if variable.aggregation == tf.VariableAggregation.SUM:
            value /= self._strategy.num_replicas_in_sync
        shares = [copy[start:end].assign(tf.reshape(value, [-1])) for copy in copies]
        return tf.group(*shares)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Asked by `tf.train.Checkpoint`."""
        (start, end), variable = self._place, self._whole()

        def part() -> tf.Tensor:
            whole = tf.convert_to_tensor(variable)
            return tf.reshape(whole[start:end], self.shape)

        def none_yet() -> tf.Tensor:  # while a SavedModel is being loaded
            return tf.zeros(self.shape, variable.dtype)

        copy = self._strategy.experimental_local_results(variable)[0]
        is_there = tf.raw_ops.VarIsInitializedOp(resource=copy.handle)
        return {VALUE: tf.cond(is_there, part, none_yet)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> Any:
        """Asked by `tf.train.Checkpoint`."""
        return self.assign(restored_tensors[VALUE])

    # In a SavedModel the whole is there too, for the functions that use it.

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        module: Any = super()
        children = module._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children["whole"] = self._whole()
        return children

    def _deserialization_dependencies(self, children: Any) -> dict[str, Any]:
        return {"whole": children["whole"]}

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> list[Any]:
        copy_of_whole = object_map[self._whole()]
        start, end = self._place
        object_map[self] = PartOfVariable(
            copy_of_whole, start, end, self.shape, self._strategy
        )
        return []
