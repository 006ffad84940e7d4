"""The one private name of Keras that the package uses: where it is, and no other."""

import ast

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import keras_accum
from tests import registry
from tests.contract import sources
from tests.contract.test_layers import ENGINE

THE_NAME = "_all_reduce_sum_gradients"


def _is_private(name):
    return name.startswith("_") and not name.endswith("__") and name.isidentifier()


def _private_names(tree, own_objects=False):
    """Every private name that is read, set, defined or spelled in a string.

    Args:
        tree: The syntax tree.
        own_objects: Whether `self` is never an object of Keras, so that its names are
            the package's own.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not (own_objects and is_self):
                names.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if _is_private(name)}


def _names_of_keras():
    """The private names of what the package inherits from, wraps or holds."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    optimizer.build([keras.Variable(1.0)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    objects = [optimizer, scaled, layer, layer.kernel]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        objects.append(keras.optimizers.MultiOptimizer(lambda _: optimizer))
    names = {name for each in objects for name in (*dir(each), *vars(each))}
    return {name for name in names if _is_private(name)}


class PrivateNameTest(absltest.TestCase):
    def test_it_exists(self):
        self.assertTrue(callable(getattr(keras.optimizers.Optimizer, THE_NAME)))

    def test_it_is_the_sum_over_replicas(self):
        strategy = registry.mirrored()
        with strategy.scope():
            variable = keras.Variable(0.0)
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def reduce():
            context = tf.distribute.get_replica_context()
            own = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            return getattr(optimizer, THE_NAME)([(own, variable)])[0][0]

        results = strategy.experimental_local_results(strategy.run(reduce))
        replicas = range(strategy.num_replicas_in_sync)
        self.assertEqual(
            {float(each) for each in results}, {sum(replicas) + len(replicas)}
        )

    def test_the_base_of_keras_calls_it_once_for_each_update(self):
        calls = []

        class Probe(keras.optimizers.SGD):
            pass

        def record(self, grads_and_vars):
            pairs = list(grads_and_vars)
            calls.append(len(pairs))
            return [(2 * gradient, variable) for gradient, variable in pairs]

        setattr(Probe, THE_NAME, record)
        variables = [keras.Variable(0.0), keras.Variable(0.0)]
        optimizer = Probe(1.0)
        for _ in range(3):
            optimizer.apply_gradients([(tf.constant(1.0), v) for v in variables])
        self.assertEqual(calls, [2, 2, 2])
        # What it returns is what is applied.
        np.testing.assert_array_equal([v.numpy() for v in variables], [-6, -6])

    def test_the_wrapper_switches_it_off_and_on_again(self):
        calls = []

        class Probe(keras.optimizers.SGD):
            pass

        def record(self, grads_and_vars):
            calls.append(self)
            return list(grads_and_vars)

        setattr(Probe, THE_NAME, record)
        variable = keras.Variable(0.0)
        inner = Probe(1.0)
        optimizer = keras_accum.AccumulationOptimizer(inner, 2)
        for _ in range(4):
            optimizer.apply_gradients([(tf.constant(1.0), variable)])
        self.assertEqual(float(variable.numpy()), -2)
        self.assertEmpty(calls)
        inner.apply_gradients([(tf.constant(1.0), variable)])
        self.assertEqual(calls, [inner])

    def test_no_other_private_name_of_keras_is_used(self):
        of_keras = _names_of_keras()
        used = {
            (module, name)
            for module, tree in sources.trees().items()
            for name in _private_names(tree, module in ENGINE) & of_keras
        }
        # How TensorFlow's files ask; Keras's variables answer to it as well.
        of_tensorflow = {
            ("part_of_variable", "_serialize_to_tensors"),
            ("part_of_variable", "_restore_from_tensors"),
            ("part_of_variable", "_trackable_children"),
            ("part_of_variable", "_deserialization_dependencies"),
            ("part_of_variable", "_export_to_saved_model_graph"),
        }
        self.assertEqual(used, {("already_reduced", THE_NAME), *of_tensorflow})

    def test_the_search_finds_what_it_looks_for(self):
        of_keras = _names_of_keras()
        for source in (
            "optimizer._trainable_variables",
            "setattr(optimizer, '_iterations', 0)",
            "class A:\n    def _backend_apply_gradients(self): pass",
            "layer._losses = []",
        ):
            self.assertNotEmpty(_private_names(ast.parse(source)) & of_keras, source)

    def test_no_private_module_of_keras_is_imported(self):
        for module, tree in sources.trees().items():
            for name in sources.imported(tree):
                self.assertFalse(name.startswith("keras.src"), f"{module}: {name}")
                root, *parts = name.split(".")
                if root in ("keras", "tensorflow"):
                    self.assertFalse(any(map(_is_private, parts)), f"{module}: {name}")
