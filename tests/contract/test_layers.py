"""Imports go down the layers only, and the engine does not know Keras."""

import ast

from absl.testing import absltest

from tests.contract import sources

ENGINE = (
    "platforms.tpu",
    "window",
    "known_variables",
    "replica_groups",
    "reduction",
    "packed_branch",
    "boundary",
    "accumulators",
)

# From the ground up. A module imports from the layers below its own, and from none
# that stand beside it. A new module is entered here: that is where it is decided what
# it may know.
LAYERS = (
    {"platforms.__init__"},
    {"platforms.tpu"},
    {
        "window",
        "known_variables",
        "replica_groups",
        "packed_branch",
        "already_reduced",
        "optional_imports",
        "part_of_variable",
    },
    {"boundary"},
    {"platforms.ipu"},
    {"reduction"},
    {
        "accumulators",
        "loss_scale",
        "nonfinite",
        "update_steps",
        "average_overwrite",
    },
    {
        "dynamic_loss_scale",
        "scheduled_loss_scale",
        "absent_gradients",
        "gradient_measurements",
        "window_view",
        "weight_decay",
    },
    {"arguments", "automatic_loss_scale", "inner_optimizer", "window_state"},
    {"micro_batch", "attachments"},
    {"accumulation_state"},
    {"optimizer"},
    {"mixin", "wrapper", "callbacks.accumulation_callback"},
    {"cross_replica", "verified_usage"},
    {"stateful_ops"},
    {"ops"},
    {"v1_methods"},
    {
        "cross_shard",
        "graphcore.graphcore_optimizer",
        "graphcore.reduction_method",
    },
    {"graphcore.accumulation", "graphcore.ipu_optimizer", "graphcore.map_gradient"},
    {"graphcore.__init__"},
    {"callbacks.rows", "callbacks.update_clock", "callbacks.history_plot"},
    {"callbacks.schedule"},
    {
        "callbacks.accumulation_monitor",
        "callbacks.accumulation_scheduler",
        "callbacks.gradient_noise_scale",
        "callbacks.loss_scale_scheduler",
        "callbacks.partial_window",
        "callbacks.pipelined_weight_decay",
        "callbacks.skip_seen_batches",
    },
    {"callbacks.__init__"},
    {"__init__"},
)


def _keras_imports(tree):
    roots = {name.split(".")[0] for name in sources.imported(tree)}
    return roots & {"keras", "tf_keras"}


class LayersTest(absltest.TestCase):
    def test_every_module_has_its_layer(self):
        layered = [module for layer in LAYERS for module in layer]
        self.assertCountEqual(layered, sources.trees())

    def test_imports_go_down(self):
        layer_of = {
            module: height for height, layer in enumerate(LAYERS) for module in layer
        }
        upwards = {
            (module, part)
            for module, tree in sources.trees().items()
            for part in sources.imported_parts(tree)
            if layer_of[part] >= layer_of[module]
        }
        self.assertEmpty(upwards)

    def test_imports_are_seen(self):
        seen = sources.imported_parts(
            ast.parse("from keras_accum import boundary\nimport keras_accum.window\n")
        )
        self.assertEqual(seen, {"boundary", "window"})
        self.assertIn("window", sources.imported_parts(sources.trees()["accumulators"]))

    def test_a_module_of_a_package_is_seen_as_itself(self):
        for statement, part in (
            ("from keras_accum import callbacks", "callbacks.__init__"),
            (
                "from keras_accum.callbacks import LossScaleScheduler",
                "callbacks.__init__",
            ),
            (
                "from keras_accum.callbacks.loss_scale_scheduler import COUNTS",
                "callbacks.loss_scale_scheduler",
            ),
            (
                "import keras_accum.callbacks.loss_scale_scheduler",
                "callbacks.loss_scale_scheduler",
            ),
        ):
            self.assertEqual(sources.imported_parts(ast.parse(statement)), {part})

    def test_the_engine_does_not_know_which_keras_it_serves(self):
        for module in ENGINE:
            tree = sources.trees()[module]
            self.assertEmpty(_keras_imports(tree), module)
            self.assertLessEqual(sources.imported_parts(tree), set(ENGINE), module)
        self.assertEqual(_keras_imports(ast.parse("import keras.saving")), {"keras"})

    def test_nothing_is_imported_inside_a_function(self):
        for module, tree in sources.trees().items():
            for function in ast.walk(tree):
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    name = f"{module}.{function.name}"
                    self.assertEmpty(sources.imported(function), name)
