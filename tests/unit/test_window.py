"""The window: what it counts, when it is full, when a new length takes effect."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.window import Window, share_of
from tests import engine, registry


@parameterized.named_parameters(("default", "default"), ("mirrored", "mirrored"))
class WindowTest(parameterized.TestCase):
    def _open(self, strategy, length):
        self.strategy = registry.STRATEGIES[strategy]()
        with self.strategy.scope():
            self.window = Window(length, engine.new_variable)

    def _run(self, method, *by_replica):
        return engine.on_replicas(self.strategy, method, *by_replica)

    def _advance(self, times=1):
        for _ in range(times):
            self._run(lambda: self.window.advance(share_of(None)))

    def _everywhere(self, method):
        """What a predicate says, which every replica must say alike."""
        verdicts = {bool(each) for each in self._run(method)}
        self.assertLen(verdicts, 1)
        return verdicts.pop()

    def _numbers(self, variable):
        return {int(each) for each in engine.copies(self.strategy, variable)}

    def test_it_is_full_after_as_many_micro_steps_as_it_is_long(self, strategy):
        self._open(strategy, length=3)
        seen = []
        for _ in range(3):
            self._advance()
            seen.append(self._everywhere(self.window.is_full))
        self.assertEqual(seen, [False, False, True])
        self.assertEqual(self._numbers(self.window.position), {3})

    def test_a_window_of_one_is_full_at_once(self, strategy):
        self._open(strategy, length=1)
        self._advance()
        self.assertTrue(self._everywhere(self.window.is_full))

    def test_it_is_open_from_its_first_micro_step_to_its_end(self, strategy):
        self._open(strategy, length=2)
        self.assertFalse(self._everywhere(self.window.is_open))
        self._advance()
        self.assertTrue(self._everywhere(self.window.is_open))
        self._run(self.window.restart)
        self.assertFalse(self._everywhere(self.window.is_open))

    def test_each_replica_sums_its_share_of_the_weight(self, strategy):
        self._open(strategy, length=3)
        weights = [float(2 + r) for r in range(self.strategy.num_replicas_in_sync)]
        self._run(lambda weight: self.window.advance(share_of(weight)), weights)
        self._advance()
        self._run(
            lambda weight: self.window.advance(share_of(weight)), [0.5] * len(weights)
        )
        expected = [(weight + 1.5) / len(weights) for weight in weights]
        actual = engine.copies(self.strategy, self.window.weight)
        np.testing.assert_array_equal(actual, expected)
        # What is saved is the mean over the replicas, however many there are.
        self.assertEqual(float(self.window.weight.numpy()), np.mean(weights) + 1.5)

    def test_a_length_waits_while_the_window_is_open(self, strategy):
        self._open(strategy, length=3)
        self._advance()
        self.window.request_length(2)
        self._advance()
        self.assertFalse(self._everywhere(self.window.is_full))
        self._advance()
        self.assertTrue(self._everywhere(self.window.is_full))
        self._run(self.window.restart)
        self._advance(2)
        self.assertTrue(self._everywhere(self.window.is_full))

    def test_a_length_is_taken_at_once_by_an_empty_window(self, strategy):
        self._open(strategy, length=3)
        self.window.request_length(1)
        self._advance()
        self.assertTrue(self._everywhere(self.window.is_full))

    def test_the_last_length_that_was_asked_for_counts(self, strategy):
        self._open(strategy, length=2)
        self._advance()
        self.window.request_length(5)
        self.window.request_length(4)
        self._run(self.window.restart)
        self.assertEqual(self._numbers(self.window.length), {4})

    def test_a_length_can_be_asked_for_under_the_scope(self, strategy):
        self._open(strategy, length=2)
        self._advance()
        with self.strategy.scope():
            self.window.request_length(7)
        self.assertEqual(self._numbers(self.window.length), {2})
        self.assertEqual(self._numbers(self.window.next_length), {7})

    def test_restarting_empties_it(self, strategy):
        self._open(strategy, length=3)
        self._run(lambda: self.window.record_skip(False))
        self._advance(2)
        self._run(self.window.restart)
        self.assertEqual(self._numbers(self.window.position), {0})
        self.assertEqual(self._numbers(self.window.weight), {0})
        self.assertEqual(self._numbers(self.window.skipped_windows), {1})

    def test_it_has_updated_until_the_next_micro_step(self, strategy):
        self._open(strategy, length=2)
        self.assertFalse(self._everywhere(self.window.has_updated))
        self._advance(2)
        self._run(self.window.record_update)
        self._run(self.window.restart)
        self.assertTrue(self._everywhere(self.window.has_updated))
        self._advance()
        self.assertFalse(self._everywhere(self.window.has_updated))

    def test_it_has_not_updated_after_a_skip(self, strategy):
        self._open(strategy, length=1)
        self._run(self.window.record_update)
        self.assertTrue(self._everywhere(self.window.has_updated))
        self._run(lambda: self.window.record_skip(True))
        self.assertFalse(self._everywhere(self.window.has_updated))

    def test_only_windows_that_were_not_clean_count_as_skipped(self, strategy):
        self._open(strategy, length=1)
        for is_clean in (True, False, True, False, False):
            verdict = tf.constant(is_clean)
            self._run(lambda verdict=verdict: self.window.record_skip(verdict))
        self.assertEqual(self._numbers(self.window.skipped_windows), {3})

    def test_bad_micro_batches_are_counted_where_they_were(self, strategy):
        self._open(strategy, length=4)
        replicas = self.strategy.num_replicas_in_sync
        # Replica r leaves r + 1 of its four micro-batches out.
        for k in range(4):
            is_bad = [k <= r for r in range(replicas)]
            self._run(self.window.leave_out, is_bad)
        expected = [r + 1 for r in range(replicas)]
        copies = engine.copies(self.strategy, self.window.bad_micro_batches)
        np.testing.assert_array_equal(copies, expected)
        total = self.window.bad_micro_batches.numpy()
        self.assertEqual(float(total), sum(expected))
        # They are skipped once the window is closed, and not before.
        self.assertEqual(self._numbers(self.window.skipped_micro_batches), {0})

    def test_restarting_adds_up_what_all_replicas_left_out(self, strategy):
        self._open(strategy, length=2)
        self._run(self.window.leave_out, [True] * self.strategy.num_replicas_in_sync)
        for total in (3.0, 0.0, 2.0):
            everywhere = tf.constant(total)
            self._run(lambda total=everywhere: self.window.restart(total))
            self.assertEqual(self._numbers(self.window.bad_micro_batches), {0})
        self.assertEqual(self._numbers(self.window.skipped_micro_batches), {5})
        self._run(self.window.restart)
        self.assertEqual(self._numbers(self.window.skipped_micro_batches), {5})
        self.assertEqual(self._numbers(self.window.skipped_windows), {0})

    def test_counters_are_int32_and_sums_over_replicas_float32(self, strategy):
        self._open(strategy, length=1)
        window = self.window
        counters = (
            window.position,
            window.length,
            window.next_length,
            window.skipped_windows,
            window.skipped_micro_batches,
            window.last_window_updated,
        )
        for counter in counters:
            self.assertEqual(counter.dtype, "int32")
            self.assertEqual(counter.shape, ())
        for summed in (window.weight, window.bad_micro_batches):
            self.assertEqual(summed.dtype, "float32")
            self.assertEqual(summed.shape, ())
