"""Something put around an optimizer's own step for one variable, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.already_reduced import leaf_optimizers
from keras_accum.known_variables import native

UpdateStep = Callable[[Any, Any, Any], None]


@contextlib.contextmanager
def wrapped_update_steps(
    optimizer: Any, wrap: Callable[[UpdateStep], UpdateStep]
) -> Iterator[None]:
    """While inside, the `update_step` of `optimizer` is `wrap` of what it was.

    Entered in cross-replica context, around the update of all replicas: under
    MirroredStrategy they are threads that share the optimizer.

    Args:
        optimizer: Calls `update_step(gradient, variable, learning_rate)` once per
            variable, as Keras's optimizers do. Of a `MultiOptimizer` the children do.
        wrap: From an `update_step` to another one.
    """
    leaves = leaf_optimizers(optimizer)
    before = [leaf.__dict__.get("update_step") for leaf in leaves]
    for leaf in leaves:
        # Past Keras's attribute tracking, which would keep the function.
        leaf.__dict__["update_step"] = wrap(leaf.update_step)
    try:
        yield
    finally:
        for leaf, step in zip(leaves, before, strict=True):
            if step is None:
                del leaf.__dict__["update_step"]
            else:
                leaf.__dict__["update_step"] = step


def copies(variable: Any) -> Sequence[tf.Variable]:
    """A variable and each replica's copy of it: an update step is given one of them."""
    whole = native(variable)
    local = tf.distribute.get_strategy().experimental_local_results(whole)
    return (whole, *local)
