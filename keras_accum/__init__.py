"""Gradient accumulation for Keras that trains exactly as one large batch would."""

from keras_accum import callbacks, graphcore, ops
from keras_accum.automatic_loss_scale import AutomaticLossScale
from keras_accum.cross_shard import CrossShardOptimizer
from keras_accum.dynamic_loss_scale import DynamicLossScale
from keras_accum.mixin import AccumulationMixin
from keras_accum.scheduled_loss_scale import ScheduledLossScale
from keras_accum.wrapper import AccumulationOptimizer

__version__ = "0.1.0"

__all__ = [
    "AccumulationMixin",
    "AccumulationOptimizer",
    "AutomaticLossScale",
    "CrossShardOptimizer",
    "DynamicLossScale",
    "ScheduledLossScale",
    "callbacks",
    "graphcore",
    "ops",
]
