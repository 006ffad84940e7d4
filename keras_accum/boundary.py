"""The boundary of a window: one decision for all replicas, then back to each of them.

TensorFlow forbids a collective in a `tf.cond` that is traced in replica context
(MirroredStrategy, MultiWorkerMirroredStrategy). The order that works everywhere:

    replica context         read the predicate: each replica has its own copy
      merge_call            -> cross-replica context, once for all replicas
        tf.cond             decided on the first replica's predicate
          each_replica      -> replica context again, inside the branch: here the
                               gradients are reduced and the update is made

A predicate must be equal on all replicas: a replicated counter, or a flag computed
from reduced values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_accum import packed_branch


def merge(function: Callable[..., None], *args: Any) -> None:
    """From replica context: calls `function` once for all replicas.

    Args:
        function: Runs in cross-replica context. Of the functions that the replicas
            pass, the first one's is called: what it closes over must not differ.
        *args: Values that each replica has its own of.
    """

    def once(strategy: tf.distribute.Strategy, *args: Any) -> None:
        function(*args)

    tf.distribute.get_replica_context().merge_call(once, args=args)


def each_replica(function: Callable[..., Any], *args: Any) -> Any:
    """From cross-replica context: calls `function` in the context of each replica."""

    def in_replica(*args: Any) -> Any:
        return function(*args)

    strategy = tf.distribute.get_strategy()
    return strategy.extended.call_for_each_replica(in_replica, args=args)


def first_replica(value: Any) -> tf.Tensor:
    """From cross-replica context: the first replica's copy of a per-replica value."""
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def nothing() -> None:
    """The branch in which nothing happens."""


def decide(
    predicate: Any,
    on_true: Callable[[], Any],
    on_false: Callable[[], Any] = nothing,
) -> None:
    """In cross-replica context: takes one branch, the same on every replica.

    Args:
        predicate: Scalar bool of each replica, equal on all of them.
        on_true: Called, when it holds, in cross-replica context.
        on_false: Called when it does not.
    """
    packed_branch.cond(first_replica(predicate), on_true, on_false)


class FromAnywhere:
    """Runs functions of replica context from wherever the caller stands.

    A Keras callback stands in the default strategy whatever the model's, a user in
    plain Python or under `strategy.scope()`, a train step in replica context.

    Args:
        strategy: Whose replicas run the functions.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._compiled: dict[Any, Callable[[], Any]] = {}

    def __call__(self, function: Callable[[], None], key: Any) -> None:
        """Runs `function` once on every replica.

        Args:
            function: Runs in replica context.
            key: Names the function and what it closes over. It is compiled once for
                each key, when the caller is not in replica context.
        """
        in_replica_context = not tf.distribute.in_cross_replica_context()
        if in_replica_context and tf.distribute.get_strategy() is self._strategy:
            function()
            return
        if key not in self._compiled:

            def on_every_replica() -> None:
                self._strategy.run(function)

            self._compiled[key] = tf.function(on_every_replica, autograph=False)
        self._compiled[key]()

    def forget(self) -> None:
        """Compiles all anew when they are called next."""
        self._compiled.clear()
