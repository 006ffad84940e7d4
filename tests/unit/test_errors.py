"""What a micro step, `build` and the setters refuse, and what they say."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.arguments import StepIsTraced
from tests import refusals, registry
from tests.unit.test_arguments import make

ONE = 1.0
TWO = (1.0, 1.0)
SURFACES = [("wrapper", "wrapper"), ("mixin", "mixin")]


class ErrorCase(refusals.RefusalCase):
    """Two variables, named, and an optimizer that is built for them."""

    def _variables(self):
        return [keras.Variable(ONE, name="scale"), keras.Variable(TWO, name="offset")]

    def _built(self, surface, accumulation_steps=2, **options):
        self.variables = self._variables()
        optimizer = make(surface, accumulation_steps, **options)
        optimizer.build(self.variables)
        return optimizer

    def _step(self, optimizer, gradients=(ONE, TWO), variables=None, **arguments):
        variables = self.variables if variables is None else variables
        gradients = [None if g is None else tf.constant(g) for g in gradients]
        optimizer.apply_gradients(
            list(zip(gradients, variables, strict=True)), **arguments
        )


@parameterized.named_parameters(*SURFACES)
class MicroStepTest(ErrorCase):
    def test_an_unknown_variable_is_named(self, surface):
        optimizer = self._built(surface)
        unknown = keras.Variable(ONE, name="newcomer")
        foreign = tf.Variable(ONE, name="stranger")
        for variable, name in ((unknown, unknown.path), (foreign, foreign.name)):
            self.assert_refused(
                ValueError,
                lambda v=variable: self._step(optimizer, (ONE,), [v]),
                "can only be used with the variables it was built for",
                f"unknown variable {name!r}",
                "construct a new optimizer",
            )

    def test_a_variable_that_is_given_twice_is_named(self, surface):
        optimizer = self._built(surface)
        scale, offset = self.variables
        for twice in (scale, scale.value):
            self.assert_refused(
                ValueError,
                lambda twice=twice: self._step(
                    optimizer, (ONE, TWO, ONE), [scale, offset, twice]
                ),
                "Each variable must be given once in a micro step",
                "twice",
            )

    def test_no_gradient_at_all(self, surface):
        optimizer = self._built(surface)
        self.assert_refused(
            ValueError,
            lambda: self._step(optimizer, (None, None)),
            "At least one variable must have a gradient",
            "None for each of ['scale', 'offset']",
            "Does the loss depend on them?",
        )

    def test_some_gradients_that_are_none_are_warned_of(self, surface):
        optimizer = self._built(surface)
        with self.assertWarnsRegex(UserWarning, r"variables \['scale'\]"):
            self._step(optimizer, (None, TWO))

    def test_lists_of_other_lengths(self, surface):
        optimizer = self._built(surface)
        one, two = tf.constant(ONE), tf.constant(TWO)
        for grads, variables, numbers in (
            ([one], None, "1 gradients for 2 variables"),
            ([one, two, one], None, "3 gradients for 2 variables"),
            ([one], self.variables, "1 gradients for 2 variables"),
            ([one, two], self.variables[:1], "2 gradients for 1 variables"),
        ):
            self.assert_refused(
                ValueError,
                lambda g=grads, v=variables: optimizer.apply(g, v),
                "`grads` must hold one gradient (or None) per variable",
                numbers,
            )

    def test_an_unbuilt_optimizer_must_be_told_its_variables(self, surface):
        optimizer = make(surface)
        self.assert_refused(
            ValueError,
            lambda: optimizer.apply([tf.constant(ONE)]),
            "An optimizer that is not built must be told its variables",
            "trainable_variables=None",
            "Call `optimizer.build(variables)` first, or pass them",
        )
        self.assertFalse(optimizer.built)

    def test_no_gradients_and_no_variables_do_nothing(self, surface):
        optimizer = self._built(surface)
        optimizer.apply([])
        optimizer.apply([], [])
        self.assertEqual(int(optimizer.position), 0)

    def test_a_refused_micro_step_changes_nothing(self, surface):
        optimizer = self._built(surface)
        before = [variable.numpy() for variable in optimizer.variables]
        unknown = keras.Variable(ONE, name="newcomer")
        for gradients, variables, weight in (
            ((ONE, ONE), [self.variables[0], unknown], None),
            ((None, None), None, None),
            ((ONE, TWO), None, -1),
        ):
            with self.assertRaises(ValueError):
                self._step(optimizer, gradients, variables, weight=weight)
        for one, other in zip(before, optimizer.variables, strict=True):
            np.testing.assert_array_equal(one, other.numpy())


@parameterized.named_parameters(*SURFACES)
class WeightTest(ErrorCase):
    def test_what_is_no_finite_number_of_at_least_zero_is_refused(self, surface):
        optimizer = self._built(surface)
        for weight in (-1, -0.5, float("nan"), float("inf"), np.float32(-2)):
            self.assert_refused(
                ValueError,
                lambda weight=weight: self._step(optimizer, weight=weight),
                "`weight` must be a finite number >= 0",
                f"weight={weight}",
            )

    def test_a_vector_is_refused(self, surface):
        optimizer = self._built(surface)
        for weight in ([1.0, 2.0], np.ones(2), tf.ones(2), tf.ones((1,))):
            self.assert_refused(
                ValueError,
                lambda weight=weight: self._step(optimizer, weight=weight),
                "`weight` must be a scalar",
                "weight of shape (",
                "Pass the sum of the rows' weights",
            )

    def test_a_vector_is_refused_in_a_graph_too(self, surface):
        optimizer = self._built(surface)
        step = tf.function(lambda: self._step(optimizer, weight=tf.ones(2)))
        with self.assertRaisesRegex(ValueError, "`weight` must be a scalar"):
            step()

    def test_a_running_mean_takes_none(self, surface):
        optimizer = self._built(surface, micro_reduction="running_mean")
        self.assert_refused(
            ValueError,
            lambda: self._step(optimizer, weight=2.0),
            "`weight` must be None",
            "weight=2.0",
            'micro_reduction="mean"',
        )

    def test_scalars_of_every_kind_are_accepted(self, surface):
        optimizer = self._built(surface, accumulation_steps=6)
        for weight in (0, 2, 0.5, np.float64(1), np.int32(3), tf.constant(4)):
            self._step(optimizer, weight=weight)
        # The gradients are all ones, so any weighted mean of them is one.
        self.assertEqual(float(self.variables[0].numpy()), 0)
        np.testing.assert_array_equal(self.variables[1].numpy(), [0, 0])


@parameterized.named_parameters(*SURFACES)
class BuildTest(ErrorCase):
    def test_a_variable_without_a_full_shape_is_named(self, surface):
        loose = tf.Variable(tf.zeros((2, 3)), shape=(None, 3), name="loose")
        self.assert_refused(
            ValueError,
            lambda: make(surface).build([loose]),
            "A variable must have a fully defined shape",
            f"variable {loose.name!r} of shape (None, 3)",
        )

    def test_a_variable_of_another_scope_is_named(self, surface):
        mirrored = registry.mirrored()
        outside = self._variables()
        with mirrored.scope():
            inside = self._variables()
            optimizer = make(surface)
        for subject, variables, name in (
            (optimizer, [*inside, *outside], "MirroredStrategy"),
            (make(surface), inside, ""),
        ):
            self.assert_refused(
                ValueError,
                lambda subject=subject, variables=variables: subject.build(variables),
                "must be made in the scope of the same strategy",
                "variable 'scale', which was not made in the scope of " + name,
                "under one `with strategy.scope():`",
            )

    def test_an_optimizer_made_outside_the_scope_cannot_be_built_inside(self, surface):
        optimizer = make(surface)
        with registry.mirrored().scope():
            self.assert_refused(
                ValueError,
                lambda: optimizer.build(self._variables()),
                "The optimizer must be constructed under the scope of the strategy",
                "used under MirroredStrategy",
                "Construct it inside `with strategy.scope():`",
            )
        self.assertFalse(optimizer.built)

    def test_an_optimizer_made_outside_the_scope_cannot_step_inside(self, surface):
        mirrored = registry.mirrored()
        with mirrored.scope():
            self.variables = self._variables()
        for optimizer in (make(surface), self._built_outside(surface)):
            self.assert_refused(
                ValueError,
                lambda optimizer=optimizer: mirrored.run(lambda: self._step(optimizer)),
                "The optimizer must be constructed under the scope of the strategy",
                "used under MirroredStrategy",
                "Construct it inside `with strategy.scope():`",
            )

    def _built_outside(self, surface):
        optimizer = make(surface)
        optimizer.build(self._variables())
        return optimizer

    def test_an_optimizer_of_the_scope_cannot_step_outside(self, surface):
        with registry.mirrored().scope():
            optimizer = self._built(surface)
        self.assert_refused(
            ValueError,
            lambda: self._step(optimizer),
            "The optimizer must be constructed under the scope of the strategy",
            "constructed under MirroredStrategy",
        )

    def test_a_micro_step_in_cross_replica_context_is_refused(self, surface):
        with registry.mirrored().scope():
            optimizer = self._built(surface)
            for call in (
                lambda: self._step(optimizer),
                lambda: optimizer.apply([tf.constant(ONE), tf.constant(TWO)]),
            ):
                self.assert_refused(
                    ValueError,
                    call,
                    "A micro step must be taken in replica context",
                    "in cross-replica context",
                    "Call it inside `strategy.run(...)`",
                )


@parameterized.named_parameters(*SURFACES)
class SettersTest(ErrorCase):
    def test_a_window_of_one_cannot_grow_once_it_has_stepped(self, surface):
        optimizer = self._built(surface, accumulation_steps=1)
        self._step(optimizer)
        self.assertTrue(issubclass(StepIsTraced, ValueError))
        self.assert_refused(
            StepIsTraced,
            lambda: setattr(optimizer, "accumulation_steps", 4),
            "`accumulation_steps` cannot be raised from 1",
            "accumulation_steps=4",
            "Construct the optimizer with accumulation_steps=4 and set it to 1",
        )
        self.assertEqual(optimizer.accumulation_steps, 1)
        optimizer.accumulation_steps = 1

    def test_before_its_first_step_it_can(self, surface):
        for is_built in (False, True):
            optimizer = make(surface, 1)
            self.variables = self._variables()
            if is_built:
                optimizer.build(self.variables)
            optimizer.accumulation_steps = 2
            self._step(optimizer, (2.0, (4.0, 6.0)))
            self.assertEqual(float(self.variables[0].numpy()), 1)
            self._step(optimizer, (4.0, (0.0, 0.0)))
            # From 1 by the mean gradients 3, 2 and 3 with a learning rate of 1.
            self.assertEqual(float(self.variables[0].numpy()), -2)
            np.testing.assert_array_equal(self.variables[1].numpy(), [-1, -2])

    def test_the_way_that_the_message_names_is_open(self, surface):
        optimizer = make(surface, 4)
        optimizer.accumulation_steps = 1
        self.variables = self._variables()
        self._step(optimizer)
        self.assertEqual(float(self.variables[0].numpy()), 0)
        optimizer.accumulation_steps = 4
        self._step(optimizer)
        self.assertEqual(int(optimizer.position), 1)

    def test_another_number_of_weights_is_refused(self, surface):
        optimizer = self._built(surface)
        number = len(optimizer.variables)
        arrays = [variable.numpy() for variable in optimizer.variables]
        for weights in ([], arrays[:-1], [*arrays, arrays[-1]]):
            self.assert_refused(
                ValueError,
                lambda weights=weights: optimizer.set_weights(weights),
                "`set_weights` must be given one weight for each of `variables`",
                f"{len(weights)} weights for {number} variables",
                "Build the optimizer first",
            )

    def test_a_weight_of_another_shape_is_refused(self, surface):
        optimizer = self._built(surface)
        weights = [variable.numpy() for variable in optimizer.variables]
        weights[-1] = np.zeros(7)
        with self.assertRaisesRegex(ValueError, "shape"):
            optimizer.set_weights(weights)

    def test_all_weights_can_be_set(self, surface):
        optimizer = self._built(surface)
        self._step(optimizer, (3.0, (5.0, 7.0)))
        other = self._built(surface)
        other.set_weights([variable.numpy() for variable in optimizer.variables])
        self.assertEqual(int(other.position), 1)
        self._step(other, (1.0, (1.0, 1.0)))
        self.assertEqual(float(self.variables[0].numpy()), 1 - 2)


@parameterized.named_parameters(*SURFACES)
class LoadTest(ErrorCase):
    """The window's own part of a file, as a dict of arrays."""

    def _saved(self, optimizer):
        store = {}
        optimizer.window_state.save_own_variables(store)
        return store

    def test_a_window_of_another_model_is_refused(self, surface):
        store = self._saved(self._built(surface))
        other = make(surface)
        other.build([*self._variables(), keras.Variable(ONE)])
        self.assert_refused(
            ValueError,
            lambda: other.window_state.load_own_variables(store),
            "The saved window must hold one accumulator for each variable",
            "2 saved accumulators for 3 variables",
            "Load it into an optimizer of the model that was saved",
        )

    def test_a_longer_window_is_refused_once_windows_of_one_were_closed(self, surface):
        optimizer = self._built(surface, accumulation_steps=3)
        self._step(optimizer)
        self._step(optimizer)
        store = self._saved(optimizer)
        other = self._built(surface, accumulation_steps=1)
        self._step(other)
        self.assert_refused(
            StepIsTraced,
            lambda: other.window_state.load_own_variables(store),
            "cannot be raised from 1 once a micro step was taken",
            "accumulation_steps=3",
            "with accumulation_steps=3 and set it to 1 to begin with",
        )

    def test_another_length_is_taken_from_the_file_and_told(self, surface):
        store = self._saved(self._built(surface, accumulation_steps=5))
        other = self._built(surface, accumulation_steps=2)
        with self.assertLogs("absl", "WARNING") as logs:
            other.window_state.load_own_variables(store)
        self.assertIn("accumulation_steps is 5, as saved", logs.output[0])
        self.assertEqual(other.accumulation_steps, 5)

    def test_other_plain_variables_are_skipped_with_a_warning(self, surface):
        optimizer = self._built(surface)
        before = [variable.numpy() for variable in optimizer.variables]
        with self.assertWarns(UserWarning):
            optimizer.load_own_variables({"0": np.int64(7)})
        for one, other in zip(before, optimizer.variables, strict=True):
            np.testing.assert_array_equal(one, other.numpy())
