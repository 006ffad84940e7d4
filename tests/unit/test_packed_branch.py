"""A branch whose variables enter in one tensor: the order is kept, and inputs are few.

Gradients are made slow where an order matters: those of a constant hide a race.
"""

import collections
import types
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import keras_accum
from keras_accum import packed_branch
from tests import graph_walk, micro_steps, registry, training
from tests.platforms import tpu_stand_in

SIZE = 250


def nothing():
    """The branch that is not taken."""


def slow(value):
    """`value`, after a while."""
    square = tf.ones((SIZE, SIZE)) / SIZE
    for _ in range(3):
        square = tf.matmul(square, square)
    return value + 0.0 * square[0, 0]


def unordered(predicate, branch, _):
    """What must not be: the same branch, and nothing that keeps the order."""

    def taken():
        branch()
        return tf.constant(True)

    function = tf.function(
        taken, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()
    handles = [h for h in function.captured_inputs if h.dtype == tf.resource]
    with tf.init_scope():
        pack = tf.raw_ops.Pack(values=handles)

    def call():
        unpacked = iter(tf.raw_ops.Unpack(value=pack, num=len(handles)))
        arguments = [
            next(unpacked) if c.dtype == tf.resource else c
            for c in function.captured_inputs
        ]
        return tf.raw_ops.StatefulPartitionedCall(
            args=arguments, Tout=[tf.bool], f=function
        )[0]

    tf.cond(predicate, call, lambda: tf.constant(False))


def wrong_windows(cond, windows=30):
    """Of windows of two slow additions, how many close with another sum than 3."""
    sums = [tf.Variable(0.0) for _ in range(4)]
    results = [tf.Variable(0.0) for _ in range(4)]
    count, later = tf.Variable(0), tf.Variable(0.0)

    def close():
        for result, total in zip(results, sums, strict=True):
            result.assign(total.read_value())
            total.assign(0.0)

    @tf.function(autograph=False)
    def step(value):
        for total in sums:
            total.assign_add(slow(value))
        count.assign_add(1)
        is_due = tf.equal(count.read_value() % 2, 0)
        cond(is_due, close, nothing)
        later.assign(results[0].read_value())  # in sight, and used after it

    num_wrong = 0
    for _ in range(windows):
        step(tf.constant(1.0))
        step(tf.constant(2.0))
        values = [float(each) for each in (*results, later)]
        num_wrong += values != [3.0] * 5
        for result in results:
            result.assign(0.0)
    return num_wrong


class OrderTest(parameterized.TestCase):
    def test_it_waits_for_what_came_before_and_is_waited_for(self):
        self.assertEqual(wrong_windows(packed_branch.cond), 0)

    def test_the_test_sees_a_branch_that_does_not_wait(self):
        self.assertGreater(wrong_windows(unordered), 0)

    def test_handles_that_cannot_be_packed_are_captured_one_by_one(self):
        with mock.patch.object(packed_branch, "_places_by_device", return_value={}):
            self.assertEqual(wrong_windows(packed_branch.cond), 0)

    def test_those_of_another_device_than_a_cpu_cannot(self):
        def handle(device, **other):
            attributes = {
                "dtype": tf.resource,
                "device": f"/job:localhost/replica:0/task:0/device:{device}",
                "shape": tf.TensorShape([]),
                "numpy": None,
                **other,
            }
            return types.SimpleNamespace(**attributes)

        captured = [
            handle("CPU:0"),
            handle("GPU:0"),
            handle("CPU:0", dtype=tf.float32),
            handle("CPU:1"),
            handle("CPU:0", shape=tf.TensorShape([3])),  # a pack itself
            handle("CPU:0"),
        ]
        places = packed_branch._places_by_device(captured)
        self.assertEqual(list(places.values()), [[0, 5], [3]])

    def test_two_in_one_function_are_in_order(self):
        total = tf.Variable(1.0)

        @tf.function(autograph=False)
        def step():
            packed_branch.cond(
                tf.constant(True), lambda: total.assign(slow(7.0)), nothing
            )
            packed_branch.cond(
                tf.constant(True), lambda: total.assign(total.read_value() * 2), nothing
            )
            return total.read_value()

        self.assertEqual([float(step()) for _ in range(10)], [14.0] * 10)

    def test_what_calls_the_function_waits_too(self):
        total = tf.Variable(1.0)

        @tf.function(autograph=False)
        def inner():
            packed_branch.cond(
                tf.constant(True), lambda: total.assign_add(slow(1.0)), nothing
            )

        inner()  # by itself it uses no variable in sight

        @tf.function(autograph=False)
        def outer():
            before = total.read_value()
            for _ in range(5):
                inner()
            total.assign(total.read_value() * 2)
            inner()
            return before, total.read_value()

        results = np.asarray([outer() for _ in range(5)], "float32")
        expected, value = [], 2.0
        for _ in range(5):
            expected.append((value, (value + 5) * 2 + 1))
            value = expected[-1][1]
        np.testing.assert_array_equal(results, expected)

    def test_what_calls_it_in_a_loop_and_in_a_branch_waits_too(self):
        total, copy = tf.Variable(1.0), tf.Variable(0.0)

        @tf.function(autograph=False)
        def inner():
            packed_branch.cond(
                tf.constant(True), lambda: total.assign_add(slow(1.0)), nothing
            )

        def in_branch():
            inner()
            return copy.assign(total.read_value() * 2)

        def body(i):
            tf.cond(i % 2 > 0, in_branch, lambda: copy.assign(-1.0))
            inner()
            copy.assign_add(total.read_value())
            return i + 1

        @tf.function(autograph=False)
        def outer():
            tf.while_loop(lambda i: i < 6, body, [tf.constant(0)])
            return copy.read_value(), total.read_value()

        self.assertEqual([float(each) for each in outer()], [9 * 2 + 10, 10])

    def test_in_a_loop(self):
        total = tf.Variable(0.0)

        def body(i):
            is_due = tf.equal(i % 2, 1)
            packed_branch.cond(is_due, lambda: total.assign(slow(total) + 1.0), nothing)
            return i + 1

        @tf.function(autograph=False)
        def loop():
            tf.while_loop(lambda i: i < 20, body, [tf.constant(0)])
            return total.read_value()

        self.assertEqual(float(loop()), 10)


def _inputs_of_branches(function):
    graph = function.graph.as_graph_def()
    bodies = [graph.node, *(f.node_def for f in graph.library.function)]
    return [
        sum(not name.startswith("^") for name in node.input)
        for nodes in bodies
        for node in nodes
        if node.op in ("If", "StatelessIf")
    ]


def _types(function):
    return {each.type for each in graph_walk.operations(function)}


VARIABLES = 40


def _micro_step(strategy, mode):
    """Adam around many variables: a traced micro step."""
    with registry.STRATEGIES[strategy]().scope():
        run = micro_steps.MicroSteps(
            strategy,
            lambda: keras_accum.AccumulationOptimizer(keras.optimizers.Adam(), 4),
            [np.zeros(3, "float32")] * VARIABLES,
            mode,
        )
    replicas = micro_steps.num_replicas(strategy)
    gradients = [tf.zeros((replicas, 3))] * VARIABLES
    return run, run._step.get_concrete_function(gradients, None)


class CountTest(parameterized.TestCase):
    @parameterized.parameters("default", "one_device", "mirrored")
    def test_the_branch_of_the_boundary_has_few_inputs(self, strategy):
        _, function = _micro_step(strategy, "graph")
        outer = _inputs_of_branches(function)[0]
        replicas = micro_steps.num_replicas(strategy)
        # One tensor of handles for each device, and what is no variable.
        self.assertLess(outer, 4 + 3 * replicas)

    def test_what_only_an_update_uses_stays_out_of_the_function(self):
        run, function = _micro_step("default", "graph")
        captured = {id(tensor) for tensor in function.captured_inputs}
        inner = run.optimizer.inner_optimizer
        self.assertLen(inner.variables, 2 * VARIABLES + 2)
        of_update = [v.value for v in (*run.variables, *inner.variables)]
        self.assertFalse(captured & {id(v.handle) for v in of_update})
        # One pack, the accumulators that share a variable, counters.
        self.assertLess(len(captured), 12)

    def test_a_slot_that_is_read_after_its_own_micro_step_is_new(self):
        inner = keras.optimizers.SGD(1.0, momentum=0.9)
        optimizer = keras_accum.AccumulationOptimizer(inner, 2)
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer.build([variable])
        momentum = inner.momentums[0]

        @tf.function(autograph=False)
        def step(gradient):
            optimizer.apply([slow(gradient)], [variable])
            return momentum.value.read_value()

        expected = 0.0
        for number in range(20):
            momentum_after = step(tf.fill([3], float(number)))
            if number % 2:
                expected = 0.9 * expected - (number - 0.5)
            np.testing.assert_allclose(momentum_after, [expected] * 3, rtol=1e-5)

    def test_small_variables_add_their_update_to_the_graph_and_nothing_else(self):
        def operations(optimizer, number):
            variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(number)]
            optimizer.build(variables)
            gradients = [tf.zeros(3)] * number

            @tf.function(autograph=False)
            def step():
                optimizer.apply(gradients, variables)

            function = step.get_concrete_function()
            found = [each.type for each in graph_walk.operations(function)]
            # Handles are no operations in a branch; no gradient is read by itself.
            return collections.Counter(
                name for name in found if name not in ("Placeholder", "Identity")
            )

        def growth(make):
            return operations(make(), 40) - operations(make(), 20)

        def ours():
            return keras_accum.AccumulationOptimizer(keras.optimizers.Adam(), 4)

        self.assertNotEmpty(growth(ours))
        self.assertEqual(growth(ours), growth(keras.optimizers.Adam))

    def test_under_xla_it_is_a_branch_as_any_other(self):
        _, function = _micro_step("default", "xla")
        self.assertGreater(_inputs_of_branches(function)[0], 3 * VARIABLES)
        self.assertNotIn("Unpack", _types(function))

    def test_on_a_tpu_too(self):
        strategy = tpu_stand_in.strategy(2)
        with strategy.scope():
            model = training.network(
                keras_accum.AccumulationOptimizer(keras.optimizers.Adam(), 4)
            )
            model.optimizer.build(model.trainable_variables)

        def on_replica(x, y):
            model.train_step((x, y))

        @tf.function(autograph=False)
        def step(x, y):
            strategy.run(on_replica, args=(x, y))

        function = step.get_concrete_function(tf.zeros((1, 6)), tf.zeros((1, 1)))
        self.assertNotIn("Unpack", _types(function))

    def test_in_eager_there_is_no_graph(self):
        self.assertFalse(packed_branch._is_worth_while())


class ReplicasTest(parameterized.TestCase):
    @parameterized.parameters("default", "mirrored")
    def test_slow_gradients_that_differ(self, strategy):
        shapes = [(3,)] * 6
        values = [np.zeros(shape, "float32") for shape in shapes]

        class Slow(micro_steps.MicroSteps):
            def _on_every_replica(self, gradients, weight):
                gradients = [slow(gradient) for gradient in gradients]
                super()._on_every_replica(gradients, weight)

        def plain():
            return keras.optimizers.SGD(0.1, momentum=0.9)

        run = Slow(
            strategy,
            lambda: keras_accum.AccumulationOptimizer(
                plain(), 2, replica_reduction="mean"
            ),
            values,
        )
        steps = micro_steps.random_gradients(shapes, strategy, 20)
        for step in steps:
            run(step)
        means = [
            micro_steps.combined(window, shapes, replica_reduction="mean")
            for window in micro_steps.in_windows(steps, 2)
        ]
        expected, _ = micro_steps.plainly(plain(), values, means)
        for one, other in zip(run.values, expected, strict=True):
            np.testing.assert_allclose(
                one, training.numbers(other), rtol=1e-5, atol=1e-6
            )
