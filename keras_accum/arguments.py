"""What arguments may be, and the errors that say so."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_accum.dynamic_loss_scale import DynamicLossScale
from keras_accum.known_variables import display_name, native
from keras_accum.loss_scale import LossScale, NoLossScale
from keras_accum.platforms.ipu import is_ipu_strategy
from keras_accum.reduction import Reduction

ReplicaGroupsArgument = int | Sequence[Sequence[int]] | None
AccumulatorDType = str | tf.DType | Callable[[Any], Any] | None


def check_backend() -> None:
    """Refuses Keras on anything but TensorFlow."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            "keras_accum needs the TensorFlow backend of Keras. "
            f"Received: backend={backend}. Set the environment variable "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


def supported_strategy() -> tf.distribute.Strategy:
    """The current strategy; refuses by name those that are not supported."""
    strategy = tf.distribute.get_strategy()
    supported = (
        tf.distribute.OneDeviceStrategy,
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.TPUStrategy,
    )
    is_known = isinstance(strategy, supported) or is_ipu_strategy(strategy)
    if tf.distribute.has_strategy() and not is_known:
        raise ValueError(
            "The strategy must be one of OneDeviceStrategy, MirroredStrategy, "
            "MultiWorkerMirroredStrategy, TPUStrategy, or none. "
            f"Received: strategy={type(strategy).__name__}. A strategy that keeps "
            "variables apart from its replicas has no window to reduce once."
        )
    return strategy


def checked_accumulation_steps(
    accumulation_steps: Any, name: str = "accumulation_steps"
) -> int:
    """An int >= 1; NumPy integers are converted."""
    is_integer = isinstance(accumulation_steps, (int, np.integer))
    is_bool = isinstance(accumulation_steps, bool)
    if not is_integer or is_bool or not 1 <= accumulation_steps < 2**31:
        raise ValueError(
            f"`{name}` must be an integer >= 1, the number of micro-batches "
            "per update. "
            f"Received: {name}={accumulation_steps!r} "
            f"(of type {type(accumulation_steps).__name__}). Use 1 for no accumulation."
        )
    return operator.index(accumulation_steps)


def checked_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"`{name}` must be one of {listed}. Received: {name}={value!r}"
        )
    return value


def checked_accumulator_dtype(accumulator_dtype: Any) -> AccumulatorDType:
    """None, a name of a floating dtype, or a callable that gives one."""
    # A `tf.DType` is not callable; a NumPy scalar type is, and means itself.
    is_function = callable(accumulator_dtype) and not isinstance(
        accumulator_dtype, type
    )
    if accumulator_dtype is None or is_function:
        return accumulator_dtype
    return _floating(accumulator_dtype).name


def _floating(accumulator_dtype: Any) -> tf.DType:
    expected = (
        "`accumulator_dtype` must be None, a floating dtype, or a callable that takes "
        "a variable and returns a floating dtype. "
        f"Received: accumulator_dtype={accumulator_dtype!r}. None is float32 for "
        "float16 and bfloat16 variables, else the variable's own."
    )
    try:
        dtype = tf.as_dtype(accumulator_dtype)
    except TypeError as error:
        raise TypeError(expected) from error
    if not dtype.is_floating:
        raise ValueError(expected)
    return dtype


def dtype_of_accumulator(
    variable: Any, accumulator_dtype: AccumulatorDType
) -> tf.DType:
    """What a variable's gradients are summed in.

    float32 for float16 and bfloat16 variables, else the variable's dtype: a bfloat16
    sum of ones stops at 256.
    """
    if callable(accumulator_dtype):
        return _floating(accumulator_dtype(variable))
    if accumulator_dtype is not None:
        return tf.as_dtype(accumulator_dtype)
    dtype = native(variable).dtype
    return tf.float32 if dtype.size < 4 else dtype


def dtype_of_reduced(variable: Any, accumulator_dtype: AccumulatorDType) -> tf.DType:
    """What the inner optimizer receives.

    The variable's dtype, or the accumulator's where the caller chose a wider one:
    then clipping and decay are computed before the gradient is narrowed.
    """
    dtype = native(variable).dtype
    if accumulator_dtype is None:
        return dtype
    chosen = dtype_of_accumulator(variable, accumulator_dtype)
    return chosen if chosen.size > dtype.size else dtype


def needs_loss_scale() -> bool:
    """Whether the global policy computes in float16, where small gradients are 0."""
    return keras.mixed_precision.dtype_policy().name == "mixed_float16"


def resolved_loss_scale(loss_scale: Any) -> float | str | LossScale:
    """What a `loss_scale` argument means, None above all: it goes into the config.

    None is dynamic under a mixed_float16 policy, else none; 1.0 is none.
    """
    if loss_scale is None:
        return "dynamic" if needs_loss_scale() else 1.0
    if isinstance(loss_scale, LossScale):
        return loss_scale
    expected = (
        '`loss_scale` must be None, "dynamic", a finite number > 0, or one of '
        "DynamicLossScale, ScheduledLossScale, AutomaticLossScale. "
        f"Received: loss_scale={loss_scale!r}. Leave it out for the default; a "
        "schedule goes into ScheduledLossScale(schedule)."
    )
    if isinstance(loss_scale, str):
        if loss_scale == "dynamic":
            return loss_scale
        raise ValueError(expected)
    if isinstance(loss_scale, bool) or not isinstance(
        loss_scale, (int, float, np.integer, np.floating)
    ):
        raise TypeError(expected)
    if not math.isfinite(loss_scale) or loss_scale <= 0:
        raise ValueError(expected)
    return float(loss_scale)


def loss_scale_of(resolved: float | str | LossScale) -> LossScale:
    """The loss scale that a resolved argument stands for."""
    if isinstance(resolved, LossScale):
        return resolved
    if isinstance(resolved, str):
        return DynamicLossScale()
    return NoLossScale() if resolved == 1.0 else LossScale(resolved)


def check_policies(on_nonfinite: str, reduction: Reduction) -> None:
    """A micro-batch leaves a window with its weight, and a running mean has none."""
    if on_nonfinite == "skip_micro_batch" and reduction.is_running:
        raise ValueError(
            'on_nonfinite="skip_micro_batch" cannot be used with '
            'micro_reduction="running_mean", whose mean is taken while the window '
            f"fills. Received: on_nonfinite={on_nonfinite!r}, "
            f"micro_reduction={reduction.micro!r}. Use micro_reduction="
            '"mean".'
        )


def serialized(value: Any) -> Any:
    """What `get_config` says of an argument that is a plain value or an object."""
    if value is None or isinstance(value, (str, float)):
        return value
    return keras.saving.serialize_keras_object(value)


def deserialized(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """A copy of a config, with the objects in it made from their descriptions."""
    config = dict(config)
    for name in ("accumulator_dtype", "loss_scale"):
        if isinstance(config.get(name), dict):
            config[name] = keras.saving.deserialize_keras_object(
                config[name], custom_objects=custom_objects
            )
    return config


def check_number_of_weights(num_weights: int, num_variables: int) -> None:
    """What `set_weights` is given."""
    if num_weights != num_variables:
        raise ValueError(
            "`set_weights` must be given one weight for each of `variables`. Received: "
            f"{num_weights} weights for {num_variables} variables. Build the optimizer "
            "first."
        )


class StepIsTraced(ValueError):
    """Something was asked of an optimizer whose step is compiled without it."""


def check_not_stepped(has_stepped: bool, accumulation_steps: int) -> None:
    """Windows of one have no accumulators, and a traced step cannot get them."""
    if has_stepped:
        raise StepIsTraced(
            "`accumulation_steps` cannot be raised from 1 once a micro step was taken: "
            "there are no accumulators. "
            f"Received: accumulation_steps={accumulation_steps}. Construct the "
            f"optimizer with accumulation_steps={accumulation_steps} and set it to 1 "
            "to begin with."
        )


def check_variables(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """What an optimizer is built for: whole variables of the strategy's scope."""
    for variable in variables:
        if not native(variable).shape.is_fully_defined():
            raise ValueError(
                "A variable must have a fully defined shape to be accumulated for. "
                f"Received: variable {display_name(variable)!r} of shape "
                f"{native(variable).shape}"
            )
        if not strategy.extended.variable_created_in_scope(native(variable)):
            raise ValueError(
                "The optimizer and the variables it is built for must be made in the "
                "scope of the same strategy. "
                f"Received: variable {display_name(variable)!r}, which was not made in "
                f"the scope of {type(strategy).__name__}. Construct the model and the "
                "optimizer under one `with strategy.scope():`."
            )


def check_inner_scope(inner_optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Wrapper and inner optimizer are made in the scope of one strategy."""
    for variable in inner_optimizer.variables:
        if not strategy.extended.variable_created_in_scope(native(variable)):
            raise ValueError(
                "`inner_optimizer` must be constructed under the same strategy as what "
                f"is put around it. Received: {type(inner_optimizer).__name__} that "
                f"was not constructed in the scope of {type(strategy).__name__}. "
                "Construct both under one `with strategy.scope():`."
            )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """The strategy in use is the one that the optimizer was constructed under."""
    current = tf.distribute.get_strategy()
    if current is not strategy:
        raise ValueError(
            "The optimizer must be constructed under the scope of the strategy that it "
            "is used with. "
            f"Received: constructed under {type(strategy).__name__}, used under "
            f"{type(current).__name__}. Construct it inside `with strategy.scope():`."
        )
