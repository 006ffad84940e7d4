"""Lowered by XLA: static shapes, and the all-reduce in the conditional only."""

import keras
from absl.testing import parameterized

from tests import training
from tests.platforms import tpu_evidence as evidence
from tests.platforms import tpu_lowering, tpu_stand_in

STEPS = 3


def whole_model(optimizer):
    """A model whose layers have statistics and randomness of their own."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((training.FEATURES,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def lowered(num_replicas, optimizer, network=training.network, stage="hlo"):
    """The text of Keras's train step for 4 rows on each replica."""
    strategy = tpu_stand_in.strategy(num_replicas)
    with strategy.scope():
        model = network(optimizer())
        model.optimizer.build(model.trainable_variables)
    program, inputs = evidence.train_step(strategy, model, rows=4)
    return tpu_lowering.lowered(program, num_replicas, inputs, stage)


class LoweredTest(parameterized.TestCase):
    @parameterized.product(num_replicas=[2, 8], surface=["wrapper", "mixin"])
    def test_the_all_reduce_is_in_the_conditional(self, num_replicas, surface):
        text = lowered(num_replicas, lambda: evidence.accumulating(surface, STEPS))
        evidence.assert_static(text)
        evidence.assert_lowers_into_the_boundary(text)
        found = tpu_lowering.Hlo(text).placed("all-reduce")
        # All gradients, which share a variable, and the weight.
        self.assertLen(found, 2)
        groups = ",".join(str(replica) for replica in range(num_replicas))
        self.assertEqual(text.count(f"replica_groups={{{{{groups}}}}}"), len(found))

    @parameterized.parameters(
        {"on_nonfinite": "skip_micro_batch"},
        {"loss_scale": "dynamic"},
        {"micro_reduction": "running_mean"},
        {"plain": {"global_clipnorm": 1.0, "use_ema": True, "weight_decay": 0.1}},
    )
    def test_of_options(self, **options):
        text = lowered(2, lambda: evidence.accumulating("wrapper", STEPS, **options))
        evidence.assert_static(text)
        evidence.assert_lowers_into_the_boundary(text)
