"""Claim e: what accumulation adds to forward and backward of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from benchmarks import measuring, models, peers

STEPS = 8
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def ours(
    plain: Callable[..., keras.optimizers.Optimizer],
) -> keras.optimizers.Optimizer:
    """The optimizer, accumulating."""
    return keras_accum.AccumulationOptimizer(plain(), STEPS)


def builtin(
    plain: Callable[..., keras.optimizers.Optimizer],
) -> keras.optimizers.Optimizer:
    """Keras's own."""
    return plain(gradient_accumulation_steps=STEPS)


WAYS = {"keras": builtin, "keras_accum": ours}


def step_of(model: keras.Model, batch: models.Batch, optimizer: Any) -> peers.MicroStep:
    """A compiled micro step of a model; without an optimizer its gradients only."""
    inputs, targets = (tf.constant(each) for each in batch)
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def step() -> object:
        with tf.GradientTape() as tape:
            loss = LOSS(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, variables)
        if optimizer is None:  # all of them are computed, and none is used
            return [tf.identity(tf.convert_to_tensor(g)) for g in gradients]
        optimizer.apply(gradients, variables)
        return loss

    return step


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each model and contender."""
    for name, make in models.MODELS.items():
        contenders = {}
        for way, optimizer in {"forward and backward": None, **WAYS}.items():
            keras.utils.set_random_seed(0)
            model, batch = make(quick)
            wrapped = optimizer(peers.OPTIMIZERS["adam"]) if optimizer else None
            if wrapped is not None:
                wrapped.build(model.trainable_variables)
            contenders[way] = step_of(model, batch, wrapped)
        for step in contenders.values():
            for _ in range(STEPS - 2):  # two are made to warm up
                step()
        rounds = 3 if quick else 16
        # In turns by micro steps: what disturbs one, disturbs its neighbours as well.
        seconds = {
            way: times.reshape(rounds, STEPS)
            for way, times in measuring.interleaved(contenders, rounds * STEPS).items()
        }
        alone_off = seconds["forward and backward"][:, :-1]
        for way, times in seconds.items():
            off = times[:, :-1]
            yield {
                "claim": "end_to_end",
                "model": name,
                "parameters": int(model.count_params()),
                "contender": way,
                "ms_off_the_boundary": round(float(np.median(off)) * 1e3, 3),
                "percent_added": round(
                    100 * (float(np.median(off / alone_off)) - 1), 2
                ),
                "ms_per_micro_step_of_a_window": round(
                    float(np.median(times.mean(axis=1))) * 1e3, 3
                ),
            }
