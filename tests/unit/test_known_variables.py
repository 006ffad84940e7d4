"""Which variables an optimizer was built for, and by what they are known."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import known_variables
from tests import registry


class NativeTest(parameterized.TestCase):
    def test_a_keras_variable_is_looked_behind(self):
        variable = keras.Variable(1.0)
        self.assertIs(known_variables.native(variable), variable.value)

    def test_a_variable_of_tensorflow_is_itself(self):
        variable = tf.Variable(1.0)
        self.assertIs(known_variables.native(variable), variable)

    def test_names_are_the_ones_that_users_see(self):
        layer = keras.layers.Dense(1, name="head")
        layer.build((None, 2))
        self.assertEqual(known_variables.display_name(layer.kernel), "head/kernel")
        variable = tf.Variable(1.0, name="temperature")
        self.assertEqual(known_variables.display_name(variable), variable.name)

    def test_only_flagged_variables_are_overwritten(self):
        variable = keras.Variable(1.0)
        self.assertFalse(known_variables.is_overwritten(variable))
        variable.overwrite_with_gradient = True
        self.assertTrue(known_variables.is_overwritten(variable))
        self.assertFalse(known_variables.is_overwritten(tf.Variable(1.0)))


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class KnownVariablesTest(parameterized.TestCase):
    def _make(self, strategy):
        self.strategy = registry.STRATEGIES[strategy]()
        with self.strategy.scope():
            # Equal in name and value: only identity tells them apart.
            self.variables = [
                keras.Variable(1.0, name="same"),
                tf.Variable(1.0, name="same"),
                keras.Variable(1.0, name="same"),
                tf.Variable(1.0, name="same"),
            ]
            self.unknown = keras.Variable(1.0, name="same")
        self.known = known_variables.KnownVariables(self.variables, self.strategy)

    def test_they_keep_their_order(self, strategy):
        self._make(strategy)
        self.assertLen(self.known, 4)
        for index, variable in enumerate(self.variables):
            self.assertIs(self.known[index], variable)
            self.assertEqual(self.known.place(variable), index)

    def test_the_copy_of_a_replica_is_found(self, strategy):
        self._make(strategy)
        for index, variable in enumerate(self.variables):
            native = known_variables.native(variable)
            copies = self.strategy.experimental_local_results(native)
            self.assertLen(copies, self.strategy.num_replicas_in_sync)
            for copy in copies:
                self.assertEqual(self.known.place(copy), index)

    def test_what_a_tape_watches_is_found(self, strategy):
        self._make(strategy)
        for index, variable in enumerate(self.variables):
            native = known_variables.native(variable)
            self.assertEqual(self.known.place(native), index)

        def indices_of_watched():
            with tf.GradientTape() as tape:
                tf.add_n([tf.convert_to_tensor(v) for v in self.variables])
            return [self.known.place(v) for v in tape.watched_variables()]

        found = []
        self.strategy.run(lambda: found.append(indices_of_watched()))
        self.assertEqual(found, [[0, 1, 2, 3]] * self.strategy.num_replicas_in_sync)

    def test_a_variable_that_is_not_known_is_a_key_error(self, strategy):
        self._make(strategy)
        with self.assertRaises(KeyError):
            self.known.place(self.unknown)

    def test_a_variable_can_be_frozen_and_thawed(self, strategy):
        self._make(strategy)
        self.assertEqual(self.known.not_frozen(), [0, 1, 2, 3])
        self.variables[2].trainable = False
        self.assertEqual(self.known.not_frozen(), [0, 1, 3])
        self.variables[2].trainable = True
        self.assertEqual(self.known.not_frozen(), [0, 1, 2, 3])

    def test_a_variable_that_was_never_trainable_is_not_frozen_later(self, strategy):
        # Whoever builds for such a variable means it, as with plain Keras.
        strategy = registry.STRATEGIES[strategy]()
        with strategy.scope():
            variables = [keras.Variable(1.0, trainable=False), keras.Variable(1.0)]
        known = known_variables.KnownVariables(variables, strategy)
        variables[1].trainable = False
        self.assertEqual(known.not_frozen(), [0])

    def test_several_are_found_at_their_indices(self, strategy):
        self._make(strategy)
        found = self.known.at([3, 0])
        self.assertLen(found, 2)
        self.assertIs(found[0], self.variables[3])
        self.assertIs(found[1], self.variables[0])

    def test_gradients_are_padded_to_all_variables(self, strategy):
        self._make(strategy)
        given = [self.variables[3], self.variables[1]]
        gradients, variables = self.known.padded(["third", "first"], given)
        self.assertEqual(gradients, [None, "first", None, "third"])
        for one, other in zip(variables, self.variables, strict=True):
            self.assertIs(one, other)
