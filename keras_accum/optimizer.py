"""Gradient accumulation around or inside a Keras optimizer, from gradient to variable.

Read `Accumulation` from top to bottom: a gradient enters at `apply_gradients`, is
added to an accumulator, and at the boundary of a window is reduced, checked and handed
to the plain optimizer: here the one inside, in `mixin.py` the class's own bases.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_accum import arguments, boundary, micro_batch, nonfinite
from keras_accum.absent_gradients import passed_by
from keras_accum.accumulation_state import AccumulationState
from keras_accum.already_reduced import gradients_are_reduced
from keras_accum.average_overwrite import overwritten_with_average
from keras_accum.inner_optimizer import (
    check_neither_accumulates_nor_scales,
    checked_inner_optimizer,
    is_multi_optimizer,
)
from keras_accum.known_variables import is_overwritten, native
from keras_accum.loss_scale import LossScale
from keras_accum.reduction import (
    combine_over_replicas,
    divide_all,
    weighted,
)
from keras_accum.wrapping import Wrapping

do_not_convert = tf.autograph.experimental.do_not_convert


class Accumulation(AccumulationState):
    """The way of a gradient, shared by the wrapper and the mixin."""

    # The way of a gradient, micro step by micro step.

    def apply_gradients(self, grads_and_vars: Iterable, weight: Any = None) -> Any:
        """Takes one micro step; the last one of a window updates the variables.

        Called in replica context: by `fit`, or inside `strategy.run`.

        Args:
            grads_and_vars: Pairs of gradient and variable. A gradient is a tensor of
                its variable's shape, `tf.IndexedSlices`, or None.
            weight: What this micro-batch on this replica weighs in the mean, a scalar
                >= 0 such as its rows or tokens. None means 1.

        Returns:
            `iterations`, the number of updates made.

        Raises:
            ValueError: Called in cross-replica context or under another strategy, an
                unknown variable, no gradient at all, or a weight that is negative.
        """
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs], weight=weight)
        return self.iterations

    @do_not_convert
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        weight: Any = None,
    ) -> None:
        """Takes one micro step, as `apply_gradients` does, with two lists.

        Args:
            grads: One gradient, or None, per variable.
            trainable_variables: The variables; None for those the optimizer was built
                for.
            weight: As in `apply_gradients`.

        Raises:
            ValueError: As `apply_gradients`.
        """
        if len(grads) == 0:
            return
        gradients = self._aligned(grads, trainable_variables)
        weight = micro_batch.checked_weight(weight, self._reduction)
        self._has_stepped = True
        if self._on_nonfinite == "skip_micro_batch":
            weight = nonfinite.weight_if_finite(gradients, weight, self._window)
        self._loss_scale.observe(gradients, self._known_variables)
        if self._accumulators is None:  # a window of one: nothing to store
            self._close_now(gradients, weight)
        else:
            self._accumulators.add(gradients, weight, self._window.position)
            self._window.advance(weight)
            self._close_if(self._window.is_full(), gradients)

    def _aligned(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> list:
        """One gradient or None per variable built for; builds on the first call."""
        micro_batch.check_replica_context(self._strategy)
        if not self.built:
            first_variables = micro_batch.variables_to_build(variables)
            # Once for all replicas: they are threads that share the optimizer.
            boundary.merge(lambda: self.build(first_variables))
        known = self._known_variables
        return micro_batch.aligned(
            grads, known if variables is None else variables, known
        )

    # The boundary of a window.

    def _close_now(self, gradients: Sequence[Any], weight: tf.Tensor | None) -> None:
        """Replica context: closes a window of one, which is the micro-batch itself."""
        given = [index for index, g in enumerate(gradients) if g is not None]
        local = [gradients[index] for index in given]
        if weight is not None:
            for place, variable in enumerate(self._known_variables.at(given)):
                if not is_overwritten(variable):
                    dtype = arguments.dtype_of_accumulator(
                        variable, self._accumulator_dtype
                    )
                    local[place] = weighted(local[place], weight, dtype)
        close = functools.partial(self._close_window, given, [], None)
        boundary.merge(close, local, weight)

    def _close_if(self, is_due: tf.Tensor, gradients: Sequence[Any]) -> None:
        """Replica context: closes the window on all replicas, if it is due.

        Args:
            is_due: Scalar bool, equal on all replicas.
            gradients: This micro step's. Where one is None, whether its variable got
                one earlier in the window is known only at run time.
        """
        indices = self._known_variables.not_frozen()
        has_gradient = self._accumulators.has_gradient()
        if is_multi_optimizer(self._plain()):  # which wants all that it was built for
            is_frozen = [i not in indices for i in range(len(self._known_variables))]
            has_gradient = tf.where(is_frozen, False, has_gradient)
            indices = list(range(len(self._known_variables)))
        uncertain = [index for index in indices if gradients[index] is None]

        def close_if_due(is_due: Any, has_gradient: Any) -> None:
            def close() -> None:
                self._close_window(indices, uncertain, has_gradient)

            boundary.decide(is_due, close)

        boundary.merge(close_if_due, is_due, has_gradient)

    def _close_window(
        self,
        indices: list[int],
        uncertain: list[int],
        has_gradient: Any,
        gradients: Any = None,
        weight: Any = None,
    ) -> None:
        """Cross-replica context: reduces, decides for all, updates, opens the next.

        Args:
            indices: The variables to update.
            uncertain: Those of them that may be without a gradient in this window.
            has_gradient: On each replica, bool of shape (variables,).
            gradients: On each replica, the local gradients of a window of one; None to
                read what has been accumulated.
            weight: On each replica, the weight of a window of one; None means 1.
        """
        reduce = functools.partial(self._reduce, indices)
        reduced, verdict = boundary.each_replica(reduce, gradients, weight)

        def update() -> None:
            optional = []
            if uncertain:
                present = boundary.first_replica(has_gradient)
                optional = [(self._known_variables[i], present[i]) for i in uncertain]
            with (
                self._reduced_gradients(),
                passed_by(self._plain(), optional),
                overwritten_with_average(self._plain(), self._known_variables),
            ):
                update = functools.partial(self._update, indices)
                boundary.each_replica(update, reduced, has_gradient)

        def skip() -> None:
            boundary.each_replica(self._skip, verdict)

        boundary.decide(verdict["is_good"], update, skip)
        boundary.each_replica(self._open_window, verdict)

    def _reduce(self, indices: list[int], gradients: Any, weight: Any) -> tuple:
        """Replica context, in the branch: the one reduction of the window.

        Returns:
            The reduced gradients, divided and unscaled, and what is known of them:
            all equal on all replicas.
        """
        if gradients is None:
            gradients = self._accumulators.read(indices)
            weight = self._window.weight.read_value()
        variables = self._known_variables.at(indices)
        overwritten = [is_overwritten(variable) for variable in variables]
        combined, totals = combine_over_replicas(
            gradients, self._riders(weight), overwritten
        )
        divisor = self._reduction.divisor(totals.get("weight"))
        reduced = divide_all(
            combined,
            [
                None if is_statistic else self._loss_scale.divisor(variable, divisor)
                for variable, is_statistic in zip(variables, overwritten, strict=True)
            ],
            [arguments.dtype_of_reduced(v, self._accumulator_dtype) for v in variables],
        )
        return reduced, nonfinite.verdict(self._on_nonfinite, reduced, totals)

    def _riders(self, weight: tf.Tensor | None) -> dict[str, tf.Tensor]:
        """What this replica has to say of the window beside its gradients."""
        riders = {} if weight is None else {"weight": weight}
        if self._on_nonfinite == "skip_micro_batch":
            riders["bad_micro_batches"] = self._window.bad_micro_batches.read_value()
        return {**riders, **self._loss_scale.observed()}

    def _update(self, indices: list[int], reduced: Any, has_gradient: Any) -> None:
        """Replica context, in the inner branch: the plain optimizer's own update.

        It clips, decays, applies constraints, moves its average and counts, once.
        """
        variables = self._known_variables.at(indices)
        gradients = list(reduced)
        for place, (index, variable) in enumerate(zip(indices, variables, strict=True)):
            if is_overwritten(variable) and has_gradient is not None:
                gradients[place] = tf.where(
                    has_gradient[index], reduced[place], native(variable)
                )
        self._apply_plain(gradients, variables)
        self._window.record_update()

    def _skip(self, verdict: dict[str, tf.Tensor]) -> None:
        """Replica context, in the inner branch: the window ends without an update."""
        self._window.record_skip(verdict["is_clean"])

    def _open_window(self, verdict: dict[str, tf.Tensor]) -> None:
        """Replica context, in the branch: empties the window, draws the conclusions."""
        self._empty_accumulators()
        self._window.restart(verdict.get("bad_micro_batches", 0.0))
        self._loss_scale.close_window(verdict, tf.convert_to_tensor(self.iterations))


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumulationOptimizer(
    Wrapping, Accumulation, keras.optimizers.LossScaleOptimizer
):
    """Wraps a Keras optimizer so that N micro-batches train as one large batch.

    Gradients are added up where they arise, reduced over the replicas once per
    window, divided, unscaled, checked, and handed once to the inner optimizer, which
    clips, decays, moves its average and counts as if it had seen one large batch.

    It is a `keras.optimizers.LossScaleOptimizer` for one reason: `compile` then sees
    that it scales its own loss, and puts no other one around it.

    What the window holds is saved with the model, by all of Keras's formats and by
    `tf.train.Checkpoint`, and taken up again on any number of replicas. As with a
    learning rate, the `accumulation_steps` of a file replace those of the
    constructor. Under MultiWorkerMirroredStrategy a save in mid-window sums over the
    workers, so all of them must call it.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, `MultiOptimizer` included,
            that neither accumulates nor scales the loss by itself.
        accumulation_steps: Micro steps per update, an int >= 1. Windows of one need
            and have no accumulators.
        micro_reduction: How the gradients of a window combine. `"mean"`: their
            weighted mean. `"sum"`: their weighted sum. `"running_mean"`: the mean,
            kept while the window fills, so that a float16 accumulator cannot overflow
            by the length of the window; takes no weights.
        replica_reduction: How they combine over replicas. `"sum"` is right for losses
            that carry 1/R already, as Keras's do in `fit`; else `"mean"`.
        accumulator_dtype: What gradients are added up in: a floating dtype, or a
            callable from variable to dtype. None is float32 for float16 and bfloat16
            variables, else the variable's own. The inner optimizer receives the
            variable's dtype, or a wider one that was chosen here.
        loss_scale: None, `"dynamic"`, a finite number > 0, or a `DynamicLossScale`,
            `ScheduledLossScale` or `AutomaticLossScale`. None is dynamic under a
            `mixed_float16` policy, else no scale; 1.0 is never one.
        on_nonfinite: What becomes of an infinity or a NaN. `"skip_window"`: a window
            whose reduced gradient holds one makes no update on any replica, and is
            counted in `skipped_windows`. `"skip_micro_batch"`: a micro-batch that
            holds one leaves the window and its divisor, on the replica where it was,
            and is counted in `skipped_micro_batches`; costs a pass over each
            micro-gradient. `"propagate"`: it reaches the variables.
        name: Of the optimizer.

    Raises:
        TypeError: The inner optimizer is none, or an argument's type is wrong.
        ValueError: An argument's value is wrong; the inner optimizer accumulates or
            scales; a strategy that is not supported.

    Example:

    >>> optimizer = keras_accum.AccumulationOptimizer(
    ...     keras.optimizers.SGD(1.0), accumulation_steps=2)
    >>> variable = keras.Variable([1.0, 2.0])
    >>> for gradient in ([1.0, 1.0], [3.0, 1.0]):
    ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
    ...     print(variable.numpy(), int(optimizer.position), int(optimizer.iterations))
    [1. 2.] 1 0
    [-1.  1.] 0 1
    """

    def __init__(
        self,
        inner_optimizer: Any,
        accumulation_steps: int,
        *,
        micro_reduction: str = "mean",
        replica_reduction: str = "sum",
        accumulator_dtype: arguments.AccumulatorDType = None,
        loss_scale: float | str | LossScale | None = None,
        on_nonfinite: str = "skip_window",
        name: str | None = None,
    ) -> None:
        arguments.check_backend()
        inner_optimizer = checked_inner_optimizer(inner_optimizer, Accumulation)
        scale = arguments.resolved_loss_scale(loss_scale)
        super().__init__(inner_optimizer, name=name)  # pyright: ignore[reportCallIssue]
        self._set_up(
            accumulation_steps,
            micro_reduction,
            replica_reduction,
            accumulator_dtype,
            scale,
            on_nonfinite,
        )

    def _plain(self) -> Any:
        return self.inner_optimizer

    def _build_plain(self, variables: list[Any]) -> None:
        self.inner_optimizer.build(variables)
        check_neither_accumulates_nor_scales(self.inner_optimizer, Accumulation)

    def _apply_plain(self, gradients: list[Any], variables: list[Any]) -> None:
        if is_multi_optimizer(self.inner_optimizer):
            gradients, variables = self._known_variables.padded(gradients, variables)
        self.inner_optimizer.apply(gradients, variables)

    def _reduced_gradients(self) -> contextlib.AbstractContextManager:
        return gradients_are_reduced(self.inner_optimizer)
