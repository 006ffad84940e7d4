"""TPU's CrossShardOptimizer: names and arguments, mapped on an accumulating one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum.loss_scale import LossScale
from keras_accum.v1_methods import V1Methods

# Those of `tf.compat.v1.losses.Reduction`, and what people write.
REDUCTIONS = {
    "sum": "sum",
    "mean": "mean",
    "weighted_sum": "sum",
    "weighted_mean": "mean",
}


@keras.saving.register_keras_serializable(package="keras_accum")
class CrossShardOptimizer(V1Methods):
    """Sums gradients over the shards (replicas), then lets an optimizer update.

    `compute_gradients` multiplies the loss by 1/shards for a mean, or by 1/(shards in a
    group) with groups; `apply_gradients` sums. In `fit` Keras has multiplied the loss
    by 1/shards already, and it is not done twice: there a sum is one of such losses.

    Args:
        opt: Any Keras optimizer that neither accumulates nor scales.
        reduction: `"mean"` or `"sum"` in any case, or one of
            `tf.compat.v1.losses.Reduction`.
        name: Of the optimizer.
        group_assignment: None, or a list of lists of shard ids: shards sum inside their
            group only. See `replica_groups` of `AccumulationOptimizer` for what that
            means for variables and files.
        accumulation_steps: Micro steps per update; 1 as the original has it.
        loss_scale: See `AccumulationOptimizer`.
        on_nonfinite: See `AccumulationOptimizer`; the original is `"propagate"`.

    Raises:
        TypeError: `opt` is no Keras optimizer.
        ValueError: Another reduction; groups that are no permutation of the shards in
            lists of equal length.

    Example:

    >>> optimizer = keras_accum.CrossShardOptimizer(keras.optimizers.SGD(0.5))
    >>> variable = keras.Variable(3.0)
    >>> def loss():
    ...     return variable * 2.0
    >>> _ = optimizer.minimize(loss, [variable])
    >>> float(variable.numpy())
    2.0

    Source: `tf.compat.v1.tpu.CrossShardOptimizer`.
    """

    def __init__(
        self,
        opt: Any,
        reduction: str = "mean",
        name: str = "CrossShardOptimizer",
        group_assignment: Sequence[Sequence[int]] | None = None,
        accumulation_steps: int = 1,
        loss_scale: float | str | LossScale | None = None,
        on_nonfinite: str = "skip_window",
    ) -> None:
        is_mean = _checked_reduction(reduction) == "mean"
        if group_assignment is not None and not isinstance(
            group_assignment, (list, tuple)
        ):
            raise ValueError(
                "`group_assignment` must be a list of lists of shard ids. Received: "
                f"group_assignment={group_assignment!r}. Write for example "
                "[[0, 1], [2, 3]]."
            )
        super().__init__(
            opt,
            accumulation_steps,
            loss_scale=loss_scale,
            on_nonfinite=on_nonfinite,
            replica_groups=group_assignment,
            name=name,
        )
        self._is_mean = is_mean

    def _factor_of_loss(self) -> float:
        if not self._is_mean:
            return 1.0
        if tf.distribute.in_cross_replica_context():
            warnings.warn(
                "CrossShardOptimizer.compute_gradients should be called inside "
                "`strategy.run(...)`. Outside there is one shard, and the loss is not "
                "divided by their number.",
                stacklevel=4,
            )
            return 1.0
        return 1.0 / self._groups.size

    def _factor_in_fit(self) -> float:
        return float(len(self._groups.assignment)) if self._is_mean else 1.0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        return {
            "opt": config["inner_optimizer"],
            "reduction": "mean" if self._is_mean else "sum",
            "name": config["name"],
            "group_assignment": config["replica_groups"],
            "accumulation_steps": config["accumulation_steps"],
            "loss_scale": config["loss_scale"],
            "on_nonfinite": config["on_nonfinite"],
        }


def _checked_reduction(reduction: Any) -> str:
    if not isinstance(reduction, str) or reduction.lower() not in REDUCTIONS:
        raise ValueError(
            "`reduction` must be one of 'sum', 'mean', or tf.compat.v1.losses."
            f"Reduction.SUM or MEAN. Received: reduction={reduction!r}"
        )
    return REDUCTIONS[reduction.lower()]
