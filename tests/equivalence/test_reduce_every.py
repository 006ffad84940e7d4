"""Reducing each micro step instead of each window: the same numbers."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from tests import refusals, registry, tolerances, training
from tests.unit.test_arguments import make

STEPS, WINDOWS = 3, 4


class MixedMomentum(keras_accum.AccumulationMixin, keras.optimizers.SGD):
    pass


def _optimizer(surface, **options):
    if surface == "mixin":
        return MixedMomentum(0.05, momentum=0.9, accumulation_steps=STEPS, **options)
    return keras_accum.AccumulationOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), STEPS, **options
    )


def _gradients(replicas, seed=0):
    """For each micro step and replica: of a vector, and of a scalar."""
    random = np.random.RandomState(seed)
    return random.randn(WINDOWS * STEPS, replicas, 4).astype("float32")


def _started(strategy, surface, **options):
    with strategy.scope():
        variables = [keras.Variable([1.0, 2.0, 3.0]), keras.Variable(4.0)]
        optimizer = _optimizer(surface, **options)
        optimizer.build(variables)
    return optimizer, variables


def _take(strategy, optimizer, variables, gradients, weights=None, graph=True):
    """One micro step for each of `gradients`, of which each replica has its own."""

    def step(gradient, weight):
        pairs = zip((gradient[:3], gradient[3]), variables, strict=True)
        optimizer.apply_gradients(pairs, weight=None if weights is None else weight)

    def micro_step(gradient, weight):
        strategy.run(step, args=(gradient, weight))

    run = tf.function(micro_step, autograph=False) if graph else micro_step
    ones = np.ones(gradients.shape[:2], "float32")
    weights_of = ones if weights is None else weights
    for gradient, weight in zip(gradients, weights_of, strict=True):
        values = [
            strategy.experimental_distribute_values_from_function(
                lambda c, each=each: tf.constant(each[c.replica_id_in_sync_group])
            )
            for each in (gradient, weight)
        ]
        run(*values)


def _plain(updates):
    variables = [keras.Variable([1.0, 2.0, 3.0]), keras.Variable(4.0)]
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(variables)
    for update in updates:
        pairs = zip((update[:3], update[3]), variables, strict=True)
        optimizer.apply_gradients([(tf.constant(g), v) for g, v in pairs])
    return variables


def _updates(gradients, micro, replica, weights=None):
    """NumPy: the reduced gradient of each window."""
    by_window = gradients.reshape(WINDOWS, STEPS, -1, 4).astype("float64")
    replicas = by_window.shape[2]
    if weights is None:
        weights = np.ones(gradients.shape[:2])
    weights = weights.reshape(WINDOWS, STEPS, -1, 1)
    sums = (by_window * weights).sum(axis=(1, 2))
    if micro == "sum":
        return sums / (replicas if replica == "mean" else 1)
    total = weights.sum(axis=(1, 2))
    return sums / (total if replica == "mean" else total / replicas)


class ReduceEveryTest(refusals.RefusalCase):
    @parameterized.product(
        strategy=["default", "mirrored"],
        micro=["mean", "sum", "running_mean"],
        replica=["sum", "mean"],
        surface=["wrapper", "mixin"],
    )
    def test_the_same_numbers_as_numpy(self, strategy, micro, replica, surface):
        strategy = registry.STRATEGIES[strategy]()
        gradients = _gradients(strategy.num_replicas_in_sync)
        optimizer, variables = _started(
            strategy,
            surface,
            micro_reduction=micro,
            replica_reduction=replica,
            reduce_every="micro_step",
        )
        _take(strategy, optimizer, variables, gradients)
        expected = _plain(_updates(gradients, micro, replica))
        training.assert_same_variables(
            variables, expected, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.product(
        replica=["sum", "mean"], graph=[True, False], scale=[1.0, 64.0]
    )
    def test_weights_and_a_loss_scale(self, replica, graph, scale):
        strategy = registry.mirrored()
        gradients = _gradients(strategy.num_replicas_in_sync)
        weights = np.float32([[1, 5], [0, 2], [3, 1]] * WINDOWS)
        optimizer, variables = _started(
            strategy,
            "wrapper",
            replica_reduction=replica,
            reduce_every="micro_step",
            loss_scale=scale,
        )
        _take(strategy, optimizer, variables, gradients * scale, weights, graph)
        expected = _plain(_updates(gradients, "mean", replica, weights))
        training.assert_same_variables(
            variables, expected, tolerances.BY_DTYPE["float32"]
        )

    @parameterized.product(policy=["skip_window", "skip_micro_batch"], replica=[0, 1])
    def test_a_bad_gradient_on_one_replica(self, policy, replica):
        strategy = registry.mirrored()
        gradients = _gradients(strategy.num_replicas_in_sync)
        optimizer, variables = _started(
            strategy, "wrapper", reduce_every="micro_step", on_nonfinite=policy
        )
        bad = gradients.copy()
        bad[STEPS + 1, replica] = np.nan
        _take(strategy, optimizer, variables, bad)
        if policy == "skip_window":
            updates = np.delete(_updates(gradients, "mean", "sum"), 1, axis=0)
            self.assertEqual(int(optimizer.skipped_windows), 1)
        else:
            weights = np.ones(gradients.shape[:2])
            weights[STEPS + 1, replica] = 0
            updates = _updates(gradients, "mean", "sum", weights)
            self.assertEqual(int(optimizer.skipped_micro_batches), 1)
        training.assert_same_variables(
            variables, _plain(updates), tolerances.BY_DTYPE["float32"]
        )

    @parameterized.product(
        saved=["window", "micro_step"],
        finished=["window", "micro_step"],
        replica=["sum", "mean"],
        strategies=[("mirrored", "default"), ("default", "mirrored")],
    )
    def test_a_window_is_finished_either_way(
        self, saved, finished, replica, strategies
    ):
        """What is saved is what all replicas together hold."""
        at = STEPS + 2
        first, second = (registry.STRATEGIES[name]() for name in strategies)
        counts = [first.num_replicas_in_sync, second.num_replicas_in_sync]
        both = [_gradients(n, seed) for seed, n in enumerate(counts)]
        options = {"replica_reduction": replica}
        optimizer, variables = _started(first, "wrapper", reduce_every=saved, **options)
        _take(first, optimizer, variables, both[0][:at])
        store = {}
        optimizer.window_state.save_own_variables(store)
        resumed, copies = _started(second, "wrapper", reduce_every=finished, **options)
        resumed.set_weights([v.numpy() for v in optimizer.variables])
        for one, other in zip(copies, variables, strict=True):
            one.assign(other.numpy())
        resumed.window_state.load_own_variables(store)
        _take(second, resumed, copies, both[1][at:])
        # Over the replicas first: then the windows are of one number of them.
        over = np.sum if replica == "sum" else np.mean
        reduced = np.concatenate(
            [over(both[0][:at], axis=1), over(both[1][at:], axis=1)]
        )
        expected = _plain(_updates(reduced[:, None], "mean", "sum"))
        training.assert_same_variables(copies, expected, tolerances.BY_DTYPE["float32"])

    def test_the_config_has_it(self):
        optimizer = make("wrapper", reduce_every="micro_step")
        config = optimizer.get_config()
        self.assertEqual(config["reduce_every"], "micro_step")
        again = keras_accum.AccumulationOptimizer.from_config(config)
        self.assertEqual(again.get_config(), config)
        self.assertEqual(make("mixin").get_config()["reduce_every"], "window")

    def test_it_is_one_of_two(self):
        for surface in ("wrapper", "mixin"):
            self.assert_refused(
                ValueError,
                lambda s=surface: make(s, reduce_every="step"),
                "`reduce_every` must be one of 'window', 'micro_step'",
                "reduce_every='step'",
            )


class GroupsTest(refusals.RefusalCase):
    def _groups(self):
        replicas = registry.mirrored().num_replicas_in_sync
        backwards = list(range(replicas))[::-1]
        return [
            1,
            *([2] if replicas % 2 == 0 else []),
            [[replica] for replica in backwards],
            [backwards],
            *([[backwards[::2], backwards[1::2]]] if replicas % 2 == 0 else []),
        ]

    @parameterized.product(
        which=[0, 1, 2, 3, 4],
        every=["window", "micro_step"],
        replica=["sum", "mean"],
    )
    def test_sums_stay_inside(self, which, every, replica):
        strategy, groups = registry.mirrored(), self._groups()[which]
        replicas = strategy.num_replicas_in_sync
        gradients = _gradients(replicas)
        if isinstance(groups, int):
            assignment = np.arange(replicas).reshape(-1, groups)
        else:
            assignment = np.array(groups)
        with strategy.scope():
            variables = [keras.Variable([1.0, 2.0, 3.0]), keras.Variable(4.0)]
            optimizer = _optimizer(
                "wrapper",
                reduce_every=every,
                replica_groups=groups,
                replica_reduction=replica,
            )
        if len(assignment) > 1:
            with self.assertWarnsRegex(UserWarning, "inside their groups only"):
                optimizer.build(variables)
        _take(strategy, optimizer, variables, gradients)
        for group in assignment:
            expected = _plain(_updates(gradients[:, group], "mean", replica))
            for place, variable in enumerate(variables):
                copies = strategy.experimental_local_results(variable.value)
                for member in group:
                    np.testing.assert_allclose(
                        copies[member].numpy(), expected[place].numpy(), atol=1e-6
                    )

    @parameterized.parameters(0, 1)
    def test_one_verdict_for_all_groups(self, replica):
        strategy = registry.mirrored()
        gradients = _gradients(strategy.num_replicas_in_sync)
        gradients[1, replica] = np.inf
        with strategy.scope():
            variables = [keras.Variable([1.0, 2.0, 3.0]), keras.Variable(4.0)]
            optimizer = _optimizer("wrapper", replica_groups=1, loss_scale="dynamic")
        with self.assertWarns(UserWarning):
            optimizer.build(variables)
        before = float(optimizer.loss_scale)
        _take(strategy, optimizer, variables, gradients[:STEPS] * before)
        self.assertEqual(int(optimizer.skipped_windows), 1)
        self.assertEqual(float(optimizer.loss_scale), before / 2)
        for variable, value in zip(variables, ([1.0, 2.0, 3.0], 4.0), strict=True):
            for copy in strategy.experimental_local_results(variable.value):
                np.testing.assert_array_equal(copy.numpy(), value)

    def test_several_groups_are_neither_saved_nor_loaded(self):
        strategy = registry.mirrored()
        with strategy.scope():
            model = training.network(_optimizer("wrapper", replica_groups=1))
            with self.assertWarns(UserWarning):
                model.optimizer.build(model.trainable_variables)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.weights.h5")
            checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
            for save in (
                lambda: checkpoint.save(os.path.join(folder, "checkpoint")),
                lambda: checkpoint.write(os.path.join(folder, "checkpoint")),
                lambda: model.save(os.path.join(folder, "model.keras")),
                lambda: model.save_weights(path),
                lambda: model.optimizer.window_state.load_own_variables({}),
            ):
                with self.assertRaisesRegex(ValueError, "one group of replicas to be"):
                    save()
            one = training.network(_optimizer("wrapper"))
            one.optimizer.build(one.trainable_variables)
            one.save_weights(path)
            with self.assertRaisesRegex(ValueError, "one group of replicas to be"):
                model.load_weights(path)

    def test_bad_groups_are_refused(self):
        strategy = registry.mirrored()
        replicas = strategy.num_replicas_in_sync
        ids = list(range(replicas))
        for groups in (
            [],
            ids,
            "all",
            1.0,
            True,
            [ids, ids],
            [[*ids, replicas]],
            [ids[1:]],
            [ids[:1], [*ids[1:], ids[0]]],
            [["0", "1"]],
        ):
            with strategy.scope():
                self.assert_refused(
                    ValueError,
                    lambda g=groups: make("wrapper", replica_groups=g),
                    "`replica_groups` must be a list of lists of equal length",
                    f"replica_groups={groups!r}",
                    "Write for example [[0, 1]",
                )
        for size in (0, -1, 3, replicas + 1):
            with strategy.scope():
                self.assert_refused(
                    ValueError,
                    lambda s=size: make("mixin", replica_groups=s),
                    "`replica_groups` must divide the number of replicas",
                    f"replica_groups={size} for {replicas} replicas",
                    f"Use one of [1, 2{', 4' if replicas == 4 else ''}]",
                )

    def test_the_config_has_them(self):
        backwards = list(range(registry.mirrored().num_replicas_in_sync))[::-1]
        for groups in (None, 1, [backwards]):
            with registry.mirrored().scope():
                optimizer = make("wrapper", replica_groups=groups)
                config = optimizer.get_config()
                self.assertEqual(config["replica_groups"], groups)
                again = keras_accum.AccumulationOptimizer.from_config(config)
            self.assertEqual(again.get_config(), config)

    def test_their_noise_is_not_measured(self):
        with registry.mirrored().scope():
            optimizer = make("wrapper", replica_groups=1)
        self.assert_refused(
            ValueError,
            lambda: optimizer.measure_gradients(noise=True),
            "`noise` must be False with several groups of replicas",
            "noise=True",
        )
