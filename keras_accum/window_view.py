"""What can be seen of a window and its loss scale from outside, at any time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_accum.loss_scale import LossScale, checked_scale
from keras_accum.window import Window


class WindowView:
    """Members that answer in eager and in a graph, also before the first step."""

    _window: Window
    _loss_scale: LossScale
    _num_changes: int

    @property
    def position(self) -> tf.Tensor:
        """int32 scalar: micro steps taken in the open window."""
        return self._window.position.read_value()

    @property
    def micro_steps_left(self) -> tf.Tensor:
        """int32 scalar: micro steps until the open window closes."""
        return self._window.length.read_value() - self._window.position.read_value()

    @property
    def window_changes(self) -> int:
        """How often Python has flushed, reset or resized the window until now.

        Who counts micro steps to know when a window closes looks at this as well.
        """
        return self._num_changes

    @property
    def skipped_windows(self) -> tf.Tensor:
        """int32 scalar: windows without an update, for a gradient was not finite."""
        return self._window.skipped_windows.read_value()

    @property
    def skipped_micro_batches(self) -> tf.Tensor:
        """int32 scalar: micro-batches left out of closed windows, on all replicas."""
        return self._window.skipped_micro_batches.read_value()

    @property
    def batches_seen(self) -> int:
        """Batches of the present epoch, as `callbacks.SkipSeenBatches` counts them."""
        with tf.init_scope():
            return int(self._window.batches_seen.numpy())

    @batches_seen.setter
    def batches_seen(self, batches_seen: int) -> None:
        self._window.batches_seen.assign(batches_seen)

    @property
    def has_updated(self) -> tf.Tensor:
        """Bool scalar: the last micro step, or a flush since, made an update."""
        return self._window.has_updated()

    @property
    def loss_scale(self) -> tf.Tensor:
        """float32 scalar: what `scale_loss` multiplies by; 1 without a loss scale.

        Settable: at the next window, or at once while the present one is empty.
        """
        return self._loss_scale.current()

    @loss_scale.setter
    def loss_scale(self, loss_scale: Any) -> None:
        scale = checked_scale("loss_scale", loss_scale)
        self._loss_scale.request(scale, self._window.is_open())

    @property
    def next_loss_scale(self) -> tf.Tensor:
        """float32 scalar: `loss_scale` of the next window, as last set or moved."""
        return self._loss_scale.next()
