"""What one micro step is given: checked, and put in the order of the variables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_accum.arguments import (
    AccumulatorDType,
    check_strategy,
    dtype_of_accumulator,
)
from keras_accum.known_variables import (
    KnownVariables,
    display_name,
    is_overwritten,
    native,
)
from keras_accum.reduction import Reduction, weighted


def check_replica_context(strategy: tf.distribute.Strategy) -> None:
    """A micro step is taken in replica context of the optimizer's strategy."""
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "A micro step must be taken in replica context. Received: a call of "
            "`apply_gradients` in cross-replica context. Call it inside "
            "`strategy.run(...)`."
        )
    check_strategy(strategy)


def variables_to_build(variables: Sequence[Any] | None) -> list[Any]:
    """The variables of a first micro step, which the optimizer is built for."""
    if variables is None:
        raise ValueError(
            "An optimizer that is not built must be told its variables. Received: "
            "trainable_variables=None. Call `optimizer.build(variables)` first, or "
            "pass them."
        )
    return list(variables)


def aligned(
    grads: Sequence[Any], variables: Sequence[Any], known: KnownVariables
) -> list[Any]:
    """Gradients in the order of the known variables, None for those not given."""
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one gradient (or None) per variable. "
            f"Received: {len(grads)} gradients for {len(variables)} variables."
        )
    gradients: list[Any] = [None] * len(known)
    without: list[str] = []
    seen: set[int] = set()
    for gradient, variable in zip(grads, variables, strict=True):
        if not isinstance(variable, tf.Variable) and not hasattr(variable, "value"):
            raise TypeError(
                "Pairs must hold a gradient and a variable, in this order. "
                f"Received: variable={variable!r}. Swap them."
            )
        try:
            index = known.place(variable)
        except KeyError:
            raise ValueError(
                "The optimizer can only be used with the variables it was built for. "
                f"Received: unknown variable {display_name(variable)!r}. For a new set "
                "of variables, such as after layers were unfrozen, construct a new "
                "optimizer."
            ) from None
        if index in seen:
            raise ValueError(
                "Each variable must be given once in a micro step. "
                f"Received: variable {display_name(variable)!r} twice."
            )
        seen.add(index)
        _check_shape(gradient, known[index])
        gradients[index] = gradient
        if gradient is None:
            without.append(display_name(variable))
    if len(without) == len(grads):
        raise ValueError(
            "At least one variable must have a gradient. Received: None for each of "
            f"{without}. Does the loss depend on them?"
        )
    if without:
        warnings.warn(
            f"Gradients do not exist for variables {without} in this micro step. They "
            "keep what their accumulators hold. Does the loss depend on them?",
            stacklevel=3,
        )
    return gradients


def arrived(gradients: Sequence[Any]) -> list[tf.Operation]:
    """What a count of this micro-batch must wait for: all its gradients.

    A step that runs out of data fails where it takes the next batch, and what does not
    depend on the batch may still be done. Keras takes one such step at the end of an
    epoch of unknown length.

    Returns:
        Control inputs; none in eager.
    """
    present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    tensors = [g for g in present if tf.is_tensor(g)]
    return [] if tf.executing_eagerly() else [tf.group(*tensors)]


def weighted_gradients(
    gradients: Sequence[Any],
    weight: tf.Tensor | None,
    variables: KnownVariables,
    accumulator_dtype: AccumulatorDType,
) -> tuple[list[int], list[Any], list[bool]]:
    """The gradients that are there, times their weight, in the accumulators' dtype.

    Returns:
        The indices of their variables, the gradients, and whether their variables are
        overwritten with them: these are left as they are.
    """
    given = [index for index, g in enumerate(gradients) if g is not None]
    local = [gradients[index] for index in given]
    overwritten = [is_overwritten(variable) for variable in variables.at(given)]
    for place, variable in enumerate(variables.at(given)):
        if not overwritten[place]:
            dtype = dtype_of_accumulator(variable, accumulator_dtype)
            local[place] = weighted(local[place], weight, dtype)
    return given, local, overwritten


def _check_shape(gradient: Any, variable: Any) -> None:
    """Before anything is added: half a micro-batch in the window would be wrong."""
    if gradient is None:
        return
    shape = tf.TensorShape(getattr(gradient, "shape", None) or np.shape(gradient))
    if not shape.is_compatible_with(native(variable).shape):
        raise ValueError(
            "A gradient must have the shape of its variable. "
            f"Received: gradient of shape {shape} for variable "
            f"{display_name(variable)!r} of shape {native(variable).shape}. Pass pairs "
            "of gradient and variable."
        )


def checked_weight(weight: Any, reduction: Reduction) -> tf.Tensor | None:
    """The weight of a micro-batch as a float32 scalar; None stands for 1."""
    if weight is None:
        return None
    if reduction.is_running:
        raise ValueError(
            '`weight` must be None with micro_reduction="running_mean", whose mean is '
            f"taken while the window fills. Received: weight={weight}. Use "
            'micro_reduction="mean".'
        )
    received = f"Received: weight={weight!r}"
    try:
        scalar = tf.cast(weight, tf.float32)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise TypeError(
            f"`weight` must be a number. {received}. Pass for example the rows of the "
            "micro-batch."
        ) from error
    if scalar.shape.rank not in (0, None):
        raise ValueError(
            "`weight` must be a scalar: one weight for this micro-batch on this "
            f"replica. Received: weight of shape {scalar.shape}. Pass the sum of the "
            "rows' weights."
        )
    known = tf.get_static_value(scalar)  # None for one that a graph computes
    if known is not None and not (np.isfinite(known) and known >= 0):
        raise ValueError(
            "`weight` must be a finite number >= 0, such as the rows or tokens of the "
            f"micro-batch. Received: weight={weight}. Pass 0 to leave it out."
        )
    return scalar
