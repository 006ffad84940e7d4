"""Compiled ahead of time by libtpu for eight cores. Run with `make test-tpu-aot`."""

import keras
import pytest
from absl.testing import parameterized

import keras_accum
from tests.platforms import test_tpu_lowered, tpu_ahead_of_time, tpu_lowering
from tests.platforms import tpu_evidence as evidence

STEPS = 4


class AccumulatingAdamW(keras_accum.AccumulationMixin, keras.optimizers.AdamW):
    """The mixin over the optimizer that the wrapper wraps."""


def _optimizer(surface, **options):
    adamw = {"learning_rate": 1e-3, "weight_decay": 0.01}
    if surface == "mixin":
        return AccumulatingAdamW(**adamw, accumulation_steps=STEPS, **options)
    inner = keras.optimizers.AdamW(**adamw)
    return keras_accum.AccumulationOptimizer(inner, STEPS, **options)


@pytest.mark.tpu_aot
class AheadOfTimeTest(parameterized.TestCase):
    @parameterized.product(
        surface=["wrapper", "mixin"],
        options=[{}, {"loss_scale": "dynamic", "on_nonfinite": "skip_micro_batch"}],
    )
    def test_one_combined_all_reduce_in_the_conditional(self, surface, options):
        text = test_tpu_lowered.lowered(
            tpu_ahead_of_time.NUM_REPLICAS,
            lambda: _optimizer(surface, **options),
            test_tpu_lowered.whole_model,
            stage="stablehlo",
        )
        program = tpu_ahead_of_time.compiled(text)
        evidence.assert_static(program)
        places = tpu_lowering.Hlo(program).placed("all-reduce")
        self.assertLen(places, 1, places)
        self.assertIn("conditional", places[0])
