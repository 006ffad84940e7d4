"""The one private Keras name: an optimizer's own sum over replicas, switched off.

A window is reduced before the inner optimizer sees it, so the inner optimizer must not
reduce once more. Keras has no public switch for that. A contract test tells when the
name moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class GradientsAreReduced:
    """Base class: an optimizer that only ever sees gradients that are reduced."""

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return list(grads_and_vars)


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The children of a `MultiOptimizer`, or the optimizer itself."""
    children = getattr(optimizer, "optimizers", None)
    return [optimizer] if children is None else list(children)


@contextlib.contextmanager
def gradients_are_reduced(optimizer: Any) -> Iterator[None]:
    """While inside, `optimizer` applies gradients as they are.

    Entered around all replicas, never inside one: under MirroredStrategy replicas are
    threads that share the optimizer. It must be built: a `MultiOptimizer` may make
    its children then.
    """
    leaves = leaf_optimizers(optimizer)
    for leaf in leaves:
        # Past Keras's attribute tracking, which would keep the function.
        leaf.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for leaf in leaves:
            del leaf.__dict__["_all_reduce_sum_gradients"]
