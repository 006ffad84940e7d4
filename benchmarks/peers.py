"""Ways to accumulate, each as a micro step of gradients that are given.

Every way is a function of shapes, an optimizer and N; it makes variables and returns a
compiled function that takes one micro step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_accum

Shapes = Sequence[tuple[int, ...]]
MicroStep = Any  # a `tf.function` without arguments

SETS: dict[str, list[tuple[int, ...]]] = {
    "600 of 64": [(64,)] * 600,
    "300 of 64x64": [(64, 64)] * 300,
    "12 of 2048x2048": [(2048, 2048)] * 12,
}
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "adam": lambda **options: keras.optimizers.Adam(1e-3, **options),
    "sgd": lambda **options: keras.optimizers.SGD(1e-3, momentum=0.9, **options),
}


def _gradients(shapes: Shapes) -> list[tf.Tensor]:
    random = np.random.default_rng(seed=0)
    return [
        tf.constant(random.standard_normal(shape, dtype="float32")) for shape in shapes
    ]


def _variables(shapes: Shapes) -> list[keras.Variable]:
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def _compiled(step: Callable[[], None]) -> MicroStep:
    return tf.function(step, autograph=False)


def step_of(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    computed: bool = False,
) -> MicroStep:
    """A compiled micro step of a built optimizer.

    Args:
        optimizer: Of Keras or of keras_accum.
        variables: That it is built for.
        computed: Whether gradients are computed in the step, not constants that live.
    """
    gradients = [] if computed else _gradients([v.shape for v in variables])

    def step() -> None:
        given = [tf.fill(v.shape, 0.5) for v in variables] if computed else gradients
        optimizer.apply(given, variables)

    return _compiled(step)


def _with(optimizer: keras.optimizers.Optimizer, shapes: Shapes) -> MicroStep:
    variables = _variables(shapes)
    optimizer.build(variables)
    return step_of(optimizer, variables)


def ours(shapes: Shapes, optimizer: str, steps: int) -> MicroStep:
    """keras_accum around the optimizer."""
    inner = OPTIMIZERS[optimizer]()
    return _with(keras_accum.AccumulationOptimizer(inner, steps), shapes)


def builtin(shapes: Shapes, optimizer: str, steps: int) -> MicroStep:
    """Keras's own `gradient_accumulation_steps`."""
    return _with(OPTIMIZERS[optimizer](gradient_accumulation_steps=steps), shapes)


def plain(shapes: Shapes, optimizer: str, steps: int) -> MicroStep:
    """The optimizer without accumulation: an update in each step."""
    return _with(OPTIMIZERS[optimizer](), shapes)


def by_hand(shapes: Shapes, optimizer: str, steps: int) -> MicroStep:
    """What a careful user writes: variables to add to, and a `tf.cond`."""
    variables, gradients = _variables(shapes), _gradients(shapes)
    sums = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    count = tf.Variable(0)
    inner = OPTIMIZERS[optimizer]()
    inner.build(variables)

    def update() -> tf.Tensor:
        inner.apply([total.read_value() / steps for total in sums], variables)
        for total in sums:
            total.assign(tf.zeros_like(total))
        return tf.constant(True)

    def step() -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        count.assign_add(1)
        is_due = tf.equal(count.read_value() % steps, 0)
        tf.cond(is_due, update, lambda: tf.constant(False))

    return _compiled(step)


def floor(shapes: Shapes, optimizer: str, steps: int) -> MicroStep:
    """One addition in place of all gradients in one buffer; never an update."""
    size = sum(int(np.prod(shape)) for shape in shapes)
    total, gradient = tf.Variable(tf.zeros(size)), tf.ones(size)

    def step() -> None:
        total.assign_add(gradient)

    return _compiled(step)


WAYS = {
    "plain": plain,
    "keras": builtin,
    "by hand": by_hand,
    "keras_accum": ours,
    "floor": floor,
}
