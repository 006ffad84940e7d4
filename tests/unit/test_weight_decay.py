"""Weight decay: what it accepts and refuses, which variables decay, when it is late."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum.arguments import StepIsTraced
from tests import refusals, registry, training
from tests.unit.test_arguments import MixedSGD, make

BAD_NUMBERS = (
    (TypeError, True),
    (TypeError, None),
    (TypeError, "0.1"),
    (TypeError, [0.1]),
    (ValueError, -0.1),
    (ValueError, float("nan")),
    (ValueError, float("inf")),
)
EXPECTED = "must be a finite number >= 0, the rate of the decay"


def _take(optimizer, variables, num_steps=1):
    """Micro steps with gradients of 0, so that only a decay moves a variable."""
    for _ in range(num_steps):
        optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in variables])


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class RateTest(refusals.RefusalCase):
    def test_it_is_zero_without_a_decay_and_read_back_with_one(self, surface):
        optimizer = make(surface)
        self.assertEqual(float(optimizer.pipelined_weight_decay), 0)
        optimizer.decay_weights(0.25)
        self.assertEqual(float(optimizer.pipelined_weight_decay), 0.25)
        self.assertEqual(optimizer.pipelined_weight_decay.dtype, tf.float32)
        optimizer.pipelined_weight_decay = np.float32(0.5)
        self.assertEqual(float(optimizer.pipelined_weight_decay), 0.5)

    def test_what_is_no_rate(self, surface):
        for error, value in BAD_NUMBERS:
            self.assert_refused(
                error,
                lambda v=value: make(surface).decay_weights(v),
                f"`weight_decay` {EXPECTED}",
                f"weight_decay={value!r}",
                "Use 0 for none",
            )

    def test_what_it_cannot_be_set_to(self, surface):
        optimizer = make(surface)
        optimizer.decay_weights(0.25)
        for error, value in BAD_NUMBERS:
            self.assert_refused(
                error,
                lambda v=value: setattr(optimizer, "pipelined_weight_decay", v),
                f"`pipelined_weight_decay` {EXPECTED}",
                f"pipelined_weight_decay={value!r}",
                "Use 0 for none",
            )
            self.assertEqual(float(optimizer.pipelined_weight_decay), 0.25)

    def test_it_cannot_be_set_without_a_decay(self, surface):
        optimizer = make(surface)
        self.assert_refused(
            ValueError,
            lambda: setattr(optimizer, "pipelined_weight_decay", 0.5),
            "`pipelined_weight_decay` can be set once weights are decayed",
            "pipelined_weight_decay=0.5",
            "Call `optimizer.decay_weights(0.5)` before the first micro step",
        )

    def test_it_counts_at_the_next_update_also_in_an_open_window(self, surface):
        optimizer, variable = make(surface), keras.Variable(8.0)
        optimizer.decay_weights(0.25)
        _take(optimizer, [variable], 3)
        self.assertEqual(float(variable), 6)
        optimizer.pipelined_weight_decay = 0.5
        self.assertEqual(float(variable), 6)
        _take(optimizer, [variable])
        self.assertEqual(float(variable), 3)

    def test_it_is_not_among_what_is_saved(self, surface):
        decaying, plain = make(surface), make(surface)
        decaying.decay_weights(0.25)
        for optimizer in (decaying, plain):
            optimizer.build([keras.Variable(1.0)])
        self.assertLen(decaying.variables, len(plain.variables))
        self.assertEqual(
            sorted(decaying.get_config()), sorted(make(surface).get_config())
        )

    def test_under_a_strategy_it_is_read_and_set_from_plain_python(self, surface):
        with registry.mirrored().scope():
            optimizer, variable = make(surface), keras.Variable(8.0)
        optimizer.decay_weights(0.25)
        optimizer.pipelined_weight_decay = 0.5
        self.assertEqual(float(optimizer.pipelined_weight_decay), 0.5)
        for _ in range(2):
            registry.mirrored().run(lambda: _take(optimizer, [variable]))
        self.assertEqual(training.numbers(variable), 4)


class FilterTest(refusals.RefusalCase):
    def _decayed(self, filter, surface="wrapper"):
        """The names of the variables that decay."""
        names = ("kernel", "bias", "gamma", "kernel_scale")
        variables = [keras.Variable([2.0], name=name) for name in names]
        optimizer = make(surface, 1)
        optimizer.decay_weights(0.5, filter=filter)
        _take(optimizer, variables)
        values = {v.name: float(training.numbers(v)[0]) for v in variables}
        self.assertContainsSubset(values.values(), {1.0, 2.0})
        return [name for name in names if values[name] == 1]

    @parameterized.parameters("wrapper", "mixin")
    def test_a_function_names_those_that_decay(self, surface):
        is_kernel = self._decayed(lambda v: v.name == "kernel", surface)
        self.assertEqual(is_kernel, ["kernel"])

    @parameterized.parameters(
        (None, ["kernel", "bias", "gamma", "kernel_scale"]),
        ([], ["kernel", "bias", "gamma", "kernel_scale"]),
        ("bias", ["kernel", "gamma", "kernel_scale"]),
        (["bias", "gamma"], ["kernel", "kernel_scale"]),
        (("kernel",), ["bias", "gamma"]),
        ({"kernel$"}, ["bias", "gamma", "kernel_scale"]),
        (frozenset(["^(bias|gamma)"]), ["kernel", "kernel_scale"]),
        ("Kernel", ["kernel", "bias", "gamma", "kernel_scale"]),
    )
    def test_names_are_those_that_do_not(self, filter, expected):
        self.assertEqual(self._decayed(filter), expected)

    def test_names_are_looked_for_in_the_whole_path(self):
        layers = [keras.layers.Dense(1, name=name) for name in ("first", "second")]
        for layer in layers:
            layer.build((None, 1))
            layer.set_weights([np.full((1, 1), 2.0), np.full(1, 2.0)])
        optimizer = make("wrapper", 1)
        optimizer.decay_weights(0.5, filter="rst/")
        _take(optimizer, [v for layer in layers for v in layer.trainable_variables])
        values = [[float(np.sum(w)) for w in layer.get_weights()] for layer in layers]
        self.assertEqual(values, [[2, 2], [1, 1]])

    def test_a_value_that_is_overwritten_does_not_decay(self):
        statistic, variable = keras.Variable(2.0), keras.Variable(2.0)
        statistic.overwrite_with_gradient = True
        optimizer = make("wrapper", 2)
        optimizer.decay_weights(0.5)
        for _ in range(2):
            optimizer.apply_gradients([(tf.constant(3.0), statistic), (0.0, variable)])
        self.assertEqual(float(statistic), 3)
        self.assertEqual(float(variable), 1)

    def test_what_is_no_filter(self):
        for value in (1, 0.5, True, [1], ["bias", None], "", [""], {"bias": True}):
            self.assert_refused(
                TypeError,
                lambda v=value: make("wrapper").decay_weights(0.5, filter=v),
                "`filter` must be None, a callable",
                f"filter={value!r}",
                'Write for example filter=["bias"]',
            )

    def test_what_is_no_regular_expression(self):
        self.assert_refused(
            ValueError,
            lambda: make("wrapper").decay_weights(0.5, filter=["bias", "(gamma"]),
            "`filter` must hold names, or regular expressions",
            "of which '(gamma' is none",
        )


class InnerDecayTest(refusals.RefusalCase):
    def _optimizers(self, rate):
        yield keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(1.0, weight_decay=rate), 2
        )
        yield MixedSGD(1.0, weight_decay=rate, accumulation_steps=2)

    def test_an_optimizer_that_decays_is_refused(self):
        for optimizer in self._optimizers(0.125):
            self.assert_refused(
                ValueError,
                lambda o=optimizer: o.decay_weights(0.5),
                "must not decay weights by itself",
                "SGD with weight_decay=0.125",
                "beside_inner=True",
            )

    def test_a_rate_of_zero_is_no_decay(self):
        for optimizer in self._optimizers(0.0):
            optimizer.decay_weights(0.5)
            variable = keras.Variable(8.0)
            _take(optimizer, [variable], 2)
            self.assertEqual(float(variable), 4)

    def test_both_if_both_are_wanted(self):
        for optimizer in self._optimizers(0.25):
            optimizer.decay_weights(0.5, beside_inner=True)
            variable = keras.Variable(8.0)
            _take(optimizer, [variable], 2)
            self.assertEqual(float(variable), 3)  # of 8, 0.75 and 0.5 are left

    def test_a_fix_that_adamw_accepts(self):
        optimizer = keras_accum.AccumulationOptimizer(keras.optimizers.AdamW(), 2)
        with self.assertRaisesRegex(ValueError, "decay twice") as caught:
            optimizer.decay_weights(0.5)
        # AdamW refuses None: its decay is switched off by 0.
        self.assertNotIn("weight_decay=None", str(caught.exception))

    def test_a_child_of_a_multi_optimizer(self):
        if not hasattr(keras.optimizers, "MultiOptimizer"):
            self.skipTest("MultiOptimizer came with a later Keras")
        optimizer = keras_accum.AccumulationOptimizer(
            registry.OPTIMIZERS["multi"](weight_decay=0.125), 2
        )
        variables = [keras.Variable(1.0, name=name) for name in ("kernel", "bias")]
        with self.assertRaisesRegex(ValueError, "weight_decay=0.125"):
            optimizer.decay_weights(0.5)  # it may have no children before the build
            _take(optimizer, variables, 2)

    def test_the_other_decay_of_muon(self):
        if "muon" not in registry.OPTIMIZERS:
            self.skipTest("Muon of this Keras fails by itself")
        optimizer = keras_accum.AccumulationOptimizer(
            keras.optimizers.Muon(weight_decay=None, adam_weight_decay=0.125), 2
        )
        with self.assertRaisesRegex(ValueError, "decay twice"):
            optimizer.decay_weights(0.5)


@parameterized.named_parameters(("wrapper", "wrapper"), ("mixin", "mixin"))
class LateTest(refusals.RefusalCase):
    def _stepped(self, surface, **decay):
        optimizer, self.variable = make(surface), keras.Variable(8.0)
        if decay:
            optimizer.decay_weights(0.25, **decay)
        _take(optimizer, [self.variable], 2)
        return optimizer

    def test_it_must_come_before_the_first_micro_step(self, surface):
        optimizer = self._stepped(surface)
        self.assert_refused(
            StepIsTraced,
            lambda: optimizer.decay_weights(0.5),
            "`decay_weights` must be called before the first micro step",
            "an optimizer that has taken a micro step",
            "call `optimizer.forget_traces()` before",
        )
        self.assertTrue(issubclass(StepIsTraced, ValueError))
        self.assertEqual(float(optimizer.pipelined_weight_decay), 0)

    def test_it_can_come_after_the_build(self, surface):
        optimizer, variable = make(surface), keras.Variable(8.0)
        optimizer.build([variable])
        optimizer.decay_weights(0.25)
        _take(optimizer, [variable], 2)
        self.assertEqual(float(variable), 6)

    def test_the_same_decay_at_another_rate_is_never_late(self, surface):
        optimizer = self._stepped(surface, filter=["gamma", "bias"])
        optimizer.decay_weights(0.5, filter=("bias", "gamma"))
        _take(optimizer, [self.variable], 2)
        self.assertEqual(float(self.variable), 3)

    def test_another_decay_is_late(self, surface):
        for other in (
            {"decoupled": False},
            {"times_learning_rate": False},
            {"beside_inner": True},
            {"filter": "gamma"},
            {"filter": lambda variable: True},
        ):
            optimizer = self._stepped(surface, filter="bias")
            with self.subTest(other), self.assertRaises(StepIsTraced):
                optimizer.decay_weights(0.5, **{"filter": "bias", **other})
            self.assertEqual(float(optimizer.pipelined_weight_decay), 0.25)

    def test_forgotten_traces_take_it_up(self, surface):
        strategy = registry.mirrored()
        with strategy.scope():
            optimizer, variable = make(surface), keras.Variable(8.0)
        strategy.run(lambda: _take(optimizer, [variable]))
        optimizer.flush()  # traced without a decay
        self.assertEqual(training.numbers(variable), 8)
        optimizer.forget_traces()
        optimizer.decay_weights(0.25)
        strategy.run(lambda: _take(optimizer, [variable]))
        optimizer.flush()
        self.assertEqual(training.numbers(variable), 6)
