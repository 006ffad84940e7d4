"""Overwriting variables with their average under a strategy, where Keras cannot.

With `ema_overwrite_frequency`, Keras overwrites variables inside a `tf.cond` in replica
context, and TensorFlow forbids what happens there under MirroredStrategy. Here the same
decision is made once, in cross-replica context, after the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.already_reduced import leaf_optimizers
from keras_accum.boundary import decide, each_replica


@contextlib.contextmanager
def overwritten_with_average(
    optimizer: Any, variables: Sequence[Any]
) -> Iterator[None]:
    """Around the update of all replicas: overwrites at its end, when it is due.

    Entered in cross-replica context. Without a strategy it leaves all to Keras.

    Args:
        optimizer: Built for `variables`.
        variables: All of them, in the order of `build`.
    """
    if not tf.distribute.has_strategy():  # there Keras's own way works
        yield
        return
    frequencies = {
        leaf: leaf.ema_overwrite_frequency
        for leaf in leaf_optimizers(optimizer)
        if leaf.use_ema and leaf.ema_overwrite_frequency
    }
    with contextlib.ExitStack() as during_the_update:
        for leaf in frequencies:
            during_the_update.enter_context(_set(leaf, ema_overwrite_frequency=None))
        yield
    for leaf, frequency in frequencies.items():
        updates = tf.convert_to_tensor(leaf.iterations)
        decide(updates % frequency == 0, _overwrite(optimizer, leaf, variables))


def _overwrite(
    optimizer: Any, due: Any, variables: Sequence[Any]
) -> Callable[[], None]:
    others = [leaf for leaf in leaf_optimizers(optimizer) if leaf is not due]

    def constrain() -> None:
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))

    def overwrite() -> None:
        with contextlib.ExitStack() as stack:
            for leaf in others:
                stack.enter_context(_set(leaf, use_ema=False))
            optimizer.finalize_variable_values(list(variables))
        each_replica(constrain)  # Keras constrains after it overwrites

    return overwrite


@contextlib.contextmanager
def _set(optimizer: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(optimizer, name) for name in attributes}
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)
