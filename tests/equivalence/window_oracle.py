"""The arithmetic of a window in NumPy, with SGD, momentum and decay for the update."""

import dataclasses
from collections.abc import Sequence

import numpy as np

LEARNING_RATE = 0.125
MOMENTUM = 0.5
WEIGHT_DECAY = 0.25


@dataclasses.dataclass
class Oracle:
    """What every variable and counter must be, in float64 and without a strategy.

    Gradients have the replicas as their first axis. The sums are kept over the
    replicas and undivided, whatever the reduction: nothing here is done in the order
    in which the library does it.
    """

    values: list[np.ndarray]
    num_replicas: int
    accumulation_steps: int
    micro_reduction: str = "mean"
    replica_reduction: str = "sum"

    def __post_init__(self):
        self.values = [np.array(v, "float64") for v in self.values]
        self.momentums = [np.zeros_like(v) for v in self.values]
        self.length = self.accumulation_steps
        self.iterations = 0
        self.skipped_windows = 0
        self.has_updated = False
        self._open()

    def _open(self):
        self.position = 0
        self.weight = 0.0
        self.sums = [None for _ in self.values]
        self.length = self.accumulation_steps

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        self.accumulation_steps = accumulation_steps
        if self.position == 0:
            self.length = accumulation_steps

    def micro_step(self, gradients: Sequence, weights: np.ndarray | None = None):
        """One gradient or None per variable; one weight per replica."""
        if weights is None:
            weights = np.ones(self.num_replicas)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._add(index, gradient, weights)
        self.weight += weights.sum()
        self.position += 1
        self.has_updated = False
        if self.position >= self.length:
            self.close()

    def _add(self, index, gradient, weights):
        if self.sums[index] is None:
            self.sums[index] = np.zeros_like(self.values[index])
        for one, weight in zip(gradient, weights, strict=True):
            if weight > 0:  # what weighs nothing may hold anything
                with np.errstate(invalid="ignore"):  # one infinity less another
                    self.sums[index] = self.sums[index] + weight * one.astype("float64")

    def close(self) -> None:
        """Ends the window with what it holds; does nothing to an empty one."""
        if self.position == 0:
            return
        self.has_updated = False
        if self.weight > 0:
            reduced = [s if s is None else s / self._divisor() for s in self.sums]
            if all(np.isfinite(g).all() for g in reduced if g is not None):
                self._update(reduced)
            else:
                self.skipped_windows += 1
        self._open()

    def _divisor(self) -> float:
        over_replicas = self.num_replicas if self.replica_reduction == "mean" else 1
        if self.micro_reduction == "sum":
            return over_replicas
        return self.weight / self.num_replicas * over_replicas

    def _update(self, gradients: Sequence) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                momentum = MOMENTUM * self.momentums[index] - LEARNING_RATE * gradient
                decay = WEIGHT_DECAY * LEARNING_RATE * self.values[index]
                self.values[index] = self.values[index] - decay + momentum
                self.momentums[index] = momentum
        self.iterations += 1
        self.has_updated = True

    def reset(self) -> None:
        """Drops what the window holds."""
        self.has_updated = False
        self._open()
