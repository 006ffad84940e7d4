"""Google's TPU compiler, run ahead of time, on a machine without a TPU.

libtpu compiles for a described topology: JAX has an interface for it. It is started in
a process of its own, since libtpu and TensorFlow do not share one.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

TOPOLOGY = "v5e:2x4"  # eight cores
NUM_REPLICAS = 8
TIME_LIMIT_S = 300

# No server is asked what TPU there is, and none is looked for.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def compiled(stablehlo: str) -> str:
    """The TPU program, as HLO text, of a replica's program in StableHLO.

    Raises:
        AssertionError: The compiler refused it; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "in"), pathlib.Path(folder, "out")
        source.write_text(stablehlo, encoding="utf-8")
        finished = subprocess.run(  # which kills it when the time is over
            [sys.executable, __file__, str(source), str(target)],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env=os.environ | ENVIRONMENT,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        return target.read_text(encoding="utf-8")


def main(source: str, target: str) -> None:
    """In the process of its own."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    text = pathlib.Path(source).read_text(encoding="utf-8")
    # A copy that TensorFlow puts before a conditional; JAX has no such operation.
    text = text.replace("mhlo.copy", "stablehlo.optimization_barrier")
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    options = xla_client.CompileOptions()
    options.num_replicas = NUM_REPLICAS
    options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(NUM_REPLICAS).reshape(NUM_REPLICAS, 1)
    )
    devices = _jax.DeviceList(tuple(topology.devices))
    executable = topology.devices[0].client.compile(module, devices, options)
    (program,) = executable.hlo_modules()
    pathlib.Path(target).write_text(program.to_string(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
