"""What a loss scale leaves in files, hears of empty micro-batches, says when late."""

import os
import tempfile

import keras
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import refusals, registry, tolerances, training
from tests.unit.test_arguments import MixedSGD, make


def _step(optimizer, variable, gradient, weight=None):
    loss = optimizer.scale_loss(tf.constant(gradient))
    optimizer.apply_gradients([(loss, variable)], weight=weight)


class StatisticsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("moving_mean", 8.0),
        ("moving_variance", 8.0),
        ("moving_mean_head", 1.0),
        ("removing_meaning", 1.0),
    )
    def test_only_a_name_of_its_own_makes_a_statistic(self, name, expected):
        optimizer = make("wrapper", 1, loss_scale=8.0)
        variable = keras.Variable(0.0, name=name)
        _step(optimizer, variable, 1.0)
        self.assertEqual(float(variable.numpy()), -expected)

    def test_a_layer_called_like_one_is_none(self):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, name="moving_mean_head")]
        )
        optimizer = make("wrapper", 1, loss_scale=8.0)
        kernel = model.trainable_variables[0]
        kernel.assign([[0.0]])
        loss = optimizer.scale_loss(tf.constant([[1.0]]))
        optimizer.apply_gradients([(loss, kernel)])
        self.assertEqual(float(kernel.numpy()[0, 0]), -1)


class EmptyMicroBatchTest(parameterized.TestCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        policy=["skip_window", "skip_micro_batch"],
        scale=["dynamic", "automatic"],
    )
    def test_it_says_nothing_of_the_scale(self, strategy, policy, scale):
        values = {
            "dynamic": keras_accum.DynamicLossScale(8.0),
            "automatic": keras_accum.AutomaticLossScale(8.0, period=1),
        }
        distribution = registry.STRATEGIES[strategy]()
        with distribution.scope():
            variable = keras.Variable(0.0)
            optimizer = make(
                "wrapper", 2, loss_scale=values[scale], on_nonfinite=policy
            )
        replicas = distribution.num_replicas_in_sync

        def full():
            _step(optimizer, variable, 3.0 / replicas, weight=4.0)

        def empty():
            _step(optimizer, variable, float("nan"), weight=0.0)

        for step in (empty, full):
            distribution.run(step)
        self.assertEqual(float(variable.numpy()), -3)
        self.assertEqual(int(optimizer.skipped_micro_batches), 0)
        grown = {"dynamic": 8, "automatic": 16}  # all that is counted is small
        self.assertEqual(float(optimizer.loss_scale), grown[scale])


class LoadedBeforeBuildTest(parameterized.TestCase):
    @parameterized.product(
        surface=["wrapper", "mixin"], strategy=["default", "mirrored"]
    )
    def test_the_window_is_taken_up_when_it_is_built(self, surface, strategy):
        """Keras says nothing when an optimizer without slots has as many variables."""

        def model():
            with registry.STRATEGIES[strategy]().scope():
                return training.network(make(surface, 4, loss_scale=8.0))

        x, y = training.rows(7 * training.ROWS)

        def fit(each, first, last):
            rows = slice(first * training.ROWS, last * training.ROWS)
            each.fit(
                training.batches(x[rows], y[rows], training.ROWS),
                shuffle=False,
                verbose=0,
            )

        uninterrupted, saved, resumed = model(), model(), model()
        fit(uninterrupted, 0, 7)
        saved.optimizer.loss_scale = 2.0
        fit(saved, 0, 6)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.weights.h5")
            saved.save_weights(path)
            resumed.load_weights(path)
        fit(resumed, 6, 7)
        self.assertEqual(int(resumed.optimizer.position), 3)
        self.assertEqual(float(resumed.optimizer.loss_scale), 2)
        for each in (uninterrupted, resumed):
            each.optimizer.flush()
        # A restore shares the sums among the replicas, which rounds.
        training.assert_same_variables(
            resumed.variables, uninterrupted.variables, tolerances.BY_DTYPE["float32"]
        )


class OtherReplicasTest(parameterized.TestCase):
    @parameterized.parameters(("default", "mirrored"), ("mirrored", "default"))
    def test_bad_micro_batches_are_no_weights(self, saved_on, finished_on):
        """Rows change with the number of replicas; how many were bad does not."""

        def started(strategy):
            with registry.STRATEGIES[strategy]().scope():
                variable = keras.Variable(0.0)
                optimizer = make(
                    "wrapper",
                    2,
                    loss_scale=keras_accum.DynamicLossScale(8.0),
                    on_nonfinite="skip_micro_batch",
                )
                optimizer.build([variable])
            return registry.STRATEGIES[strategy](), optimizer, variable

        strategy, optimizer, variable = started(saved_on)

        def one_is_bad():
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group, 0)
            gradient = tf.where(is_first, float("inf"), 1.0)
            optimizer.apply_gradients([(gradient, variable)], weight=4.0)

        strategy.run(one_is_bad)
        store = {}
        optimizer.window_state.save_own_variables(store)
        strategy, optimizer, variable = started(finished_on)
        optimizer.window_state.load_own_variables(store)
        strategy.run(lambda: _step(optimizer, variable, 1.0, weight=4.0))
        self.assertEqual(int(optimizer.skipped_micro_batches), 1)
        self.assertEqual(float(optimizer.loss_scale), 4)


class WindowOfOneTest(parameterized.TestCase):
    def test_it_is_summed_over_replicas_in_the_accumulators_dtype(self):
        strategy = registry.mirrored()
        replicas = strategy.num_replicas_in_sync
        for dtype, value in (("float16", 40000.0), ("bfloat16", 256.0)):
            with strategy.scope():
                variable = keras.Variable(0.0)
                optimizer = make("wrapper", 1)
                optimizer.build([variable])

            def step(optimizer=optimizer, variable=variable, dtype=dtype, value=value):
                context = tf.distribute.get_replica_context()
                is_first = tf.equal(context.replica_id_in_sync_group, 0)
                gradient = tf.cast(tf.where(is_first, value, 1.0), dtype)
                optimizer.apply_gradients([(gradient, variable)])

            strategy.run(step)
            self.assertEqual(float(variable.numpy()), -(value + replicas - 1))


class ByItselfTest(refusals.RefusalCase):
    def test_a_base_class_that_scales_or_accumulates_is_refused(self):
        def base(**arguments):
            class Base(keras.optimizers.SGD):
                def __init__(self, *args, **kwargs):
                    super().__init__(*args, **{**kwargs, **arguments})

            return type("Mixed", (keras_accum.AccumulationMixin, Base), {})

        for name, value in (
            ("loss_scale_factor", 128.0),
            ("gradient_accumulation_steps", 2),
        ):
            self.assert_refused(
                ValueError,
                lambda n=name, v=value: base(**{n: v})(1.0, accumulation_steps=2),
                f"`{name}` must be None in an optimizer that accumulates",
                f"Mixed, whose base class has set {name}={value}",
                "Use accumulation_steps and loss_scale",
            )


class LatePolicyTest(parameterized.TestCase):
    def tearDown(self):
        super().tearDown()
        keras.mixed_precision.set_dtype_policy("float32")

    @parameterized.parameters("wrapper", "mixin")
    def test_a_policy_set_after_construction_is_warned_of(self, surface):
        optimizer = make(surface, 2)
        asked_for = make(surface, 2, loss_scale=1.0)
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        with self.assertWarnsRegex(UserWarning, "policy was set after"):
            optimizer.build([keras.Variable(0.0)])
        asked_for.build([keras.Variable(0.0)])  # a warning would be an error

    def test_a_mixin_inside_keras_own_one_is_saved_without_a_scale(self):
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        with self.assertWarnsRegex(UserWarning, "load_weights"):
            model = training.network(MixedSGD(0.05, accumulation_steps=2))
        x, y = training.rows(3 * training.ROWS)
        model.fit(training.batches(x, y, training.ROWS), shuffle=False, verbose=0)
        inner = model.optimizer.inner_optimizer
        self.assertEqual(int(inner.position), 1)
        held = {variable.name for variable in inner.window_state.held}
        self.assertNotIn("loss_scale", held)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            custom = {"MixedSGD": MixedSGD}
            resumed = keras.models.load_model(path, custom_objects=custom).optimizer
        self.assertEqual(int(resumed.inner_optimizer.position), 1)
