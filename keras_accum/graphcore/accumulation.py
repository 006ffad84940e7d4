"""Graphcore's accumulating optimizers: names and arguments, mapped on the engine."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_accum.arguments import (
    AccumulatorDType,
    checked_accumulation_steps,
    serialized,
)
from keras_accum.graphcore.graphcore_optimizer import (
    GraphcoreOptimizer,
    refuse_what_an_ipu_does,
)
from keras_accum.graphcore.reduction_method import GradientAccumulationReductionMethod


class _Accumulating(GraphcoreOptimizer):
    """Maps the arguments of Graphcore's accumulating optimizers."""

    _replica_reduction: str | None = None  # None: replicas are left apart

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Any = None,
        replicated_optimizer_state_sharding: Any = False,
        dtype: AccumulatorDType = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str | None = None,
    ) -> None:
        steps = checked_accumulation_steps(num_mini_batches, "num_mini_batches")
        method = GradientAccumulationReductionMethod.parse(reduction_method)
        refuse_what_an_ipu_does(
            offload_weight_update_variables=offload_weight_update_variables,
            replicated_optimizer_state_sharding=replicated_optimizer_state_sharding,
        )
        is_apart = self._replica_reduction is None
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        super().__init__(
            opt,
            steps,
            micro_reduction=method.name.lower(),
            replica_reduction=self._replica_reduction or "sum",
            accumulator_dtype=dtype,
            replica_groups=1 if is_apart and replicas > 1 else None,
            name=name,
        )

    def _said_arguments(self) -> dict[str, Any]:
        return {"num_mini_batches": self.accumulation_steps}


class _AccumulatingV2(_Accumulating):
    def _said_arguments(self) -> dict[str, Any]:
        return {
            **super()._said_arguments(),
            "dtype": serialized(self._accumulator_dtype),
            "reduction_method": self._reduction.micro.upper(),
        }


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class GradientAccumulationOptimizer(_Accumulating):
    """Sums the gradients of `num_mini_batches` micro-batches, then updates.

    Replicas are left apart: on several of them use
    `CrossReplicaGradientAccumulationOptimizer`.

    Args:
        opt: Any Keras optimizer.
        num_mini_batches: Micro-batches per update, an int >= 1.
        verify_usage: Accepted and not needed: the original refused all optimizers but
            SGD and momentum, for which alone it was exact. This one is for all.
        name: Of the optimizer.

    Raises:
        ValueError: `num_mini_batches` is no int >= 1.

    Example:

    >>> optimizer = GradientAccumulationOptimizer(keras.optimizers.SGD(0.5), 2)
    >>> variable = keras.Variable(3.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    1.0

    Source: Graphcore's `ipu.optimizers.GradientAccumulationOptimizer`.
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "GradientAccumulationOptimizer",
    ) -> None:
        super().__init__(opt, num_mini_batches, name=name)


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class GradientAccumulationOptimizerV2(_AccumulatingV2):
    """As `GradientAccumulationOptimizer`, with a reduction and a dtype.

    Args:
        opt: Any Keras optimizer.
        num_mini_batches: Micro-batches per update, an int >= 1.
        offload_weight_update_variables: Of an IPU; None or False.
        replicated_optimizer_state_sharding: Of an IPU; False.
        dtype: What gradients are added up in: see `accumulator_dtype` of
            `AccumulationOptimizer`.
        reduction_method: A `GradientAccumulationReductionMethod` or its name.
        name: Of the optimizer.

    Raises:
        ValueError: An argument's value is wrong, or only an IPU can do it.

    Example:

    >>> optimizer = GradientAccumulationOptimizerV2(
    ...     keras.optimizers.SGD(0.5), 2, reduction_method="mean")
    >>> variable = keras.Variable(3.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    2.0

    Source: Graphcore's `ipu.optimizers.GradientAccumulationOptimizerV2`.
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Any = None,
        replicated_optimizer_state_sharding: Any = False,
        dtype: AccumulatorDType = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(
            opt,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class CrossReplicaOptimizer(GraphcoreOptimizer):
    """Takes the mean of the gradients over the replicas, then updates.

    Args:
        opt: Any Keras optimizer.
        name: Of the optimizer.

    Example:

    >>> optimizer = CrossReplicaOptimizer(
    ...     keras.optimizers.SGD(0.5))
    >>> variable = keras.Variable(3.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    1.0

    Source: Graphcore's `ipu.optimizers.CrossReplicaOptimizer`.
    """

    def __init__(self, opt: Any, name: str = "CrossReplicaOptimizer") -> None:
        super().__init__(opt, 1, replica_reduction="mean", name=name)


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class CrossReplicaGradientAccumulationOptimizer(_Accumulating):
    """Sums over micro-batches, then takes the mean over the replicas, then updates.

    The arguments are those of `GradientAccumulationOptimizer`.

    Example:

    >>> optimizer = CrossReplicaGradientAccumulationOptimizer(
    ...     keras.optimizers.SGD(0.5), 2)
    >>> variable = keras.Variable(3.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    1.0

    Source: Graphcore's `ipu.optimizers.CrossReplicaGradientAccumulationOptimizer`.
    """

    _replica_reduction = "mean"

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "CrossReplicaGradientAccumulationOptimizer",
    ) -> None:
        super().__init__(opt, num_mini_batches, name=name)


@keras.saving.register_keras_serializable(package="keras_accum.graphcore")
class CrossReplicaGradientAccumulationOptimizerV2(_AccumulatingV2):
    """As `GradientAccumulationOptimizerV2`, with the mean over the replicas.

    Example:

    >>> optimizer = CrossReplicaGradientAccumulationOptimizerV2(
    ...     keras.optimizers.SGD(0.5), 2, reduction_method="mean")
    >>> variable = keras.Variable(3.0)
    >>> for gradient in (1.0, 3.0):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    >>> float(variable.numpy())
    2.0

    Source: Graphcore's `ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2`.
    """

    _replica_reduction = "mean"

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Any = None,
        replicated_optimizer_state_sharding: Any = False,
        dtype: AccumulatorDType = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "CrossReplicaGradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(
            opt,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )
