"""Graphcore's optimizers: their names and arguments, mapped on an accumulating one.

What only an IPU can do (offload and sharding of optimizer state) is refused. Each of
these is exact for every Keras optimizer; the originals accepted SGD and momentum only.
"""

from keras_accum.graphcore.accumulation import (
    CrossReplicaGradientAccumulationOptimizer,
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizer,
    GradientAccumulationOptimizerV2,
)
from keras_accum.graphcore.ipu_optimizer import IPUOptimizer
from keras_accum.graphcore.map_gradient import MapGradientOptimizer
from keras_accum.graphcore.reduction_method import GradientAccumulationReductionMethod

__all__ = [
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
    "IPUOptimizer",
    "MapGradientOptimizer",
]
