"""Which optimizers can be wrapped, which classes can be mixed into."""

from __future__ import annotations

import sys
from typing import Any

import keras

from keras_accum.already_reduced import leaf_optimizers


def checked_inner_optimizer(inner_optimizer: Any, accumulating: type) -> Any:
    """A Keras optimizer that neither accumulates nor scales.

    Looked at before Keras's constructors, which set a `loss_scale_factor` to None.

    Args:
        inner_optimizer: What the user passed.
        accumulating: The base class of the optimizers that accumulate.
    """
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be an instance of keras.optimizers.Optimizer. "
            f"Received: inner_optimizer={inner_optimizer!r} (of type "
            f"{type(inner_optimizer).__name__}). Pass for example "
            "keras.optimizers.Adam(1e-3), or keras.optimizers.get(...) of a name."
        )
    check_neither_accumulates_nor_scales(inner_optimizer, accumulating)
    return inner_optimizer


def check_neither_accumulates_nor_scales(optimizer: Any, accumulating: type) -> None:
    """Refuses an optimizer, or a child of it, that accumulates or scales.

    Called at construction, and once more at `build`, when a `MultiOptimizer` has made
    all its children.
    """
    for each in (optimizer, *leaf_optimizers(optimizer)):
        name = type(each).__name__
        if isinstance(each, accumulating):
            raise ValueError(
                "`inner_optimizer` must not accumulate by itself: gradients would be "
                f"accumulated twice. Received: inner_optimizer={name}. Pass the "
                "optimizer without accumulation."
            )
        steps = each.gradient_accumulation_steps
        if steps:
            raise ValueError(
                "`inner_optimizer` must not accumulate by itself. Received: "
                f"{name} with gradient_accumulation_steps={steps}. Leave it out, and "
                "pass accumulation_steps to keras_accum."
            )
        if isinstance(each, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "`inner_optimizer` must not scale the loss by itself. Received: "
                f"inner_optimizer={name}. Pass its inner optimizer, with "
                'loss_scale="dynamic".'
            )
        if each.loss_scale_factor is not None:
            raise ValueError(
                "`inner_optimizer` must not scale the loss by itself. Received: "
                f"{name} with loss_scale_factor={each.loss_scale_factor}. Leave it "
                "out, and pass loss_scale to keras_accum."
            )


def surrounding_optimizer(optimizer: Any) -> Any:
    """The optimizer that is just setting an attribute of `optimizer`, or None.

    Keras's wrappers tell an optimizer that it is being wrapped by nothing but setting
    its `loss_scale_factor`; who does it stands on the stack only.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self", optimizer) is optimizer:
        frame = frame.f_back
    owner = frame.f_locals.get("self") if frame is not None else None
    return owner if isinstance(owner, keras.optimizers.Optimizer) else None


def is_multi_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer hands its variables to others (from Keras 3.11 on)."""
    multi_optimizer = getattr(keras.optimizers, "MultiOptimizer", ())
    return isinstance(optimizer, multi_optimizer)


def check_mixed_in(optimizer: Any, base_arguments: dict[str, Any]) -> None:
    """The mixin stands before a plain optimizer class, with its plain arguments."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "AccumulationMixin must be mixed into a Keras optimizer. Received: "
            f"{name}. Write class {name}(AccumulationMixin, keras.optimizers.Adam)."
        )
    refused = (keras.optimizers.LossScaleOptimizer,)
    if is_multi_optimizer(optimizer) or isinstance(optimizer, refused):
        raise TypeError(
            "AccumulationMixin must be mixed into an optimizer that updates variables "
            f"by itself. Received: {name}. Use keras_accum.AccumulationOptimizer."
        )
    for argument in ("gradient_accumulation_steps", "loss_scale_factor"):
        if base_arguments.get(argument) is not None:
            raise ValueError(
                f"`{argument}` must be None in an optimizer that accumulates. "
                f"Received: {argument}={base_arguments[argument]}. Use "
                "accumulation_steps and loss_scale."
            )
        base_arguments.pop(argument, None)


def check_neither_by_itself(optimizer: Any) -> None:
    """What a base class's own constructor may have set, or taken by position."""
    for argument in ("gradient_accumulation_steps", "loss_scale_factor"):
        value = getattr(optimizer, argument)
        if value is not None:
            raise ValueError(
                f"`{argument}` must be None in an optimizer that accumulates. "
                f"Received: {type(optimizer).__name__}, whose base class has set "
                f"{argument}={value}. Use accumulation_steps and loss_scale."
            )


def check_may_surround(surrounding: Any) -> None:
    """Refuses a `MultiOptimizer` around a mixin: it would count micro steps."""
    if is_multi_optimizer(surrounding):
        raise ValueError(
            "An accumulating optimizer cannot stand inside a MultiOptimizer, which "
            "counts every call as an update. Received: an accumulating optimizer "
            f"inside {type(surrounding).__name__}. Put "
            "keras_accum.AccumulationOptimizer around the MultiOptimizer."
        )
