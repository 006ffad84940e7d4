"""Keras callbacks that steer an accumulating optimizer, and look at it."""

from keras_accum.callbacks.accumulation_monitor import AccumulationMonitor
from keras_accum.callbacks.accumulation_scheduler import AccumulationScheduler
from keras_accum.callbacks.gradient_noise_scale import GradientNoiseScale
from keras_accum.callbacks.loss_scale_scheduler import LossScaleScheduler
from keras_accum.callbacks.partial_window import PartialWindow
from keras_accum.callbacks.pipelined_weight_decay import PipelinedWeightDecay
from keras_accum.callbacks.skip_seen_batches import SkipSeenBatches

__all__ = [
    "AccumulationMonitor",
    "AccumulationScheduler",
    "GradientNoiseScale",
    "LossScaleScheduler",
    "PartialWindow",
    "PipelinedWeightDecay",
    "SkipSeenBatches",
]
