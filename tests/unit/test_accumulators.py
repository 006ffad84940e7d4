"""Accumulators: what a window stores on each replica, against NumPy."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.accumulators import Accumulators
from keras_accum.known_variables import KnownVariables, native
from keras_accum.reduction import Reduction
from tests import engine, registry

NAN = float("nan")


def _own_dtype(variable):
    return native(variable).dtype


class AccumulatorsCase(parameterized.TestCase):
    """Accumulators for a variable of 4 rows by 2, and one of 3."""

    def _make(self, strategy, micro="mean", dtype_of=_own_dtype, dtype="float32"):
        self.strategy = registry.STRATEGIES[strategy]()
        self.replicas = range(self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            variables = [
                tf.Variable(tf.zeros((4, 2), dtype)),
                tf.Variable(tf.zeros((3,), dtype)),
            ]
            known = KnownVariables(variables, self.strategy)
            self._hold(known, dtype_of, Reduction(micro, "sum"))

    def _hold(self, known, dtype_of, reduction):
        self.held = {}

        def new_variable(name, **arguments):
            self.held[name] = engine.new_variable(name, **arguments)
            return self.held[name]

        self.accumulators = Accumulators(known, dtype_of, reduction, new_variable)

    def _add(self, by_replica, weights=None, position=0):
        """Adds for each replica a list of gradients; None as all replicas have it."""
        given = [i for i, g in enumerate(by_replica[0]) if g is not None]

        def add(gradients, *weight):
            aligned = [None] * len(by_replica[0])
            for index, gradient in zip(given, gradients, strict=True):
                aligned[index] = gradient
            self.accumulators.add(
                aligned, weight[0] if weight else None, tf.constant(position)
            )
            self.accumulators.note_present(aligned)

        values = [[gradients[i] for i in given] for gradients in by_replica]
        arguments = [values] if weights is None else [values, np.float32(weights)]
        engine.on_replicas(self.strategy, add, *arguments)

    def _add_rows(self, by_replica, weights=None, position=0):
        """Adds for each replica a pair of values and row numbers."""

        def add(pair, *weight):
            values, rows = pair
            slices = tf.IndexedSlices(values, rows, (4, 2))
            self.accumulators.add(
                [slices, None], weight[0] if weight else None, tf.constant(position)
            )
            self.accumulators.note_present([slices, None])

        arguments = [by_replica] if weights is None else [by_replica, weights]
        engine.on_replicas(self.strategy, add, *arguments)

    def _clear(self):
        engine.on_replicas(self.strategy, self.accumulators.clear)

    def _gradients(self, seed):
        """Another gradient for each replica and variable."""
        random = np.random.RandomState(seed)
        return [
            [random.randn(*shape).astype("float32") for shape in ((4, 2), (3,))]
            for _ in self.replicas
        ]

    def _read(self, indices):
        _, tensors = self.accumulators.read(indices)
        return self.accumulators.apart(indices, tensors)

    def _assert_holds(self, expected, rtol=1e-6):
        """Compares what each replica reads with lists of arrays."""
        read = engine.on_replicas(self.strategy, lambda: self._read([0, 1]))
        for one_replica, arrays in zip(read, expected, strict=True):
            for tensor, array in zip(one_replica, arrays, strict=True):
                np.testing.assert_allclose(tensor, array, rtol=rtol, atol=1e-7)

    def _has_gradient(self):
        everywhere = engine.on_replicas(self.strategy, self.accumulators.has_gradient)
        for each in everywhere:
            np.testing.assert_array_equal(each, everywhere[0])
        return everywhere[0].numpy().tolist()


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class SumTest(AccumulatorsCase):
    def test_each_replica_sums_its_own(self, strategy):
        self._make(strategy)
        added = [self._gradients(seed) for seed in range(3)]
        for gradients in added:
            self._add(gradients)
        self._assert_holds(
            [[sum(each[r][i] for each in added) for i in (0, 1)] for r in self.replicas]
        )

    def test_a_read_across_replicas_is_their_sum(self, strategy):
        self._make(strategy)
        gradients = self._gradients(seed=0)
        self._add(gradients)
        for index in (0, 1):
            np.testing.assert_allclose(
                self.held[f"accumulator_{index}"].numpy(),
                sum(gradients[r][index] for r in self.replicas),
                rtol=1e-6,
            )

    def test_it_reads_what_it_is_asked_for(self, strategy):
        self._make(strategy)
        gradients = self._gradients(seed=0)
        self._add(gradients)
        read = engine.on_replicas(self.strategy, lambda: self._read([1]))
        for r in self.replicas:
            self.assertLen(read[r], 1)
            np.testing.assert_array_equal(read[r][0], gradients[r][1])

    def test_weights_multiply(self, strategy):
        self._make(strategy)
        first, second = self._gradients(seed=0), self._gradients(seed=1)
        weights = [np.float32(3 + r) for r in self.replicas]
        self._add(first, weights)
        self._add(second)
        self._assert_holds(
            [
                [weights[r] * first[r][i] + second[r][i] for i in (0, 1)]
                for r in self.replicas
            ]
        )

    def test_a_weight_of_zero_adds_nothing_of_a_nan(self, strategy):
        self._make(strategy)
        good = self._gradients(seed=0)
        self._add(good)
        bad = self._gradients(seed=1)
        bad[0][0][1, 1] = NAN
        bad[0][1][2] = float("inf")
        self._add(bad, [np.float32(r) for r in self.replicas])
        self._assert_holds(
            [
                [good[r][i] + (r * bad[r][i] if r else 0) for i in (0, 1)]
                for r in self.replicas
            ]
        )

    def test_repeated_rows_are_summed(self, strategy):
        self._make(strategy)
        dense = self._gradients(seed=0)
        self._add(dense)
        rows = np.array([3, 0, 3])
        values = [np.float32([[1, 2], [3, r], [10, 20 + r]]) for r in self.replicas]
        self._add_rows([(values[r], rows) for r in self.replicas])
        expected = [[each.copy() for each in dense[r]] for r in self.replicas]
        for r in self.replicas:
            np.add.at(expected[r][0], rows, values[r])
        self._assert_holds(expected)

    def test_rows_are_weighted(self, strategy):
        self._make(strategy)
        rows = np.array([1, 1])
        values = [np.float32([[1, 2], [3, 4 + r]]) for r in self.replicas]
        weights = [np.float32(2 + r) for r in self.replicas]
        self._add_rows([(values[r], rows) for r in self.replicas], weights)
        expected = [[np.zeros((4, 2)), np.zeros(3)] for _ in self.replicas]
        for r in self.replicas:
            expected[r][0][1] = weights[r] * values[r].sum(axis=0)
        self._assert_holds(expected)

    def test_a_weight_of_zero_adds_nothing_of_rows_with_a_nan(self, strategy):
        self._make(strategy)
        values = np.float32([[NAN, 1]])
        self._add_rows(
            [(values, np.array([2])) for _ in self.replicas],
            [np.float32(0) for _ in self.replicas],
        )
        self._assert_holds([[np.zeros((4, 2)), np.zeros(3)] for _ in self.replicas])

    def test_none_adds_nothing_and_takes_nothing_away(self, strategy):
        self._make(strategy)
        first, second = self._gradients(seed=0), self._gradients(seed=1)
        self._add(first)
        self._add([[None, second[r][1]] for r in self.replicas])
        self._assert_holds(
            [[first[r][0], first[r][1] + second[r][1]] for r in self.replicas]
        )

    def test_it_knows_which_variables_got_a_gradient(self, strategy):
        self._make(strategy)
        self.assertEqual(self._has_gradient(), [False, False])
        gradients = self._gradients(seed=0)
        self._add([[None, gradients[r][1]] for r in self.replicas])
        self.assertEqual(self._has_gradient(), [False, True])
        self._add([[gradients[r][0], None] for r in self.replicas])
        self.assertEqual(self._has_gradient(), [True, True])
        self._clear()
        self.assertEqual(self._has_gradient(), [False, False])

    def test_clearing_empties_them_of_a_nan_too(self, strategy):
        self._make(strategy)
        bad = self._gradients(seed=0)
        bad[-1][0][0, 0] = NAN
        bad[-1][1][:] = float("inf")
        self._add(bad)
        self._clear()
        self._assert_holds([[np.zeros((4, 2)), np.zeros(3)] for _ in self.replicas])
        good = self._gradients(seed=1)
        self._add(good)
        self._assert_holds(good)


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class RunningMeanTest(AccumulatorsCase):
    def test_it_is_the_mean_at_every_position(self, strategy):
        self._make(strategy, "running_mean")
        added = [self._gradients(seed) for seed in range(4)]
        for position, gradients in enumerate(added):
            self._add(gradients, position=position)
            so_far = added[: position + 1]
            self._assert_holds(
                [
                    [np.mean([each[r][i] for each in so_far], axis=0) for i in (0, 1)]
                    for r in self.replicas
                ],
                rtol=1e-5,
            )

    def test_position_zero_erases_what_is_stale(self, strategy):
        self._make(strategy, "running_mean")
        self._add(self._gradients(seed=0), position=0)
        fresh = self._gradients(seed=1)
        self._add([[fresh[r][0], None] for r in self.replicas], position=0)
        self._assert_holds([[fresh[r][0], np.zeros(3)] for r in self.replicas])

    def test_none_counts_as_zero_in_the_mean(self, strategy):
        self._make(strategy, "running_mean")
        ones = [[np.ones((4, 2), "float32"), np.ones(3, "float32")]] * len(
            self.replicas
        )
        self._add(ones, position=0)
        self._add([[None, 7 * each[1]] for each in ones], position=1)
        self._add(ones, position=2)
        self._assert_holds([[np.full((4, 2), 2 / 3), np.full(3, 3)]] * len(ones))

    def test_rows(self, strategy):
        self._make(strategy, "running_mean")
        rows = np.array([1, 1, 2])
        values = [np.float32([[1, 2], [3, 4], [5, r]]) for r in self.replicas]
        for position in range(2):
            self._add_rows(
                [(values[r] * (1 + position), rows) for r in self.replicas],
                position=position,
            )
        expected = [[np.zeros((4, 2)), np.zeros(3)] for _ in self.replicas]
        for r in self.replicas:
            np.add.at(expected[r][0], rows, values[r] * 1.5)
        self._assert_holds(expected)


class FloatsTest(AccumulatorsCase):
    def test_vector_7_of_the_published_ones(self):
        for micro, expected in (("sum", 45), ("running_mean", 4.5)):
            self._make("default", micro)
            for k in range(10):
                gradient = [np.full((4, 2), k, "float32"), None]
                self._add([gradient], position=k)
            self._assert_holds([[np.full((4, 2), expected), np.zeros(3)]])

    @parameterized.parameters(
        ("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")
    )
    def test_gradients_are_cast_to_the_accumulator(self, dtype, accumulator):
        self._make("default", dtype_of=lambda _: tf.as_dtype(accumulator), dtype=dtype)
        ones = [tf.ones((4, 2), dtype), tf.ones((3,), dtype)]
        for _ in range(3):
            self._add([[one * 0.5 for one in ones]])
        self.assertEqual(self.held["accumulator_0"].dtype, accumulator)
        self._assert_holds([[np.full((4, 2), 1.5), np.full(3, 1.5)]])

    def test_each_variable_has_the_dtype_it_is_given(self):
        self._make(
            "default",
            dtype_of=lambda v: tf.float64 if v.shape.rank == 1 else tf.bfloat16,
        )
        self.assertEqual(self.held["accumulator_0"].dtype, tf.bfloat16)
        self.assertEqual(self.held["accumulator_1"].dtype, tf.float64)

    def test_float16_overflows_as_a_sum_and_not_as_a_running_mean(self):
        largest = np.float16(65504)
        for micro, expected in (("running_mean", largest), ("sum", float("inf"))):
            self._make("default", micro, dtype_of=lambda _: tf.float16)
            for position in range(8):
                gradient = np.full(3, largest)
                self._add([[None, gradient]], position=position)
            self._assert_holds([[np.zeros((4, 2)), np.full(3, expected)]], rtol=2e-3)

    def test_a_float32_sum_of_ones_goes_on_where_bfloat16_stops(self):
        self._make("default", dtype_of=lambda _: tf.float32, dtype="bfloat16")
        ones = [[None, tf.ones((3,), "bfloat16")]]

        @tf.function
        def add_many():
            for _ in tf.range(1024):
                self.accumulators.add(ones[0], None, tf.constant(0))
                self.accumulators.note_present(ones[0])

        add_many()
        self._assert_holds([[np.zeros((4, 2)), np.full(3, 1024)]])


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class OverwrittenTest(AccumulatorsCase):
    """Variables that take their gradient as their value, as float8 scales do."""

    def _make(self, strategy):
        self.strategy = registry.STRATEGIES[strategy]()
        self.replicas = range(self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            summed = keras.Variable(np.zeros((4, 2), "float32"))
            statistic = keras.Variable(np.zeros(3, "float32"))
            statistic.overwrite_with_gradient = True
            known = KnownVariables([summed, statistic], self.strategy)
            self._hold(known, _own_dtype, Reduction("mean", "sum"))

    def test_they_keep_the_largest_value_of_each_replica(self, strategy):
        self._make(strategy)
        zeros = np.zeros((4, 2), "float32")
        first = [np.float32([1, 5, 2 + r]) for r in self.replicas]
        second = [np.float32([2, 4, 1]) for r in self.replicas]
        self._add([[zeros, first[r]] for r in self.replicas])
        self._add([[zeros, None] for r in self.replicas])
        # A weight is of no concern to a statistic.
        self._add(
            [[zeros, second[r]] for r in self.replicas],
            [np.float32(10)] * len(self.replicas),
        )
        self._assert_holds(
            [[zeros, np.maximum(first[r], second[r])] for r in self.replicas]
        )
