"""Gradient accumulation around or inside a Keras optimizer, from gradient to variable.

Read `Accumulation` from top to bottom: a gradient enters at `apply_gradients`, is
added to an accumulator, and at the boundary of a window is reduced, checked and handed
to the plain optimizer: the one that `wrapper.py` has inside, or the class that
`mixin.py` stands before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_accum import arguments, boundary, micro_batch, nonfinite
from keras_accum.absent_gradients import passed_by
from keras_accum.accumulation_state import AccumulationState
from keras_accum.average_overwrite import overwritten_with_average
from keras_accum.inner_optimizer import is_multi_optimizer
from keras_accum.known_variables import is_overwritten, native
from keras_accum.reduction import divide_all, reduce_micro_batch, reduce_window
from keras_accum.window import share_of

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
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if weight is None:  # a subclass may have an `apply` of Keras's signature
            self.apply(gradients, variables)
        else:
            self.apply(gradients, variables, weight=weight)
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
        if self._program is not None:  # on an IPU, that of its own replicas
            gradients, weight = self._program.reduced(gradients, weight, self)
        arrived = micro_batch.arrived(gradients)
        with tf.control_dependencies(arrived):
            if weight is not None:
                self._window.mark_weighted()
        known = self._known_variables
        self._loss_scale.observe(gradients, known, weight)
        if self._on_nonfinite == "skip_micro_batch":
            weight = nonfinite.weight_if_finite(gradients, weight, self._window)
        self._measurements.observe(gradients, weight, known, self._loss_scale)
        if self._accumulators is None:  # a window of one: nothing to store
            return self._close_now(gradients, weight)
        share = share_of(weight)
        if self._reduces_early:
            gradients, share = self._reduce_early(gradients, weight, share)
            weight = None
        self._accumulators.add(gradients, weight, self._window.position)
        with tf.control_dependencies(arrived):
            self._accumulators.note_present(gradients)
            self._window.advance(share)
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
        given, local, _ = micro_batch.weighted_gradients(
            gradients, weight, self._known_variables, self._accumulator_dtype
        )
        if weight is not None:
            weight = tf.convert_to_tensor(share_of(weight))
        close = functools.partial(self._close_window, given, [], None)
        boundary.merge(close, local, weight)

    def _reduce_early(
        self, gradients: Sequence[Any], weight: tf.Tensor | None, share: Any
    ) -> tuple[list[Any], tf.Tensor]:
        """Replica context: reduces a micro-batch, before it is accumulated."""
        given, local, overwritten = micro_batch.weighted_gradients(
            gradients, weight, self._known_variables, self._accumulator_dtype
        )
        combined, share = reduce_micro_batch(
            local, share, overwritten, self._reduction, self._groups
        )
        reduced = list(gradients)
        for index, gradient in zip(given, combined, strict=True):
            reduced[index] = gradient
        return reduced, share

    def _close_if(self, is_due: tf.Tensor, gradients: Sequence[Any]) -> None:
        """Replica context: closes the window on all replicas, if it is due.

        Args:
            is_due: Scalar bool, equal on all replicas.
            gradients: This micro step's. Where one is None, whether its variable got
                one earlier in the window is known only at run time.
        """
        given = [index for index, g in enumerate(gradients) if g is not None]
        indices = sorted({*self._known_variables.not_frozen(), *given})
        has_gradient = self._accumulators.has_gradient()
        if is_multi_optimizer(self._plain()):  # which wants all that it was built for
            is_frozen = [i not in indices for i in range(len(self._known_variables))]
            has_gradient = tf.where(is_frozen, False, has_gradient)
            indices = list(range(len(self._known_variables)))
        uncertain = [index for index in indices if gradients[index] is None]

        def close_if_due(is_due: Any, has_gradient: Any) -> None:
            window = (indices, uncertain, has_gradient)
            close = functools.partial(self._close_window, *window)
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
            weight: On each replica, its share in the weight of a window of one; None
                when all weigh 1.
        """
        reduce = functools.partial(self._reduce, indices)
        reduced, verdict = boundary.each_replica(reduce, gradients, weight)

        def update() -> None:
            optional, plain, known = [], self._plain(), self._known_variables
            if uncertain:
                present = boundary.first_replica(has_gradient)
                optional = [(known[i], present[i]) for i in uncertain]
            with (
                self._reduced_gradients(),
                self._decay.decoupled(plain, known),
                passed_by(plain, optional),
                overwritten_with_average(plain, known),
            ):
                update = functools.partial(self._update, indices, uncertain)
                boundary.each_replica(update, reduced, has_gradient)

        skip = functools.partial(boundary.each_replica, self._skip, verdict)
        boundary.decide(verdict["is_good"], update, skip)
        boundary.each_replica(self._open_window, verdict)

    def _reduce(self, indices: list[int], gradients: Any, weight: Any) -> tuple:
        """Replica context, in the branch: the one reduction of the window.

        Returns:
            The reduced gradients, divided and unscaled, and what is known of them:
            all equal on all replicas.
        """
        is_reduced = gradients is None and self._reduces_early
        reduction = self._reduction.of_reduced if is_reduced else self._reduction
        if gradients is None:
            indices, gradients = self._accumulators.read(indices)
            weight = self._window.weight.read_value()
        variables = self._known_variables.at(indices)
        overwritten = [is_overwritten(variable) for variable in variables]
        combined, totals, riders = reduce_window(
            gradients, self._riders(weight), overwritten, self._groups, is_reduced
        )
        divisor = reduction.divisor(totals.get("weight"), self._groups.size)
        reduced = divide_all(
            combined,
            [
                None if is_statistic else self._loss_scale.divisor(variable, divisor)
                for variable, is_statistic in zip(variables, overwritten, strict=True)
            ],
            [arguments.dtype_of_reduced(v, self._accumulator_dtype) for v in variables],
        )
        totals |= self._measurements.of_reduced(reduced, variables, totals)
        return reduced, nonfinite.verdict(
            self._on_nonfinite, reduced, totals, riders, self._groups
        )

    def _riders(self, weight: tf.Tensor | None) -> dict[str, tf.Tensor]:
        """What this replica has to say of the window beside its gradients."""
        riders = {} if weight is None else {"weight": weight}
        if self._on_nonfinite == "skip_micro_batch":
            riders["bad_micro_batches"] = self._window.bad_micro_batches.read_value()
        return riders | self._loss_scale.observed() | self._measurements.observed()

    def _update(
        self, indices: list[int], uncertain: list[int], reduced: Any, has_gradient: Any
    ) -> None:
        """Replica context, in the inner branch: the plain optimizer's own update.

        It clips, decays, applies constraints, moves its average and counts, once.
        """
        present: list[Any] = [None] * len(indices)
        if has_gradient is not None:  # it is no window of one
            reduced = self._accumulators.apart(indices, reduced)
            present = [has_gradient[i] if i in uncertain else None for i in indices]
        variables = self._known_variables.at(indices)
        gradients = self._decay.coupled(reduced, variables, present)
        for place, (index, variable) in enumerate(zip(indices, variables, strict=True)):
            if is_overwritten(variable) and has_gradient is not None:
                gradients[place] = tf.where(
                    has_gradient[index], reduced[place], native(variable)
                )
        # The wrapper's is `inner_optimizer.apply`, the mixin's `super().apply`.
        self._apply_plain(gradients, variables)
        self._window.record_update()

    def _skip(self, verdict: dict[str, tf.Tensor]) -> None:
        """Replica context, in the inner branch: the window ends without an update."""
        self._window.record_skip(verdict["is_clean"])

    def _open_window(self, verdict: dict[str, tf.Tensor]) -> None:
        """Replica context, in the branch: empties the window, draws the conclusions."""
        # As soon as they are read: they need not live beside what is reduced of them.
        self._empty_accumulators()
        self._measurements.close_window(verdict, self._window)
        self._window.restart(verdict.get("bad_micro_batches", 0.0))
        self._loss_scale.close_window(verdict, tf.convert_to_tensor(self.iterations))

    # Between micro steps.

    def flush(self) -> None:
        """Updates now, with what the window holds; nothing at position 0.

        A mean is taken over the micro-batches that are there. Call it from plain
        Python (a callback), under the strategy's scope, or in replica context; with
        several workers, on all of them.
        """
        self._num_changes += 1
        if self.built and self._accumulators is not None:
            variables = self._known_variables.not_frozen()
            if variables:  # of a model that is frozen as a whole the window stays
                self._from_anywhere(self._flush, ("flush", *variables))

    @do_not_convert
    def _flush(self) -> None:
        none_given = [None] * len(self._known_variables)
        self._close_if(self._window.is_open(), none_given)
