"""Gradient accumulation as operations on tensors, with a state of their own."""

from __future__ import annotations

import contextlib
import weakref
from concurrent import futures
from typing import Any

import tensorflow as tf

from keras_accum.cross_replica import merged
from keras_accum.platforms.ipu import program_of
from keras_accum.verified_usage import checked_steps, expect_one_update

_of_graph: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_of_name: dict[str, tuple[str, _State]] = {}


class _State:
    """Where a call keeps what it has added up: on each replica its own."""

    def __init__(self, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self.total = _local(tf.zeros(shape, dtype))
        self.position = _local(tf.constant(0))


def _local(initial: tf.Tensor) -> tf.Variable:
    return tf.Variable(
        initial,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM
        if initial.dtype.is_floating
        else tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def stateful_gradient_accumulate(
    gradient: Any,
    num_mini_batches: int,
    verify_usage: bool = True,
    name: str | None = None,
) -> tf.Tensor:
    """Zeros while a window fills, and the sum of its gradients when it is full.

    In a graph each call that is traced has a state of its own, which is made once and
    lives as long as the graph: it survives the calls of a `tf.function` and the
    iterations of a `tf.while_loop`. A `tf.function` that is traced anew, for other
    shapes, begins anew. In eager the state goes by `name`.

    Args:
        gradient: A tensor of static shape and floating dtype, or IndexedSlices. It is
            added up in its own dtype.
        num_mini_batches: Calls per window, an int >= 1.
        verify_usage: Whether what is returned may go into one update of SGD or
            momentum only, and `num_mini_batches` must divide the iterations of the
            loop: so much the original checks. Here `repeat` checks both, and
            `check_usage` the first; in other loops the number of iterations is not
            known when they are traced.
        name: Of the state in eager, where it must be given.

    Returns:
        A dense tensor like `gradient`.

    Raises:
        ValueError: `num_mini_batches` is no int >= 1, or does not divide the iterations
            of `repeat`; no name in eager; no static shape.

    Example:

    >>> emitted = [
    ...     float(stateful_gradient_accumulate(tf.constant(g), 2, name="example"))
    ...     for g in (1.0, 3.0, 5.0, 7.0)]
    >>> emitted
    [0.0, 4.0, 0.0, 12.0]

    Source: Graphcore's `ipu_stateful_gradient_accumulate`.
    """
    steps = checked_steps(num_mini_batches, verify_usage)
    gradient = tf.convert_to_tensor(gradient)
    program = program_of(tf.distribute.get_strategy())
    if program is not None:
        return program.stateful_gradient_accumulate(gradient, steps, verify_usage)
    state = _state_of(gradient, name, f"a sum over {steps}")
    total = state.total.read_value() + gradient
    emitted = _move_on(state, steps, total)
    is_emptied = tf.equal(state.position.read_value(), 0)
    state.total.assign(tf.where(is_emptied, tf.zeros_like(total), total))
    if verify_usage and not tf.executing_eagerly():
        expect_one_update(emitted)
    return emitted


def stateful_gradient_accumulate_with_momentum(
    momentum_variable: tf.Variable,
    gradient: Any,
    momentum: float,
    num_mini_batches: int,
    name: str | None = None,
) -> tf.Tensor:
    """The momentum when a window is full, and zeros while it fills.

    Once per window, with its first gradient, v <- momentum x v; then each gradient is
    added to v, which needs no accumulator beside.

    Args:
        momentum_variable: v, of the gradient's shape. Under a strategy each replica
            must be able to assign its own: synchronised on read.
        gradient: A tensor, or IndexedSlices.
        momentum: A factor in [0, 1].
        num_mini_batches: Calls per window, an int >= 1.
        name: See `stateful_gradient_accumulate`.

    Returns:
        v at the end of a window, else zeros.

    Example:

    >>> v = tf.Variable(0.0)
    >>> emitted = [
    ...     float(stateful_gradient_accumulate_with_momentum(
    ...         v, tf.constant(1.0), 0.5, 2, name="momentum"))
    ...     for _ in range(4)]
    >>> emitted
    [0.0, 2.0, 0.0, 3.0]

    Source: Graphcore's `ipu_stateful_gradient_accumulate_with_momentum`.
    """
    steps = checked_steps(num_mini_batches, verify_usage=True)
    gradient = tf.convert_to_tensor(gradient)
    state = _state_of(tf.zeros((), gradient.dtype), name, f"momentum over {steps}")
    is_first = tf.equal(state.position.read_value(), 0)
    factor = tf.where(is_first, tf.cast(momentum, gradient.dtype), 1.0)
    moved = momentum_variable.read_value() * factor + gradient
    momentum_variable.assign(moved)
    return _move_on(state, steps, moved)


def gradient_accumulator_add_with_scale(
    accumulator: tf.Variable,
    gradient: Any,
    accumulator_scale: Any = 1.0,
    gradient_scale: Any = 1.0,
) -> tf.Tensor:
    """Accumulator <- accumulator_scale x accumulator + gradient_scale x gradient.

    Scales of (1, 1) make a sum, (1, 1/N) a mean, and (k/(k+1), 1/(k+1)) at position k
    a running mean. An accumulator that is scaled by 0 counts for nothing, even if it
    holds a NaN.

    Args:
        accumulator: A variable of the gradient's shape.
        gradient: A tensor, or IndexedSlices.
        accumulator_scale: A scalar.
        gradient_scale: A scalar.

    Returns:
        The new value, of the accumulator's dtype.

    Example:

    >>> accumulator = tf.Variable(10.0)
    >>> for k in range(10):
    ...     mean = gradient_accumulator_add_with_scale(
    ...         accumulator, float(k), k / (k + 1), 1 / (k + 1))
    >>> round(float(mean), 4)
    4.5

    Source: Graphcore's `gradient_accumulator_add_with_scale`.
    """
    dtype = accumulator.dtype
    added = tf.cast(tf.convert_to_tensor(gradient), dtype)
    kept = tf.math.multiply_no_nan(
        accumulator.read_value(), tf.cast(accumulator_scale, dtype)
    )
    value = kept + added * tf.cast(gradient_scale, dtype)
    accumulator.assign(value)
    return value


@tf.autograph.experimental.do_not_convert
def _state_of(gradient: tf.Tensor, name: str | None, used_for: str) -> _State:
    if not gradient.shape.is_fully_defined():
        raise ValueError(
            "`gradient` must have a static shape. Received: gradient of shape "
            f"{gradient.shape}. Set it, for example with tf.ensure_shape."
        )
    if tf.executing_eagerly() and name is None:
        raise ValueError(
            "`name` must be given in eager execution, where nothing else tells one "
            "accumulated gradient from the other. Received: name=None. Pass one, or "
            "call it inside a tf.function."
        )
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def once(strategy: tf.distribute.Strategy) -> _State:
        if graph is None:
            return _of_its_name(str(name), strategy, gradient, used_for)
        state = _made_outside(strategy, gradient)
        for each in _with_those_around(graph):
            _of_graph.setdefault(each, []).append(state)
        return state

    return merged(once)


def _made_outside(strategy: tf.distribute.Strategy, gradient: tf.Tensor) -> _State:
    """Makes the variables where no `tf.function` is being traced: in a thread.

    One that is being traced takes charge of all variables that are made meanwhile, and
    allows none when it is traced again.
    """
    is_distributed = tf.distribute.has_strategy()

    def make() -> _State:
        with strategy.scope() if is_distributed else contextlib.nullcontext():
            return _State(gradient.shape, gradient.dtype)

    with futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()


def _of_its_name(
    name: str, strategy: tf.distribute.Strategy, gradient: tf.Tensor, used_for: str
) -> _State:
    """The state of that name in eager: made once, and used for one thing."""
    use = (
        f"{used_for}, shape {gradient.shape}, {gradient.dtype.name}, "
        f"{type(strategy).__name__} of {strategy.num_replicas_in_sync}"
    )
    if name not in _of_name:
        _of_name[name] = (use, _made_outside(strategy, gradient))
    first_use, state = _of_name[name]
    if use != first_use:
        raise ValueError(
            "`name` must stand for one state: of one operation, one length of a "
            f"window, one shape, one dtype and one strategy. Received: name={name!r} "
            f"for ({use}), which was used for ({first_use}). Use another name."
        )
    return state


def _with_those_around(graph: Any) -> list[Any]:
    """A graph and those that it is traced in: one that lives can call its function."""
    graphs = [graph]
    while hasattr(getattr(graphs[-1], "outer_graph", None), "outer_graph"):
        graphs.append(graphs[-1].outer_graph)
    return graphs


def _move_on(state: _State, steps: int, value: tf.Tensor) -> tf.Tensor:
    """Counts one call; the value if the window is full, else zeros."""
    position = state.position.read_value() + 1
    is_full = position >= steps
    state.position.assign(tf.where(is_full, 0, position))
    return tf.where(is_full, value, tf.zeros_like(value))
