"""Graphcore's IPUs: replicas inside the program, which TensorFlow does not see.

Under an IPUStrategy a program is compiled once and runs on several replicas, which
exchange values by operations of Graphcore's. To TensorFlow they are one replica, whose
variables must stay equal. So each micro-batch is reduced to its mean over the replicas
of the program as soon as it arrives; from there on nothing differs. What TensorFlow
calls replicas are workers then, and are reduced as anywhere else.

Used only where `tensorflow.python.ipu` can be imported. Emulated in the tests; never
run on an IPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

PACKAGE = "tensorflow.python.ipu"
OPERATIONS = "tensorflow.compiler.plugin.poplar.ops"


def is_ipu_strategy(strategy: Any) -> bool:
    """Whether a strategy is one of Graphcore's."""
    return any(base.__module__.startswith(PACKAGE) for base in type(strategy).__mro__)


def program_of(strategy: Any) -> IPUProgram | None:
    """The program that a strategy runs, or None off an IPU."""
    return IPUProgram() if is_ipu_strategy(strategy) else None


class IPUProgram:
    """Graphcore's operations, called from inside a program.

    Raises:
        ImportError: Graphcore's TensorFlow is not installed.
    """

    def __init__(self) -> None:
        self._poputil = importlib.import_module(f"{OPERATIONS}.gen_poputil_ops")
        self._popops = importlib.import_module(f"{OPERATIONS}.gen_popops_ops")

    def stateful_gradient_accumulate(
        self, gradient: tf.Tensor, num_mini_batches: int, verify_usage: bool
    ) -> tf.Tensor:
        """See `keras_accum.ops`; Graphcore's own."""
        return self._poputil.ipu_stateful_gradient_accumulate(
            gradient, num_mini_batches=num_mini_batches, verify_usage=verify_usage
        )

    def sum(self, x: tf.Tensor, replica_group_size: int | None = None) -> tf.Tensor:
        """The sum over the replicas of the program, or of consecutive groups."""
        if replica_group_size is None:
            return self._popops.ipu_cross_replica_sum(x)
        return self._popops.ipu_cross_replica_sum(
            x, replica_group_size=replica_group_size
        )

    def normalise(self, x: tf.Tensor) -> tf.Tensor:
        """`x` divided by the number of replicas of the program."""
        return self._poputil.ipu_replication_normalise(x)

    def reduced(
        self, gradients: Sequence[Any], weight: tf.Tensor | None, optimizer: Any
    ) -> tuple[list[Any], tf.Tensor | None]:
        """A micro-batch's weighted mean over the replicas, and its mean weight.

        Args:
            gradients: Of this replica, or None.
            weight: float32 scalar, of this replica; None means 1 on all of them.
            optimizer: That accumulates them.

        Returns:
            What is equal on all replicas of the program. A product of the two is the
            mean of the replicas' products.

        Raises:
            ValueError: The model's executions end in the middle of a window.
        """
        check_steps_per_execution(optimizer, optimizer.accumulation_steps)
        if weight is None:
            return [self._mean(g, None, None) for g in gradients], None
        mean_weight = self.normalise(self.sum(weight))
        means = [self._mean(g, weight, mean_weight) for g in gradients]
        return means, mean_weight

    def _mean(self, gradient: Any, weight: Any, mean_weight: Any) -> Any:
        if gradient is None:
            return None
        gradient = tf.convert_to_tensor(gradient)
        if weight is None:
            return self.normalise(self.sum(gradient))
        # An empty replica's gradient may be 0/0.
        weighted = tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))
        total = self.normalise(self.sum(weighted))
        return tf.math.divide_no_nan(total, tf.cast(mean_weight, total.dtype))


def check_steps_per_execution(optimizer: Any, accumulation_steps: int) -> None:
    """Refuses executions that end in the middle of a window.

    Args:
        optimizer: Whose model is looked for among the callers, as `fit` is one.
        accumulation_steps: Its own.

    Raises:
        ValueError: They do not divide the model's `steps_per_execution`.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        model: Any = frame.f_locals.get("self")
        if isinstance(model, keras.Model) and model.optimizer is optimizer:
            steps = model.steps_per_execution
            if steps % accumulation_steps:
                raise ValueError(
                    "`steps_per_execution` must be a multiple of `accumulation_steps` "
                    "under an IPUStrategy. Received: "
                    f"steps_per_execution={steps}, accumulation_steps="
                    f"{accumulation_steps}. Compile with steps_per_execution="
                    f"{accumulation_steps}."
                )
            return
        frame = frame.f_back
