"""Claim g: how a micro step grows with variables, micro steps and replicas."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from benchmarks import measuring, peers, processes

VARIABLES = (10, 100, 500, 2000)
STEPS = (1, 2, 4, 8, 16, 32, 64)
REPLICAS = (1, 2, 4)


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each number of variables, of micro steps and of replicas."""
    yield from _variables(VARIABLES[:2] if quick else VARIABLES, quick)
    yield from _steps(quick)
    for replicas in (1,) if quick else REPLICAS:
        yield processes.measured("growth", str(replicas), f"{quick:d}")


def _variables(numbers: tuple[int, ...], quick: bool) -> Iterator[measuring.Record]:
    for number in numbers:
        step = peers.ours([(64,)] * number, "sgd", 8)
        for _ in range(6):  # two are made to warm up
            step()
        seconds = measuring.interleaved({"ours": step}, 3 if quick else 15, 8)["ours"]
        yield _record("variables", number, seconds)


def _steps(quick: bool) -> Iterator[measuring.Record]:
    """One traced step for all lengths: only the largest has to be constructed."""
    variables = [keras.Variable("zeros", shape=(64,)) for _ in range(100)]
    optimizer = keras_accum.AccumulationOptimizer(peers.OPTIMIZERS["sgd"](), max(STEPS))
    optimizer.build(variables)
    step = peers.step_of(optimizer, variables)
    step()
    optimizer.flush()
    for steps in STEPS:
        optimizer.accumulation_steps = steps
        optimizer.reset()
        rounds = 3 if quick else 10
        times = measuring.interleaved({"ours": step}, rounds, max(STEPS))["ours"]
        yield _record("accumulation_steps", steps, times)


def _record(what: str, number: int, seconds: np.ndarray) -> measuring.Record:
    return {
        "claim": "growth",
        "of": what,
        "number": number,
        "ms_per_micro_step": round(float(np.median(seconds.mean(axis=1))) * 1e3, 4),
    }


def _on_replicas(replicas: int, quick: bool) -> measuring.Record:
    """In a process of its own, which has so many logical CPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{i}" for i in range(replicas)]
    strategy: Any = tf.distribute.MirroredStrategy(names)
    with strategy.scope():
        variables = [keras.Variable("zeros", shape=(64,)) for _ in range(50)]
        optimizer = keras_accum.AccumulationOptimizer(peers.OPTIMIZERS["sgd"](), 8)
        optimizer.build(variables)
    gradients = [tf.ones((64,)) for _ in variables]

    @tf.function(autograph=False)
    def step() -> None:
        def on_replica() -> None:
            optimizer.apply([tf.identity(g) for g in gradients], variables)

        strategy.run(on_replica)

    for _ in range(6):  # two are made to warm up
        step()
    seconds = measuring.interleaved({"ours": step}, 3 if quick else 15, 8)["ours"]
    return _record("replicas", replicas, seconds)


if __name__ == "__main__":
    print(json.dumps(_on_replicas(int(sys.argv[1]), bool(int(sys.argv[2])))))
