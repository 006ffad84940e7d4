"""The published numbers of weight decay, at the boundary of hand-made windows."""

import keras
import numpy as np
from absl.testing import parameterized

import keras_accum
from tests import micro_steps


class WeightDecayVectorsTest(parameterized.TestCase):
    @parameterized.product(place=micro_steps.PLACES, steps=[1, 3])
    def test_vector_17_decays_once(self, place, steps):
        def optimizer():
            sgd = keras.optimizers.SGD(1.0)
            return keras_accum.AccumulationOptimizer(
                sgd, steps, replica_reduction="mean", loss_scale=8.0
            )

        value = [np.float32(2.0)]
        run = micro_steps.MicroSteps(place[0], optimizer, value, place[1])
        run.optimizer.decay_weights(0.1, decoupled=False)
        for _ in range(steps):  # a true gradient of 1 on every worker
            run([np.full(micro_steps.num_replicas(place[0]), 8.0, "float32")])
        np.testing.assert_allclose(run.values[0], 2 - 1.2, rtol=1e-6)

    @parameterized.parameters(*micro_steps.PLACES)
    def test_vector_51_a_rate_that_is_set_counts_without_a_retrace(self, *place):
        run = micro_steps.MicroSteps(
            place[0],
            lambda: keras_accum.AccumulationOptimizer(keras.optimizers.SGD(0.1), 2),
            [np.float32(1.0)],
            place[1],
        )
        run.optimizer.decay_weights(0.5)
        zeros = [np.zeros(micro_steps.num_replicas(place[0]), "float32")]
        traces, values = [], []
        for _ in range(3):
            run(zeros)
            run(zeros)
            traces.append(run.num_traces)
            values.append(float(run.values[0]))
            run.optimizer.pipelined_weight_decay = 0.0
        np.testing.assert_allclose(values, [0.95] * 3, rtol=1e-6)
        if place[1] != "eager":
            self.assertEqual(traces[2], traces[0])
