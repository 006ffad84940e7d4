"""Keras callbacks that steer an accumulating optimizer."""

from keras_accum.callbacks.loss_scale_scheduler import LossScaleScheduler

__all__ = ["LossScaleScheduler"]
