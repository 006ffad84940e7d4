"""Variables that got no gradient in a window: the update passes them by.

Whether a variable has a gradient is known when a step is traced; whether it had one at
any time in the window is known only when the window closes, since the micro steps may
come from several traces. Handing over a zero instead of None would move momentum and
decay, so the step of such a variable stands in a `tf.cond`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_accum.known_variables import native
from keras_accum.update_steps import UpdateStep, copies, wrapped_update_steps


@contextlib.contextmanager
def passed_by(
    optimizer: Any, optional: Sequence[tuple[Any, tf.Tensor]]
) -> Iterator[None]:
    """While inside, `optimizer` leaves alone the variables without a gradient.

    Entered in cross-replica context, around the update of all replicas. A variable
    that is passed by keeps its value and its slots, weight decay included: Keras
    decays before it calls `update_step`, so the value from before is put back there.

    Args:
        optimizer: Calls `update_step` once per variable, as Keras's optimizers do.
        optional: The variables that may be without a gradient, each with a scalar
            bool: whether it has one.
    """
    if not optional:
        yield
        return
    before = {
        id(copy): (present, copy.read_value())
        for variable, present in optional
        for copy in copies(variable)
    }
    with wrapped_update_steps(optimizer, functools.partial(_conditional, before)):
        yield


def _conditional(
    before: Mapping[int, tuple[tf.Tensor, tf.Tensor]], update_step: UpdateStep
) -> UpdateStep:
    def conditional_update_step(
        gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        if id(native(variable)) not in before:
            update_step(gradient, variable, learning_rate)
            return
        present, value = before[id(native(variable))]

        def update() -> tf.Tensor:
            update_step(gradient, variable, learning_rate)
            return tf.constant(True)

        def pass_by() -> tf.Tensor:
            native(variable).assign(value)
            return tf.constant(False)

        tf.cond(present, update, pass_by)

    return conditional_update_step
