"""Gradient accumulation for Keras that trains exactly as one large batch would."""

from keras_accum.optimizer import AccumulationMixin, AccumulationOptimizer

__version__ = "0.1.0"

__all__ = ["AccumulationMixin", "AccumulationOptimizer"]
