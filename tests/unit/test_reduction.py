"""How gradients combine over micro-batches and replicas, and what divides them."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum import reduction
from keras_accum.replica_groups import ReplicaGroups
from tests import engine, registry

R = registry.NUM_REPLICAS
NAN, INF = float("nan"), float("inf")


def _slices(values, indices, rows=4):
    values = tf.convert_to_tensor(values)
    return tf.IndexedSlices(values, tf.constant(indices), (rows, *values.shape[1:]))


# What a sum over R replicas is divided by, whose weights have the mean 12, or are not
# given: design section 4, where the sum of the weights is 12 R.
DIVISORS = {
    ("mean", "sum"): (12, None),
    ("mean", "mean"): (12 * R, R),
    ("sum", "sum"): (None, None),
    ("sum", "mean"): (R, R),
    ("running_mean", "sum"): (None, None),
    ("running_mean", "mean"): (R, R),
}
ON_ONE_REPLICA = {
    ("mean", "sum"): (12, None),
    ("mean", "mean"): (12, None),
    ("sum", "sum"): (None, None),
    ("sum", "mean"): (None, None),
    ("running_mean", "sum"): (None, None),
    ("running_mean", "mean"): (None, None),
}


class DivisorTest(parameterized.TestCase):
    def test_the_tables_have_every_pair(self):
        pairs = {
            (micro, replica)
            for micro in reduction.MICRO_REDUCTIONS
            for replica in reduction.REPLICA_REDUCTIONS
        }
        self.assertEqual(set(DIVISORS), pairs)
        self.assertEqual(set(ON_ONE_REPLICA), pairs)

    @parameterized.product(
        strategy=["default", "one_device", "mirrored"],
        micro=reduction.MICRO_REDUCTIONS,
        replica=reduction.REPLICA_REDUCTIONS,
    )
    def test_divisor(self, strategy, micro, replica):
        strategy = registry.STRATEGIES[strategy]()
        is_one = strategy.num_replicas_in_sync == 1
        weighted, plain = (ON_ONE_REPLICA if is_one else DIVISORS)[micro, replica]
        subject = reduction.Reduction(micro, replica)

        def divide_twelve(total_weight):
            replicas = strategy.num_replicas_in_sync
            divisor = subject.divisor(total_weight, replicas)
            return tf.constant(12.0) if divisor is None else 12.0 / divisor

        for total_weight, expected in ((tf.constant(12.0), weighted), (None, plain)):
            quotients = engine.on_replicas(
                strategy, lambda weight=total_weight: divide_twelve(weight)
            )
            for quotient in quotients:
                self.assertEqual(float(quotient), 12 / (expected or 1))

    @parameterized.parameters(*reduction.MICRO_REDUCTIONS)
    def test_only_a_running_mean_is_running(self, micro):
        subject = reduction.Reduction(micro, "sum")
        self.assertEqual(subject.is_running, micro == "running_mean")


class DivideTest(parameterized.TestCase):
    @parameterized.parameters("float16", "bfloat16")
    def test_a_short_float_is_divided_in_float32(self, dtype):
        # 2**17 is infinite in float16, and the quotient of bfloat16 is rounded twice.
        gradient = tf.constant([3.0, 60000.0], dtype)
        quotient = reduction.divide(gradient, tf.constant(2.0**17 + 3), tf.float32)
        wide = tf.cast(gradient, "float32").numpy()
        np.testing.assert_array_equal(quotient.numpy(), wide / np.float32(2**17 + 3))

    def test_the_result_has_the_dtype_that_was_asked_for(self):
        quotient = reduction.divide(
            tf.constant([60000.0], "float16"), tf.constant(2.0**17), tf.float16
        )
        self.assertEqual(quotient.dtype, tf.float16)
        np.testing.assert_array_equal(quotient, [np.float16(60000 / 2**17)])

    def test_a_sum_that_a_float16_cannot_hold_comes_back_finite(self):
        total = tf.constant([8 * 65504.0])
        quotient = reduction.divide(total, tf.constant(8.0), tf.float16)
        np.testing.assert_array_equal(quotient, [np.float16(65504)])

    def test_float64_is_divided_in_float64(self):
        gradient = tf.constant([1.0], "float64")
        quotient = reduction.divide(gradient, tf.constant(3.0), tf.float64)
        np.testing.assert_allclose(quotient, [1 / 3], rtol=1e-15)

    def test_rows_stay_where_they_are(self):
        gradient = _slices([[2.0], [6.0], [4.0]], [3, 0, 3])
        quotient = reduction.divide(gradient, tf.constant(2.0), tf.float32)
        self.assertIsInstance(quotient, tf.IndexedSlices)
        np.testing.assert_array_equal(quotient.indices, [3, 0, 3])
        np.testing.assert_array_equal(quotient.dense_shape, [4, 1])
        np.testing.assert_array_equal(quotient.values, [[1], [3], [2]])

    def test_no_divisor_makes_no_pass(self):
        gradient = tf.constant([1.0, 2.0])
        self.assertIs(reduction.divide(gradient, None, tf.float32), gradient)

    def test_no_divisor_still_casts(self):
        gradient = tf.constant([1.0, 2.0])
        narrowed = reduction.divide(gradient, None, tf.bfloat16)
        self.assertEqual(narrowed.dtype, tf.bfloat16)


class DivideAllTest(parameterized.TestCase):
    def test_each_gradient_has_its_own_divisor_and_dtype(self):
        untouched = tf.constant([3.0])
        quotients = reduction.divide_all(
            [
                tf.constant([6.0, 9.0]),
                _slices([[8.0]], [2]),
                untouched,
                tf.constant(60000.0),
            ],
            [tf.constant(3.0), 4.0, None, tf.constant(2.0**17)],
            [tf.float64, tf.float32, tf.float32, tf.float16],
        )
        dtypes = [quotient.dtype for quotient in quotients]
        self.assertEqual(dtypes, [tf.float64, tf.float32, tf.float32, tf.float16])
        np.testing.assert_array_equal(quotients[0], [2, 3])
        np.testing.assert_array_equal(quotients[1].values, [[2]])
        np.testing.assert_array_equal(quotients[1].indices, [2])
        self.assertIs(quotients[2], untouched)
        self.assertEqual(quotients[3].numpy(), np.float16(60000 / 2**17))

    def test_lists_of_other_lengths_are_a_mistake(self):
        one = tf.constant(1.0)
        for divisors, dtypes in (([], [tf.float32]), ([None], [])):
            with self.assertRaises(ValueError):
                reduction.divide_all([one], divisors, dtypes)


class AreFiniteTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("none", [], True),
        ("dense", [[1.0, 2.0], [[3.0]]], True),
        ("nan", [[1.0, NAN], [3.0]], False),
        ("infinity", [[1.0], [INF, 3.0]], False),
        ("minus_infinity", [[-INF]], False),
        ("without_gradient", [None, [1.0]], True),
        ("nan_beside_none", [None, [NAN]], False),
        ("largest", [[3.4e38], [-3.4e38]], True),
    )
    def test_dense(self, gradients, expected):
        tensors = [None if g is None else tf.constant(g) for g in gradients]
        self.assertEqual(bool(reduction.are_finite(tensors)), expected)

    @parameterized.parameters((1.0, True), (NAN, False), (INF, False))
    def test_rows(self, value, expected):
        gradients = [tf.constant(1.0), _slices([[1.0], [value]], [0, 2])]
        self.assertEqual(bool(reduction.are_finite(gradients)), expected)

    @parameterized.parameters("float16", "bfloat16", "float32", "float64")
    def test_every_dtype(self, dtype):
        self.assertTrue(bool(reduction.are_finite([tf.ones((2, 2), dtype)])))
        bad = tf.constant([1.0, INF], dtype)
        self.assertFalse(bool(reduction.are_finite([bad])))


class CombineOverReplicasTest(parameterized.TestCase):
    def test_one_replica_copies_nothing(self):
        gradients = [tf.constant([1.0]), _slices([[1.0]], [2]), tf.constant(3.0)]
        weight, count = tf.constant(2.0), tf.constant(3.0)
        combined, totals = reduction.combine_over_replicas(
            gradients,
            {"weight": weight, "count": count},
            [False, False, True],
            ReplicaGroups(None, 1),
        )
        for one, other in zip(combined, gradients, strict=True):
            self.assertIs(one, other)
        self.assertEqual(list(totals), ["weight", "count"])
        self.assertIs(totals["weight"], weight)
        self.assertIs(totals["count"], count)

    def _combined(self, gradients, riders, takes_maximum):
        def combine(gradients, riders):
            return reduction.combine_over_replicas(
                gradients, riders, takes_maximum, ReplicaGroups(None, R)
            )

        return engine.on_replicas(registry.mirrored(), combine, gradients, riders)

    def test_gradients_and_riders_are_summed(self):
        a = [np.float32([1 + r, 10 * r]) for r in range(R)]
        b = [np.float32([[r * r + 0.5]]) for r in range(R)]
        weights = [np.float32(3 + r) for r in range(R)]
        counts = [np.float32(100 * r + 1) for r in range(R)]
        by_replica = [[a[r], b[r]] for r in range(R)]
        riders = [{"weight": weights[r], "count": counts[r]} for r in range(R)]
        for gradients, totals in self._combined(by_replica, riders, [False, False]):
            np.testing.assert_array_equal(gradients[0], sum(a))
            np.testing.assert_array_equal(gradients[1], sum(b))
            self.assertEqual(
                {name: float(total) for name, total in totals.items()},
                {"weight": sum(weights), "count": sum(counts)},
            )

    def test_without_riders_there_are_no_totals(self):
        by_replica = [[np.float32(1 + r)] for r in range(R)]
        for gradients, totals in self._combined(by_replica, [{}] * R, [False]):
            self.assertEqual(float(gradients[0]), sum(1 + r for r in range(R)))
            self.assertEqual(totals, {})

    def test_riders_are_summed_without_gradients_and_beside_maxima_alone(self):
        weights = [np.float32(3 + r) for r in range(R)]
        riders = [{"weight": weight} for weight in weights]
        largest = [[np.float32([r, -r])] for r in range(R)]
        for by_replica, takes_maximum in (([[]] * R, []), (largest, [True])):
            for _, totals in self._combined(by_replica, riders, takes_maximum):
                self.assertEqual(float(totals["weight"]), sum(weights))
        for gradients, totals in self._combined(largest, [{}] * R, [True]):
            np.testing.assert_array_equal(gradients[0], [R - 1, 0])
            self.assertEqual(totals, {})

    @parameterized.parameters(0, 1, 2)
    def test_a_maximum_stands_between_sums(self, num_riders):
        # The largest value is on another replica for each element.
        first = [np.float32([r]) for r in range(R)]
        middle = [np.float32([r, -r, -2 - r]) for r in range(R)]
        last = [np.float32(100 + r) for r in range(R)]
        riders = [
            {str(i): np.float32(7 * (1 + r) + i) for i in range(num_riders)}
            for r in range(R)
        ]
        combined = self._combined(
            [[first[r], middle[r], last[r]] for r in range(R)],
            riders,
            [False, True, False],
        )
        for gradients, totals in combined:
            np.testing.assert_array_equal(gradients[0], sum(first))
            np.testing.assert_array_equal(gradients[1], np.max(middle, axis=0))
            np.testing.assert_array_equal(gradients[2], sum(last))
            self.assertEqual(
                {name: float(total) for name, total in totals.items()},
                {name: sum(each[name] for each in riders) for name in riders[0]},
            )

    def test_rows_are_summed_over_replicas(self):
        # Each replica has a row of its own and one that all have.
        def combine(values):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            slices = tf.IndexedSlices(values, tf.stack([replica, 3]), (8, 2))
            combined, _ = reduction.combine_over_replicas(
                [slices], {}, [False], ReplicaGroups(None, R)
            )
            return tf.convert_to_tensor(combined[0])

        values = [np.float32([[1, r], [2, 5 * r]]) for r in range(R)]
        expected = np.zeros((8, 2), "float32")
        for r in range(R):
            expected[r] += values[r][0]
            expected[3] += values[r][1]
        for dense in engine.on_replicas(registry.mirrored(), combine, values):
            np.testing.assert_array_equal(dense, expected)
