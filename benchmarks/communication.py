"""Claim c: one reduction per window, on two replicas and on two worker processes.

Against reducing in every micro step: what travels, by the graph, and the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_accum
from benchmarks import measuring
from tests import graph_walk

STEPS = 8
TIME_LIMIT_S = 240
SHAPES = [(256, 1024)] * 8  # two million parameters
WAYS = ("micro_step", "window")


def run(quick: bool) -> Iterator[measuring.Record]:
    """One record for each place and way."""
    yield from _on("mirrored", quick)
    yield from _on("workers", quick)


def _on(place: str, quick: bool) -> Iterator[measuring.Record]:
    """Starts the process, or the two of them, and reads what the first one found."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    processes = []
    try:
        for index in range(2 if place == "workers" else 1):
            environment = dict(os.environ)
            environment.pop("TF_CONFIG", None)
            if place == "workers":
                task = {"type": "worker", "index": index}
                cluster = {"cluster": {"worker": addresses}, "task": task}
                environment["TF_CONFIG"] = json.dumps(cluster)
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.communication", f"{quick:d}"],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        printed, _ = processes[0].communicate(timeout=TIME_LIMIT_S)
        for process in processes[1:]:
            process.wait(timeout=TIME_LIMIT_S)
        failed = [p.returncode for p in processes if p.returncode]
    finally:
        for process in processes:
            process.kill()
    if failed:
        raise RuntimeError(
            f"A process of {place!r} failed, and says why above. Exit codes: {failed}."
        )
    yield from json.loads(printed.splitlines()[-1])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # open together, so that none comes twice
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _micro_step(strategy: tf.distribute.Strategy, way: str) -> Any:
    with strategy.scope():
        variables = [keras.Variable("zeros", shape=shape) for shape in SHAPES]
        optimizer = keras_accum.AccumulationOptimizer(
            keras.optimizers.SGD(0.01), STEPS, reduce_every=way
        )
        optimizer.build(variables)
    gradients = [tf.constant(np.full(shape, 0.5, "float32")) for shape in SHAPES]

    @tf.function(autograph=False)
    def step() -> None:
        def on_replica() -> None:
            own = [tf.identity(gradient) for gradient in gradients]
            optimizer.apply(own, variables)

        strategy.run(on_replica)

    return step


def _collectives(function: Any) -> int:
    """Those that a window has: of each micro step, and of its boundary."""
    return sum(
        number * (1 if branches else STEPS)
        for (_, branches), number in graph_walk.collectives(function).items()
    )


def _measure(quick: bool) -> list[measuring.Record]:
    """In a process of its own: both ways, in rounds."""
    is_worker = "TF_CONFIG" in os.environ
    if is_worker:
        strategy: Any = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    local_replicas = len(strategy.extended.worker_devices)
    steps = {way: _micro_step(strategy, way) for way in WAYS}
    for step in steps.values():
        for _ in range(STEPS - 2):  # two are made to warm up
            step()
    seconds = measuring.interleaved(steps, 3 if quick else 12, STEPS)
    time.sleep(0.5)  # the other worker ends its last step
    windows = {way: times.mean(axis=1) for way, times in seconds.items()}
    # One collective sums all gradients of a micro step.
    megabytes = 4 * sum(int(np.prod(shape)) for shape in SHAPES) / 2**20
    records = []
    for way, numbers in measuring.summary(windows, "micro_step").items():
        collectives = _collectives(steps[way].get_concrete_function())
        per_window = collectives // local_replicas
        records.append(
            {
                "claim": "communication",
                "place": "two workers" if is_worker else "two replicas",
                "reduce_every": way,
                "collectives_per_window": per_window,
                "megabytes_per_window": round(per_window * megabytes, 1),
                **numbers,
            }
        )
    return records


if __name__ == "__main__":
    print(json.dumps(_measure(bool(int(sys.argv[1])))))
