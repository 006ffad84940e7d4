"""GradientAccumulator of PyPI, in the environment of its own that it needs.

It wraps optimizers of legacy Keras. So it is measured in a process of its own, beside
the floor, which is measured in both: by the floor the numbers can be compared.
"""

import json
import os
import sys
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras
from gradient_accumulator import GradientAccumulateOptimizer

STEPS = 8
SETS = {
    "600 of 64": [(64,)] * 600,
    "300 of 64x64": [(64, 64)] * 300,
    "12 of 2048x2048": [(2048, 2048)] * 12,
}
QUICK = {"600 of 64": 60, "300 of 64x64": 30, "12 of 2048x2048": 2}


def _measured(shapes: list, quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per micro step of each round: of the floor, and of the peer."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    gradients = [tf.constant(np.full(shape, 0.5, "float32")) for shape in shapes]
    optimizer = GradientAccumulateOptimizer(
        optimizer=tf_keras.optimizers.legacy.Adam(1e-3), accum_steps=STEPS
    )
    total = tf.Variable(tf.zeros(sum(int(np.prod(shape)) for shape in shapes)))
    ones = tf.ones_like(total)

    @tf.function(autograph=False)
    def step() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function(autograph=False)
    def floor() -> None:
        total.assign_add(ones)

    seconds: dict[str, list[float]] = {"floor": [], "step": []}
    for k in range(5 if quick else 14):
        for name, call in (("floor", floor), ("step", step)):
            begin = time.perf_counter()
            for _ in range(STEPS):
                call()
            if k > 1:  # two rounds to warm up
                seconds[name].append((time.perf_counter() - begin) / STEPS)
    return np.asarray(seconds["floor"]), np.asarray(seconds["step"])


def main(quick: bool) -> None:
    """Prints one record for each set."""
    for which, shapes in SETS.items():
        own = shapes[: QUICK[which] if quick else None]
        floors, steps = _measured(own, quick)
        record = {
            "claim": "window",
            "set": which,
            "variables": len(own),
            "optimizer": "adam",
            "contender": "GradientAccumulator",
            "ms": round(float(np.median(steps)) * 1e3, 4),
            "times_floor": round(float(np.median(steps / floors)), 3),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv)
