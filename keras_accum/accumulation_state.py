"""What an accumulating optimizer holds: how it is made, read, set and saved."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_accum import arguments, boundary, nonfinite
from keras_accum.accumulators import Accumulators
from keras_accum.attachments import Attachments
from keras_accum.inner_optimizer import surrounding_optimizer
from keras_accum.known_variables import KnownVariables
from keras_accum.platforms.ipu import program_of
from keras_accum.reduction import (
    MICRO_REDUCTIONS,
    REDUCE_EVERY,
    REPLICA_REDUCTIONS,
    Reduction,
)
from keras_accum.replica_groups import GROUPS_DIVERGE, checked_groups
from keras_accum.window import Window
from keras_accum.window_state import WindowState
from keras_accum.window_view import WindowView

do_not_convert = tf.autograph.experimental.do_not_convert


class AccumulationState(Attachments, WindowView):
    """The part of an accumulating optimizer that holds still between micro steps."""

    # What the surfaces say: which optimizer makes the update, and how.

    built: bool
    name: str
    iterations: Any

    def _plain(self) -> Any:
        """The optimizer that makes the update."""
        raise NotImplementedError

    def _build_plain(self, variables: list[Any]) -> None:
        raise NotImplementedError

    def _close_if(self, is_due: tf.Tensor, gradients: Sequence[Any]) -> None:
        """Replica context: closes the window on all replicas, if it is due."""
        raise NotImplementedError

    def _apply_plain(self, gradients: list[Any], variables: list[Any]) -> None:
        raise NotImplementedError

    def _reduced_gradients(self) -> contextlib.AbstractContextManager:
        """While inside, the plain optimizer does not reduce by itself."""
        raise NotImplementedError

    def _set_up(
        self,
        accumulation_steps: Any,
        micro_reduction: Any,
        replica_reduction: Any,
        accumulator_dtype: Any,
        loss_scale: Any,
        on_nonfinite: Any,
        reduce_every: Any,
        replica_groups: Any,
        is_default_scale: bool,
    ) -> None:
        steps = arguments.checked_accumulation_steps(accumulation_steps)
        self._most_steps = steps  # that were asked for until the build
        choice = arguments.checked_choice
        self._reduction = Reduction(
            micro=choice("micro_reduction", micro_reduction, MICRO_REDUCTIONS),
            replica=choice("replica_reduction", replica_reduction, REPLICA_REDUCTIONS),
        )
        self._on_nonfinite = choice("on_nonfinite", on_nonfinite, nonfinite.POLICIES)
        self._accumulator_dtype = arguments.checked_accumulator_dtype(accumulator_dtype)
        arguments.check_policies(self._on_nonfinite, self._reduction)
        self._loss_scale_argument = loss_scale
        self._has_default_scale = is_default_scale and loss_scale == 1.0
        scale = arguments.loss_scale_of(loss_scale)
        self._strategy = arguments.supported_strategy()
        choice("reduce_every", reduce_every, REDUCE_EVERY)
        self._reduces_early = reduce_every == "micro_step"
        self._groups = checked_groups(
            "replica_groups", replica_groups, self._strategy.num_replicas_in_sync
        )
        self._is_distributed = tf.distribute.has_strategy()
        self._program = program_of(self._strategy)
        self._from_anywhere = boundary.FromAnywhere(self._strategy)
        self._accumulators: Any = None  # `Accumulators`, for windows of more than one
        self._has_stepped = False
        self._num_changes = 0
        with self._in_scope():
            self._attach_nothing()
        # Counters are made with the optimizer, so that they answer before `build`,
        # and a step that was traced before it reads a variable and no constant.
        self.window_state = WindowState(
            self._strategy,
            self.reset,
            self._make_room,
            self._reduction.is_running,
            self._groups.is_one,
        )
        self._window = Window(
            steps, self.window_state.new_variable, self._reduces_early
        )
        others = self.window_state.names
        self._loss_scale = scale.built(self.window_state.new_variable)
        self._names_of_scale = [
            name for name in self.window_state.names if name not in others
        ]

    # Variables.

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the plain optimizer's variables and the accumulators.

        Args:
            variables: The trainable variables, made in the scope of the strategy that
                the optimizer was constructed under.

        Raises:
            ValueError: A variable of another scope, or without a full static shape.
        """
        if self.built:
            return
        variables = list(variables)
        with self._in_scope():
            arguments.check_variables(variables, self._strategy)
            self._build_plain(variables)
            self._known_variables = KnownVariables(variables, self._strategy)
            self._allocate_accumulators(self._most_steps)
            self._warn_of_a_missing_loss_scale()
            if not self._groups.is_one:
                warnings.warn(GROUPS_DIVERGE, stacklevel=2)
            self.window_state.finish()
        self.built = True

    def _warn_of_a_missing_loss_scale(self) -> None:
        if self._has_default_scale and arguments.needs_loss_scale():
            warnings.warn(
                "The mixed_float16 policy was set after the optimizer was constructed: "
                "it has no loss scale, and small gradients become 0 in float16. Set "
                'the policy first, or construct it with loss_scale="dynamic".',
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[None]:
        """The strategy's scope, also from a callback or while a step is traced."""
        with tf.init_scope(), contextlib.ExitStack() as stack:
            if self._is_distributed and not tf.distribute.has_strategy():
                stack.enter_context(self._strategy.scope())
            arguments.check_strategy(self._strategy)
            yield

    def _allocate_accumulators(self, accumulation_steps: int) -> None:
        if accumulation_steps > 1 and self._accumulators is None:
            self._accumulators = Accumulators(
                self._known_variables,
                functools.partial(
                    arguments.dtype_of_accumulator,
                    accumulator_dtype=self._accumulator_dtype,
                ),
                self._reduction,
                self.window_state.new_variable,
                self._reduces_early,
                self.window_state.new_shared,
                kind_of=self._treatment,
            )

    def _treatment(self, variable: Any) -> tuple[Any, ...]:
        """What tells a variable from others when a window closes."""
        dtype = arguments.dtype_of_reduced(variable, self._accumulator_dtype)
        return dtype.name, self._loss_scale.is_scaled(variable)

    def reset(self) -> None:
        """Drops what the window holds. Called as `flush` is."""
        self._num_changes += 1
        self._from_anywhere(self._reset, ("reset", self._accumulators is not None))

    def _reset(self) -> None:
        self._empty_accumulators()
        self._window.restart()
        self._window.last_window_updated.assign(0)
        self._loss_scale.drop_window()
        self._measurements.drop_window()

    def _empty_accumulators(self) -> None:
        if self._accumulators is not None:
            self._accumulators.clear()

    @do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale: what gradients are to be taken of."""
        return self._loss_scale.scale(loss)

    @property
    def accumulation_steps(self) -> int:
        """Micro steps per update; a change takes effect at the next window."""
        with tf.init_scope():
            return int(self._window.next_length.numpy())

    @accumulation_steps.setter
    def accumulation_steps(self, accumulation_steps: Any) -> None:
        steps = arguments.checked_accumulation_steps(accumulation_steps)
        self._make_room(steps)
        self._num_changes += 1
        self._window.request_length(steps)

    def _make_room(self, steps: int) -> None:
        """Has accumulators for windows of so many micro steps, now or when built."""
        if steps > 1 and self.built and self._accumulators is None:
            arguments.check_not_stepped(self._has_stepped, steps)
            with self._in_scope():
                self._allocate_accumulators(steps)
        self._most_steps = max(steps, self._most_steps)

    # What is saved.

    def _plain_variables(self) -> list[Any]:
        """The variables that a plain optimizer would have."""
        raise NotImplementedError

    def _set_plain_weights(self, weights: list[Any]) -> None:
        raise NotImplementedError

    @property
    def variables(self) -> list[Any]:
        """The plain optimizer's variables, then the window's."""
        return self._plain_variables() + self.window_state.held

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns all `variables`, in their order.

        Args:
            weights: Arrays or tensors, one for each of `variables`.

        Raises:
            ValueError: Another number of weights, or another shape.
        """
        weights = list(weights)
        arguments.check_number_of_weights(len(weights), len(self.variables))
        num_plain = len(self._plain_variables())
        self._set_plain_weights(weights[:num_plain])
        for variable, weight in zip(
            self.window_state.held, weights[num_plain:], strict=True
        ):
            variable.assign(weight)

    def _accumulation_config(self) -> dict[str, Any]:
        return {
            "accumulation_steps": self.accumulation_steps,
            "micro_reduction": self._reduction.micro,
            "replica_reduction": self._reduction.replica,
            "accumulator_dtype": arguments.serialized(self._accumulator_dtype),
            "loss_scale": arguments.serialized(self._loss_scale_argument),
            "on_nonfinite": self._on_nonfinite,
            "reduce_every": "micro_step" if self._reduces_early else "window",
            "replica_groups": self._groups.said,
        }

    # What other optimizers say to this one.

    def __setattr__(self, name: str, value: Any) -> None:
        # All that Keras's wrappers tell an optimizer is its `loss_scale_factor`.
        if name == "loss_scale_factor" and "window_state" in self.__dict__:
            self._hear_loss_scale_factor(value, surrounding_optimizer(self))
        else:
            super().__setattr__(name, value)

    def _hear_loss_scale_factor(self, value: Any, surrounding: Any) -> None:
        raise NotImplementedError
