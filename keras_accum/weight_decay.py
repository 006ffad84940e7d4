"""Weight decay at the boundary of a window: once per update, whatever came before."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_accum.already_reduced import leaf_optimizers
from keras_accum.known_variables import display_name, is_overwritten, native
from keras_accum.reduction import Gradient
from keras_accum.update_steps import UpdateStep, copies, wrapped_update_steps

Filter = Callable[[Any], bool] | str | Sequence[str] | None


class WeightDecay:
    """Pulls variables towards zero at each update, by a rate that can be set.

    With w a variable, g its reduced gradient and lr the learning rate:

    | form                | decoupled | times_learning_rate | what happens            |
    |---------------------|-----------|---------------------|-------------------------|
    | coupled (L2, IPU)   | False     |                     | g <- g + rate w         |
    | decoupled (AdamW)   | True      | True                | w <- w - lr rate w      |
    | independent         | True      | False               | w <- w - rate w         |

    A decoupled decay comes just before the optimizer's own step for the variable, as
    Keras has it; a coupled one before the optimizer clips. A variable that got no
    gradient in a window does not decay then.

    Args:
        rate: A finite float >= 0.
        decoupled: Whether the variable decays, and not its gradient.
        times_learning_rate: Whether the learning rate is a factor of a decoupled decay.
        filter: Which variables decay. None: all that the optimizer was built for. A
            callable from variable to bool: those for which it is True. A name, or
            several: all but those in whose path one is found, a regular expression.
        beside_inner: Whether the plain optimizer may decay as well.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization,
        arXiv:1711.05101; the filter is Graphcore's `weight_decay_filter_fn` and, by
        names, Keras's `exclude_from_weight_decay`.
    """

    def __init__(
        self,
        rate: float,
        decoupled: bool,
        times_learning_rate: bool,
        filter: Filter,
        beside_inner: bool,
    ) -> None:
        self.form: Any = (decoupled, times_learning_rate, beside_inner)
        self.filter = _checked_filter(filter)
        # What `exclude_from_weight_decay` of the optimizer was told.
        self.is_excluded: Callable[[Any], bool] = lambda variable: False
        # Made in the scope of the strategy; not saved: like an optimizer's own
        # `weight_decay` it is the program's to say.
        number = checked_rate("weight_decay", rate)
        self.rate = tf.Variable(tf.constant(number, tf.float32), trainable=False)

    def is_like(self, other: Any) -> bool:
        """Whether both do the same at some rate, so that one step serves both."""
        return (self.form, self.filter) == (other.form, other.filter)

    def applies_to(self, variable: Any) -> bool:
        """Whether a variable decays."""
        if is_overwritten(variable) or self.is_excluded(variable):
            return False
        if callable(self.filter):
            return bool(self.filter(variable))
        path = display_name(variable)
        return not any(re.search(name, path) for name in self.filter)

    def coupled(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], present: Any
    ) -> list[Any]:
        """Replica context: the gradients with the coupled form's decay in them.

        Args:
            gradients: Reduced.
            variables: Their variables.
            present: For each of them a scalar bool, whether it got a gradient in the
                window, or None when it did for sure.
        """
        is_decoupled, _, _ = self.form
        if is_decoupled:
            return list(gradients)
        rate = self.rate.read_value()
        decayed = list(gradients)
        for place, variable in enumerate(variables):
            if self.applies_to(variable):
                gradient = tf.convert_to_tensor(gradients[place])
                value = tf.cast(native(variable).read_value(), gradient.dtype)
                pull = value * tf.cast(rate, gradient.dtype)
                if present[place] is not None:
                    pull = tf.where(present[place], pull, tf.zeros_like(pull))
                decayed[place] = gradient + pull
        return decayed

    @contextlib.contextmanager
    def decoupled(self, optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
        """While inside, `optimizer` decays a variable before its step for it.

        Entered in cross-replica context, around the update of all replicas.

        Args:
            optimizer: Makes the update.
            variables: All that it was built for.
        """
        check_does_not_decay(optimizer, self)
        is_decoupled, _, _ = self.form
        if not is_decoupled:
            yield
            return
        decayed = {
            id(copy) for v in variables if self.applies_to(v) for copy in copies(v)
        }
        with wrapped_update_steps(optimizer, functools.partial(self._after, decayed)):
            yield

    def _after(self, decayed: set[int], update_step: UpdateStep) -> UpdateStep:
        _, times_learning_rate, _ = self.form

        def decay_and_update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            whole = native(variable)
            if id(whole) in decayed:
                pull = whole * tf.cast(self.rate.read_value(), whole.dtype)
                if times_learning_rate:
                    pull *= tf.cast(learning_rate, whole.dtype)
                whole.assign_sub(pull)
            update_step(gradient, variable, learning_rate)

        return decay_and_update


class NoWeightDecay(WeightDecay):
    """None beside what the plain optimizer does by itself."""

    form = None

    def __init__(self) -> None:
        self.rate = tf.constant(0.0)

    def is_like(self, other: Any) -> bool:
        """Never: a step without decay serves no decay."""
        return False

    def coupled(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], present: Any
    ) -> list[Any]:
        """The gradients as they are."""
        return list(gradients)

    def decoupled(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Nothing is put around the optimizer's step."""
        return contextlib.nullcontext()


def check_does_not_decay(optimizer: Any, decay: WeightDecay) -> None:
    """Refuses an optimizer that decays by itself, unless both are wanted."""
    if decay.form is None or decay.form[2]:
        return
    for leaf in leaf_optimizers(optimizer):
        for name, rate in vars(leaf).items():  # Muon has a second one
            is_rate = isinstance(rate, (int, float)) and name.endswith("weight_decay")
            if is_rate and rate:
                raise ValueError(
                    "The inner optimizer must not decay weights by itself: they would "
                    f"decay twice. Received: {type(leaf).__name__} with {name}={rate}. "
                    f"Construct it with {name}=0.0, or pass beside_inner=True for both."
                )


def checked_rate(name: str, rate: Any) -> float:
    """A finite float >= 0."""
    expected = (
        f"`{name}` must be a finite number >= 0, the rate of the decay. "
        f"Received: {name}={rate!r}. Use 0 for none, or for example 0.01."
    )
    if isinstance(rate, bool) or not isinstance(
        rate, (int, float, np.integer, np.floating)
    ):
        raise TypeError(expected)
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(expected)
    return float(rate)


def _checked_filter(filter: Any) -> Any:
    """A callable as it is; names as a tuple."""
    if filter is None:
        return ()
    if callable(filter):
        return filter
    names = (filter,) if isinstance(filter, str) else filter
    is_list = isinstance(names, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            "`filter` must be None, a callable that takes a variable and returns "
            "whether it decays, or one or several names of variables that do not. "
            f'Received: filter={filter!r}. Write for example filter=["bias"].'
        )
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                "`filter` must hold names, or regular expressions to search names by. "
                f"Received: filter={filter!r}, of which {name!r} is none: {error}"
            ) from error
    return tuple(sorted(names))
