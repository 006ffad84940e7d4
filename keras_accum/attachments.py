"""What can be attached to an accumulating optimizer until its first micro step."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import tensorflow as tf

from keras_accum.arguments import StepIsTraced
from keras_accum.boundary import FromAnywhere
from keras_accum.gradient_measurements import GradientMeasurements, NoMeasurements
from keras_accum.known_variables import display_name, native
from keras_accum.reduction import Reduction
from keras_accum.replica_groups import ReplicaGroups
from keras_accum.weight_decay import (
    Filter,
    NoWeightDecay,
    WeightDecay,
    check_does_not_decay,
    checked_rate,
)


class Attachments:
    """Weight decay and measurements of the gradients: none until they are asked for.

    They are part of the compiled step, which must not have been traced without them.
    Their numbers live in variables: what is attached once can be changed at any time.
    """

    _strategy: tf.distribute.Strategy
    _reduction: Reduction
    _groups: ReplicaGroups
    _from_anywhere: FromAnywhere
    _has_stepped: bool
    _excluded: tuple[set[int], list[str]]

    def _plain(self) -> Any:
        raise NotImplementedError

    def _in_scope(self) -> contextlib.AbstractContextManager:
        raise NotImplementedError

    def _attach_nothing(self) -> None:
        self._decay: WeightDecay = NoWeightDecay()
        self._measurements = NoMeasurements()
        self._rate_before: float | None = None
        # Past Keras's attribute tracking, which would save them.
        self.__dict__["_excluded"] = (set(), [])

    def _note_excluded(self, var_list: Any, var_names: Any) -> None:
        """What `exclude_from_weight_decay` is told holds for `decay_weights` too."""
        variables, names = self._excluded
        variables.update(id(native(variable)) for variable in var_list or [])
        names.extend(var_names or [])

    def _is_excluded(self, variable: Any) -> bool:
        variables, names = self._excluded
        path = display_name(variable)
        is_named = any(re.search(name, path) for name in names)
        return is_named or id(native(variable)) in variables

    def decay_weights(
        self,
        weight_decay: float,
        *,
        decoupled: bool = True,
        times_learning_rate: bool = True,
        filter: Filter = None,
        beside_inner: bool = False,
    ) -> None:
        """Decays the variables at each update, once, by a rate that can be set.

        The rate is `pipelined_weight_decay`. It is not saved, as an optimizer's own
        `weight_decay` is not.

        Args:
            weight_decay: The rate, a finite float >= 0.
            decoupled: True decays the variable before its update, as AdamW; False adds
                `weight_decay * variable` to the reduced gradient, before clipping.
            times_learning_rate: Whether a decoupled decay has the learning rate as a
                factor, as Keras's and PyTorch's AdamW; False is the independent form.
            filter: Which variables decay. None: all. A callable from variable to
                bool: those for which it is True. A name, or several: all but those in
                whose path one is found. What `exclude_from_weight_decay` was told is
                left out in any case.
            beside_inner: Whether the inner optimizer may decay by itself as well.

        Raises:
            TypeError: An argument's type is wrong.
            ValueError: The rate is negative; the inner optimizer decays by itself;
                weights decay already in another way; a micro step was taken without
                this decay.

        Example:

        >>> optimizer = keras_accum.AccumulationOptimizer(
        ...     keras.optimizers.SGD(0.1), accumulation_steps=2)
        >>> optimizer.decay_weights(0.5)
        >>> variable = keras.Variable(1.0)
        >>> for gradient in (0.0, 0.0):
        ...     _ = optimizer.apply_gradients([(tf.constant(gradient), variable)])
        >>> round(float(variable.numpy()), 4)
        0.95
        """
        with self._in_scope():
            decay = WeightDecay(
                weight_decay, decoupled, times_learning_rate, filter, beside_inner
            )
        decay.is_excluded = self._is_excluded
        check_does_not_decay(self._plain(), decay)
        if self._decay.is_like(decay):
            self._decay.rate.assign(decay.rate)
            return
        self._check_not_traced("decay_weights")
        if float(self.pipelined_weight_decay) > 0:
            raise ValueError(
                "Weights decay already, in another form or with another filter. "
                f"Received: weight_decay={weight_decay}, decoupled={decoupled}, "
                f"times_learning_rate={times_learning_rate}, filter={filter!r}. Set "
                "`optimizer.pipelined_weight_decay = 0` first to change it."
            )
        self._decay = decay

    @property
    def pipelined_weight_decay(self) -> tf.Tensor:
        """float32 scalar: the rate of `decay_weights`, 0 without one.

        Settable; counts from the next update on, without a retrace.
        """
        return tf.convert_to_tensor(self._decay.rate)

    @pipelined_weight_decay.setter
    def pipelined_weight_decay(self, rate: float) -> None:
        rate = checked_rate("pipelined_weight_decay", rate)
        if isinstance(self._decay, NoWeightDecay):
            raise ValueError(
                "`pipelined_weight_decay` can be set once weights are decayed. "
                f"Received: pipelined_weight_decay={rate}. Call "
                f"`optimizer.decay_weights({rate})` before the first micro step."
            )
        self._decay.rate.assign(rate)

    def _lend_weight_decay(self) -> None:
        """Notes the rate, for `_end_lent_weight_decay` to give back.

        What was lent to a `fit` that ended by an exception is given back first.
        """
        self._end_lent_weight_decay()
        self._rate_before = float(self.pipelined_weight_decay)

    def _end_lent_weight_decay(self) -> None:
        """Gives back the rate that there was before it was lent."""
        rate, self._rate_before = self._rate_before, None
        if rate is not None and not isinstance(self._decay, NoWeightDecay):
            self._decay.rate.assign(rate)

    def measure_gradients(self, noise: bool = False, momentum: float = 0.95) -> None:
        """Measures gradients on their way: `gradient_norm`, `gradient_noise_scale`.

        Args:
            noise: Whether the noise scale is measured too; a pass over each
                micro-gradient, and sparse ones are made dense for it.
            momentum: Of its moving averages over updates, in [0, 1).

        Raises:
            ValueError: A momentum outside of [0, 1), or a micro step was taken without
                these measurements.
        """
        if not 0 <= momentum < 1:
            raise ValueError(
                "`momentum` must be in [0, 1). "
                f"Received: momentum={momentum!r}. Use for example 0.95."
            )
        if noise and not self._groups.is_one:
            raise ValueError(
                "`noise` must be False with several groups of replicas: each has a "
                "reduced gradient of its own. Received: noise=True. Leave "
                "replica_groups out."
            )
        present = self._measurements
        is_enough = isinstance(present, GradientMeasurements) and not noise
        if isinstance(present, GradientMeasurements) and present.is_noise_measured:
            is_enough = not noise or present.momentum == momentum
        if is_enough:
            return
        self._check_not_traced("measure_gradients")
        with self._in_scope():
            self._measurements = GradientMeasurements(
                self._reduction, self._strategy.num_replicas_in_sync, noise, momentum
            )

    @property
    def gradient_norm(self) -> tf.Tensor:
        """float32 scalar: L2 norm of the last reduced gradient, if it is measured.

        Of the window that was closed last, before clipping. NaN without
        `measure_gradients`, and before the first window is closed.
        """
        if isinstance(self._measurements, GradientMeasurements):
            return self._measurements.gradient_norm.read_value()
        return tf.constant(float("nan"))

    @property
    def gradient_noise_scale(self) -> tf.Tensor:
        """float32 scalar: the simple noise scale, in micro-batches of one replica.

        NaN without `measure_gradients(noise=True)`, and while it is not known.
        """
        measurements = self._measurements
        if isinstance(measurements, GradientMeasurements) and (
            measurements.is_noise_measured
        ):
            return measurements.noise_scale()
        return tf.constant(float("nan"))

    def forget_traces(self) -> None:
        """Says that the next micro step will be traced anew.

        After it `decay_weights`, `measure_gradients` and larger `accumulation_steps`
        than 1 are taken up. A step that was compiled before must not be called again.
        """
        self._has_stepped = False
        self._from_anywhere.forget()

    def _check_not_traced(self, method: str) -> None:
        if self._has_stepped:
            raise StepIsTraced(
                f"`{method}` must be called before the first micro step: what is "
                "compiled then cannot learn of it. Received: an optimizer that has "
                "taken a micro step. Call it right after construction; or compile the "
                "step anew, and call `optimizer.forget_traces()` before."
            )
