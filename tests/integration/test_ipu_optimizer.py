"""Graphcore's IPUOptimizer on the strategy there is (vectors 16 to 19)."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from keras_accum.graphcore import IPUOptimizer
from tests import refusals, registry


def _decays(variable):
    return True


def _started(strategy, rate, steps=1, names=("w",), momentum=0.0, **options):
    strategy = registry.STRATEGIES[strategy]()
    with strategy.scope():
        inner = keras.optimizers.SGD(rate, momentum=momentum)
        variables = [keras.Variable(2.0, name=name) for name in names]
        optimizer = IPUOptimizer(
            inner, False, strategy.num_replicas_in_sync, steps, **options
        )
        optimizer.build(variables)
    return strategy, optimizer, variables


def _take(strategy, optimizer, variables, gradients):
    """For each micro step the gradient of each replica, the same of all variables."""
    for each in gradients:
        values = strategy.experimental_distribute_values_from_function(
            lambda c, each=each: tf.constant(each[c.replica_id_in_sync_group])
        )
        strategy.run(
            lambda g: optimizer.apply_gradients([(g, v) for v in variables]), (values,)
        )


class IPUOptimizerTest(refusals.RefusalCase):
    @parameterized.parameters("default", "mirrored")
    def test_vector_16(self, strategy):
        """w=2, lr .5, inputs 1 and 2, loss w x, summed by the strategy: 0.5."""
        strategy, optimizer, (w,) = _started(strategy, 0.5)
        replicas = strategy.num_replicas_in_sync
        # The mean over workers that the optimizer takes makes a sum of what is xR.
        inputs = [1.0 * replicas, 2.0 * replicas] if replicas == 2 else [3.0]
        _take(strategy, optimizer, [w], [inputs])
        self.assertAlmostEqual(float(w.numpy()), 0.5, places=6)

    @parameterized.product(
        strategy=["default", "mirrored"], pipelining=[False, True], steps=[1, 4]
    )
    def test_vector_17(self, strategy, pipelining, steps):
        """g=1, wd=.1, w=2: 1.2, whatever the number of workers or micro-batches."""
        strategy, optimizer, (w,) = _started(
            strategy,
            1.0,
            steps,
            pipelining=pipelining,
            weight_decay=0.1,
            weight_decay_filter_fn=_decays,
        )
        num_calls = 1 if pipelining else steps
        _take(
            strategy,
            optimizer,
            [w],
            [[1.0] * strategy.num_replicas_in_sync] * num_calls,
        )
        self.assertAlmostEqual(float(w.numpy()), 2 - 1.2, places=6)

    def test_by_default_nothing_decays(self):
        strategy, optimizer, (w,) = _started("default", 1.0, weight_decay=0.1)
        _take(strategy, optimizer, [w], [[1.0]])
        self.assertEqual(float(w.numpy()), 1)

    def test_a_decay_in_scaled_units(self):
        strategy, optimizer, (w,) = _started(
            "default",
            1.0,
            grad_scale=8.0,
            weight_decay=0.8,
            weight_decay_filter_fn=_decays,
        )
        _take(strategy, optimizer, [w], [[8.0]])
        self.assertAlmostEqual(float(w.numpy()), 2 - 1.2, places=6)

    def test_vector_18(self):
        names = ("kernel", "moving_mean", "moving_variance", "moving_averages")
        strategy, optimizer, variables = _started(
            "mirrored", 1.0, 2, names=names, grad_scale=4.0
        )
        replicas = strategy.num_replicas_in_sync
        _take(strategy, optimizer, variables, [[4.0] * replicas, [8.0] * replicas])
        after = [float(v.numpy()) for v in variables]
        self.assertEqual(after, [2 - 1.5, 2 - 6, 2 - 6, 2 - 1.5])

    @parameterized.parameters(0.0, 0.9)
    def test_vector_19(self, momentum):
        """lr / grad_scale without unscaling is the same path."""
        rates = {8.0: 0.5, 1.0: 0.5 / 8}
        seen = {}
        for scale, rate in rates.items():
            strategy, optimizer, (w,) = _started(
                "default", rate, 2, momentum=momentum, grad_scale=scale
            )
            _take(strategy, optimizer, [w], [[8.0], [4.0], [16.0], [-8.0]])
            seen[scale] = float(w.numpy())
        self.assertAlmostEqual(seen[8.0], seen[1.0], places=6)

    @parameterized.parameters(False, True)
    def test_the_caller_scales_the_loss(self, pipelining):
        _, optimizer, (w,) = _started(
            "default",
            1.0,
            2,
            pipelining=pipelining,
            grad_scale=4.0,
        )
        sums = [0.0]
        for slope in (1.0, 3.0):
            pairs = optimizer.compute_gradients(lambda s=slope: 4.0 * s * w, [w])
            sums[0] += float(pairs[0][0])
            if not pipelining:
                optimizer.apply_gradients(pairs)
        if pipelining:  # the caller has added up, and applies the last time only
            optimizer.apply_gradients([(tf.constant(sums[0]), w)])
        self.assertAlmostEqual(float(w.numpy()), 2 - 2, places=6)

    def test_none_passes(self):
        _, optimizer, (w, other) = _started(
            "default",
            1.0,
            names=("a", "b"),
            weight_decay=0.1,
            weight_decay_filter_fn=_decays,
        )
        with self.assertWarns(UserWarning):
            optimizer.apply_gradients([(tf.constant(1.0), w), (None, other)])
        np.testing.assert_allclose([float(w), float(other)], [0.8, 2.0], rtol=1e-6)

    def test_in_fit_the_loss_is_scaled_for_the_caller(self):
        for strategy in ("default", "mirrored"):
            distribution = registry.STRATEGIES[strategy]()
            replicas = distribution.num_replicas_in_sync
            with distribution.scope():
                layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
                model = keras.Sequential([keras.Input((1,)), layer])
                model.compile(
                    IPUOptimizer(
                        keras.optimizers.SGD(1.0), False, replicas, 2, grad_scale=64.0
                    ),
                    "mse",
                )
            x = np.ones((8, 1), "float32")
            model.fit(x, 2 * x, batch_size=4, verbose=0)
            np.testing.assert_allclose(model.get_weights()[0], [[3.0]], rtol=1e-6)

    def test_the_later_name_of_its_count(self):
        optimizer = IPUOptimizer(
            keras.optimizers.SGD(), False, 1, gradient_accumulation_count=3
        )
        self.assertEqual(optimizer.accumulation_steps, 3)
        config = optimizer.get_config()
        self.assertEqual(IPUOptimizer.from_config(config).get_config(), config)
        for arguments in ({}, {"gradient_accumulation_count": 2}):
            count = 2 if arguments else None
            self.assert_refused(
                ValueError,
                lambda a=arguments, c=count: IPUOptimizer(
                    keras.optimizers.SGD(), False, 1, c, **a
                ),
                "Exactly one of `gradients_to_accumulate`",
                f"gradients_to_accumulate={count}",
            )

    def test_what_is_refused(self):
        for changed, expected, received in (
            ({"sharded": True}, "`sharded` must be left out", "sharded=True"),
            ({"replicas": 2}, "`replicas` must be those", "replicas=2"),
            ({"replicas": 0}, "`replicas` must be those", "replicas=0"),
            ({"grad_scale": 0.0}, "`grad_scale` must be", "grad_scale=0.0"),
            ({"weight_decay": -1.0}, "`weight_decay` must be", "weight_decay=-1.0"),
            (
                {"gradients_to_accumulate": 0},
                "`gradients_to_accumulate` must be an integer >= 1",
                "gradients_to_accumulate=0",
            ),
        ):
            arguments = {"sharded": False, "replicas": 1, "gradients_to_accumulate": 2}
            self.assert_refused(
                ValueError,
                lambda a=arguments, c=changed: IPUOptimizer(
                    keras.optimizers.SGD(), **{**a, **c}
                ),
                expected,
                received,
            )
