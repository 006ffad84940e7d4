"""The automatic loss scale, against a NumPy model and the original's numbers."""

import hypothesis
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

import keras_accum
from keras_accum import AutomaticLossScale
from tests import engine, micro_steps, refusals, registry

DEFAULT = tf.distribute.get_strategy()
PROPERTIES = hypothesis.settings(derandomize=True, deadline=None, max_examples=40)
EDGE = 2.0**13  # vector 22
NAN, INF = float("nan"), float("inf")
SMALL, LARGE = [1.0, -2.0], [1e4, -1e4]


def _scales(loss_scale, windows, strategy=DEFAULT):
    """The scale after each window, which is a list of (large, counted) elements.

    Vectors and properties are of the decision: what is counted is tested apart.
    """
    scale = engine.built(loss_scale, strategy)
    return [
        engine.close_window(strategy, scale, num_large=large, num_counted=counted)
        for large, counted in windows
    ]


def _numpy_model(windows, initial, factor, maximum, period, ratio):
    """Graphcore's rule, as it is published: the scale after each window."""
    scale, scales = initial, []
    for end in range(1, len(windows) + 1):
        if end % period == 0:
            large, counted = np.sum(windows[end - period : end], axis=0)
            if counted and large / counted > ratio:
                scale = max(scale / factor, 1.0)
            elif counted and scale * factor < maximum:
                scale = scale * factor
        scales.append(scale)
    return scales


class DecisionTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_vector_21_the_maximum_is_exclusive(self, strategy):
        loss_scale = AutomaticLossScale(1, 2, maximum=16, period=1)
        strategy = registry.STRATEGIES[strategy]()
        scales = _scales(loss_scale, [(0, 10)] * 5, strategy)
        self.assertEqual(scales, [2, 4, 8, 8, 8])

    @parameterized.parameters("default", "mirrored")
    def test_vector_21_it_never_falls_below_one(self, strategy):
        loss_scale = AutomaticLossScale(16, 2, maximum=64, period=1)
        strategy = registry.STRATEGIES[strategy]()
        scales = _scales(loss_scale, [(10, 10)] * 6, strategy)
        self.assertEqual(scales, [8, 4, 2, 1, 1, 1])

    @parameterized.parameters((1, 2), (0.999, 2), (1.001, 0.5))
    def test_vector_22_a_share_above_the_ratio_halves(self, large, factor):
        loss_scale = AutomaticLossScale(16, maximum=64, period=1)
        windows = [(large, 1e5)]  # a share of 1e-5, give or take
        self.assertEqual(_scales(loss_scale, windows), [16 * factor])

    def test_vector_22_it_decides_every_eighth_update(self):
        windows = [(0, 10)] * 16 + [(1, 10)] + [(0, 10)] * 15
        expected = [1] * 7 + [2] * 8 + [4] * 8 + [2] * 8 + [4]
        self.assertEqual(_scales(AutomaticLossScale(), windows), expected)

    def test_vector_23_with_nothing_counted_it_stays(self):
        loss_scale = AutomaticLossScale(4, maximum=64, period=2)
        windows = [(0, 0)] * 6 + [(0, 0), (0, 1), (0, 0), (1, 1)]
        expected = [4] * 6 + [4, 8, 8, 4]
        self.assertEqual(_scales(loss_scale, windows), expected)

    @PROPERTIES
    @hypothesis.given(
        windows=st.lists(
            st.integers(0, 1000).flatmap(
                lambda counted: st.tuples(st.integers(0, counted), st.just(counted))
            )
            | st.sampled_from([(0, 0), (0, 500), (500, 500)]),
            min_size=1,
            max_size=30,
        ),
        exponents=st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 8)),
        period=st.integers(1, 5),
        ratio=st.sampled_from([1e-5, 0.125, 0.5]),
    )
    def test_it_follows_the_numpy_model(self, windows, exponents, period, ratio):
        first, step, room = exponents
        arguments = {
            "initial": 2.0**first,
            "factor": 2.0**step,
            "maximum": 2.0 ** (first + step + 1 + room),
            "period": period,
            "ratio": ratio,
        }
        scales = _scales(AutomaticLossScale(**arguments), windows)
        self.assertEqual(scales, _numpy_model(windows, **arguments))
        self.assertGreaterEqual(min(scales), 1)
        self.assertLess(max(scales), arguments["maximum"])


class CountTest(parameterized.TestCase):
    def _counts(self, loss_scale, gradients, variables=None, mode="eager", weight=None):
        scale = engine.built(loss_scale, DEFAULT)
        if variables is None:
            variables = [tf.Variable(1.0) for _ in gradients]

        def observe(gradients):
            scale.observe(gradients, variables, weight)

        if mode == "graph":
            observe = tf.function(observe, autograph=False)
        observe(gradients)
        observed = {name: float(value) for name, value in scale.observed().items()}
        return observed["num_large"], observed["num_counted"]

    @parameterized.parameters("eager", "graph")
    def test_an_empty_micro_batch_does_not_count(self, mode):
        gradients = [tf.constant([1.0, 2.0**14, float("nan")])]
        for weight, expected in ((0.0, (0, 0)), (3.0, (2, 3))):
            counts = self._counts(
                AutomaticLossScale(), gradients, mode=mode, weight=tf.constant(weight)
            )
            self.assertEqual(counts, expected)

    @PROPERTIES
    @hypothesis.given(
        gradients=st.lists(
            st.lists(
                st.sampled_from([0.0, 1.0, -8191.0, 8192.0, 8193.0, -9e3, 1e30])
                | st.sampled_from([NAN, INF, -INF]),
                max_size=5,
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_what_is_above_the_edge_or_not_finite_is_large(self, gradients):
        elements = np.array([each for one in gradients for each in one], "float32")
        expected = (np.sum(~(np.abs(elements) <= EDGE)), len(elements))
        tensors = [tf.constant(each, tf.float32) for each in gradients]
        self.assertEqual(self._counts(AutomaticLossScale(), tensors), expected)

    # In a graph TensorFlow rewrites comparisons, as if no value were NaN.
    @parameterized.product(
        dtype=["float16", "bfloat16", "float32", "float64"],
        edge=[8.0, EDGE, 2.0**17],
        mode=["eager", "graph"],
    )
    def test_gradients_of_every_dtype_count(self, dtype, edge, mode):
        # 2**17 is more than a float16 holds: there only what is not finite is large.
        gradient = tf.constant([1.0, NAN, INF, -INF, edge / 2], dtype)
        loss_scale = AutomaticLossScale(edge=edge)
        expected = sum(not abs(each) <= edge for each in gradient.numpy().tolist())
        counts = self._counts(loss_scale, [gradient], mode=mode)
        self.assertEqual(counts, (expected, 5))

    def test_rows_count_and_none_does_not(self):
        rows = tf.IndexedSlices(
            tf.constant([[1.0, 1e4], [NAN, 2.0], [3.0, 4.0]]),
            tf.constant([5, 0, 5]),
            tf.constant([1000, 2], tf.int64),
        )
        gradients = [None, rows, tf.constant(1e5)]
        self.assertEqual(self._counts(AutomaticLossScale(), gradients), (3, 7))

    def test_what_carries_no_scale_does_not_count(self):
        kernel = tf.Variable(1.0, name="kernel")
        statistic = tf.Variable(1.0, name="bn/moving_mean")
        overwritten = keras.Variable(1.0)
        overwritten.overwrite_with_gradient = True
        gradients = [tf.constant(LARGE)] * 3
        variables = [kernel, statistic, overwritten]
        self.assertEqual(self._counts(AutomaticLossScale(), gradients, variables)[1], 2)
        by_name = AutomaticLossScale(unscaled=lambda v: v.name.startswith("kernel"))
        self.assertEqual(self._counts(by_name, gradients, variables)[1], 2)

    def test_counts_of_a_window_add_up_and_are_taken_when_it_closes(self):
        scale = engine.built(AutomaticLossScale(period=1), DEFAULT)
        for _ in range(3):
            scale.observe([tf.constant([*SMALL, *LARGE])], [tf.Variable(1.0)], None)
        observed = {name: float(count) for name, count in scale.observed().items()}
        self.assertEqual(observed, {"num_large": 6, "num_counted": 12})
        engine.close_window(DEFAULT, scale, **observed)
        self.assertEqual({float(count) for count in scale.observed().values()}, {0})


@parameterized.parameters("default", "mirrored")
class InAnOptimizerTest(parameterized.TestCase):
    """Scaled gradients go in, and the scale follows."""

    def _run(self, strategy, on_nonfinite="skip_window", accumulation_steps=2, **scale):
        scale = {"initial": 16, "maximum": 2.0**12, "period": 2, **scale}
        return micro_steps.MicroSteps(
            strategy,
            lambda: keras_accum.AccumulationOptimizer(
                keras.optimizers.SGD(1.0),
                accumulation_steps,
                loss_scale=AutomaticLossScale(**scale),
                on_nonfinite=on_nonfinite,
            ),
            [np.zeros(2, "float32")],
        )

    def _after(self, run, strategy, windows, length=2):
        """The scale after each window; all is small but what a window says.

        Args:
            run: Micro steps.
            strategy: Its name.
            windows: For each None, or (position, replica, value) of one element.
            length: Micro steps of a window.
        """
        replicas, scales = micro_steps.num_replicas(strategy), []
        for window in windows:
            for position in range(length):
                gradient = np.ones((replicas, 2), "float32")
                if window is not None and window[0] == position:
                    gradient[window[1] % replicas, 1] = window[2]
                run([gradient])
            scales.append(float(run.optimizer.loss_scale))
        return scales

    def test_a_large_element_anywhere_is_seen(self, strategy):
        for position in (0, 1):
            for replica in range(micro_steps.num_replicas(strategy)):
                run = self._run(strategy)
                # Twice in a period: one of a window that is not its last is not lost.
                windows = [None, None, (position, replica, 1e4), None, None, None]
                scales = self._after(run, strategy, windows)
                self.assertEqual(scales, [16, 32, 32, 16, 16, 32])
                self.assertEqual(run.num_updates, 6)

    def test_the_share_is_of_all_replicas_and_micro_steps(self, strategy):
        replicas = micro_steps.num_replicas(strategy)
        share = 1 / (2 * 2 * 2 * replicas)  # windows, micro steps, elements, replicas
        for ratio, expected in ((share * 1.01, 32), (share * 0.99, 8)):
            run = self._run(strategy, ratio=ratio)
            scales = self._after(run, strategy, [(1, 1, -1e4), None])
            self.assertEqual(scales, [16, expected])

    def test_skipped_windows_count_for_the_period(self, strategy):
        for bad in (NAN, INF, -INF):
            run = self._run(strategy)
            scales = self._after(run, strategy, [(0, 1, bad), None, None, (1, 0, bad)])
            self.assertEqual(scales, [16, 8, 8, 4])
            self.assertEqual(int(run.optimizer.skipped_windows), 2)
            self.assertEqual(run.num_updates, 2)

    def test_a_micro_batch_that_is_left_out_still_counts(self, strategy):
        run = self._run(strategy, "skip_micro_batch")
        scales = self._after(run, strategy, [(0, 1, NAN), None, None, None])
        self.assertEqual(scales, [16, 8, 8, 16])
        self.assertEqual(run.num_updates, 4)
        self.assertEqual(int(run.optimizer.skipped_micro_batches), 1)

    def test_windows_of_one_count_too(self, strategy):
        run = self._run(strategy, accumulation_steps=1)
        windows = [None, None, (0, 1, 1e4), None]
        scales = self._after(run, strategy, windows, length=1)
        self.assertEqual(scales, [16, 32, 32, 16])

    def test_a_window_that_is_dropped_does_not_count(self, strategy):
        run = self._run(strategy, period=1)
        replicas = micro_steps.num_replicas(strategy)
        run([np.full((replicas, 2), 1e4, "float32")])
        run.optimizer.reset()
        self.assertEqual(self._after(run, strategy, [None]), [32])

    def test_gradients_are_unscaled_by_the_scale_of_their_window(self, strategy):
        run = self._run(strategy, period=1)
        replicas = micro_steps.num_replicas(strategy)
        for scale in (16, 16, 32, 32, 64, 64):
            self.assertEqual(float(run.optimizer.loss_scale), scale)
            # Of losses that carry 1/R: the true gradient is 1.
            run([np.full((replicas, 2), scale / replicas, "float32")])
        np.testing.assert_array_equal(run.values[0], [-3, -3])
        self.assertLessEqual(run.num_traces, replicas)


class RefusedTest(refusals.RefusalCase):
    def test_vector_23_what_is_no_power_of_two(self):
        for name in ("initial", "factor", "maximum"):
            for value, nearest in ((3.0, 4.0), (6, 8.0), (0.3, 0.25), (1000.0, 1024.0)):
                self.assert_refused(
                    ValueError,
                    lambda n=name, v=value: AutomaticLossScale(**{n: v}),
                    f"`{name}` must be a power of two",
                    f"{name}={value!r}",
                    f"Use for example {nearest}",
                )

    def test_numbers_that_are_not_finite_and_above_zero(self):
        for name in ("initial", "factor", "maximum", "edge", "ratio"):
            for error, value in (
                (ValueError, 0),
                (ValueError, -2.0),
                (ValueError, INF),
                (ValueError, NAN),
                (TypeError, "2"),
                (TypeError, True),
                (TypeError, None),
            ):
                self.assert_refused(
                    error,
                    lambda n=name, v=value: AutomaticLossScale(**{n: v}),
                    f"`{name}` must be a finite number > 0",
                    f"{name}={value!r}",
                )

    def test_vector_23_a_period_that_is_no_integer_of_at_least_one(self):
        for value in (0, -8, 8.0, True, "8", None):
            self.assert_refused(
                ValueError,
                lambda v=value: AutomaticLossScale(period=v),
                "`period` must be an integer >= 1",
                f"period={value!r}",
                "Use 1 for every one",
            )

    def test_vector_23_a_ratio_that_is_no_share(self):
        for value in (1.0, 1, 1.5):
            self.assert_refused(
                ValueError,
                lambda v=value: AutomaticLossScale(ratio=v),
                "`ratio` must lie between 0 and 1",
                f"ratio={value}",
                "Use 1e-5",
            )

    def test_a_factor_that_does_not_move_the_scale(self):
        for value in (1.0, 0.5):
            self.assert_refused(
                ValueError,
                lambda v=value: AutomaticLossScale(factor=v),
                "`factor` must be > 1",
                f"factor={value}",
                "Use 2.0",
            )

    def test_vector_23_an_initial_scale_that_cannot_grow(self):
        for initial, factor, maximum in (
            (16, 2, 16),
            (32.0, 2.0, 16.0),
            (8.0, 2.0, 16.0),
            (4, 4, 16),
        ):
            self.assert_refused(
                ValueError,
                lambda i=initial, f=factor, m=maximum: AutomaticLossScale(i, f, m),
                "`initial` times `factor` must be less than `maximum`",
                f"initial={initial}, factor={factor}, maximum={maximum}",
                "Raise the maximum or start lower",
            )
        self.assertEqual(AutomaticLossScale(4, 2, 16).initial, 4)
