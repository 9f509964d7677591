"""Compiles TPU programs for one chip, a line of JSON in and a line of JSON out, in a process of its own.

libtpu reads its settings when it starts and may end the whole process, so tpu.py runs this as
`python -m pallas_kernels.aot.tpu_worker TARGET DUMP_FOLDER` in an environment that it prepares.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.bundles import Schedule, read_dumps
from pallas_kernels.aot.program import Program
from pallas_kernels.aot.registry import KERNELS
from pallas_kernels.aot.roofline import count_cycles, estimate, find_trips
from pallas_kernels.aot.targets import TPU_TARGETS, TpuTarget

_KERNEL_CALL = re.compile(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"[^\n]*')
_VMEM_USED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')
_OTHER_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def main() -> None:
    """Answers each request on standard input until it ends."""
    target, dumps = TPU_TARGETS[sys.argv[1]], Path(sys.argv[2])
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
        mesh = Mesh(np.array([device]), ("device",))
        for line in sys.stdin:
            request = json.loads(line)
            print(
                json.dumps(_answer(request["kernel"], request["shape"], target, mesh, dumps)), file=answers, flush=True
            )


def _answer(kernel: str, shape: str, target: TpuTarget, mesh: Mesh, dumps: Path) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        shutil.rmtree(dumps, ignore_errors=True)
        dumps.mkdir()
        program = KERNELS[kernel].build(shape, target)
        compiled = _compile(program, mesh)
    except Exception as error:  # whatever JAX or Mosaic refuse is the row's answer
        lines = str(error).strip().splitlines() or [""]
        return {"compiled": False, "reason": f"{type(error).__name__}: {lines[0]}", "seconds": _since(start)}
    seconds = _since(start)
    return {"compiled": True, "reason": None, "seconds": seconds, "figures": _figures(program, compiled, target, dumps)}


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _compile(program: Program, mesh: Mesh) -> str:
    """Runs XLA and Mosaic for the chip; returns the optimised HLO."""
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), program.arguments
    )
    # The abstract mesh tells Pallas which chip it is for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(program.function, donate_argnums=program.donated, out_shardings=sharding)
        return jitted.lower(*arguments).compile().as_text()


def _figures(program: Program, hlo: str, target: TpuTarget, dumps: Path) -> dict[str, Any]:
    calls = {match[1]: match[0] for match in _KERNEL_CALL.finditer(hlo)}
    schedules = [schedule for schedule in read_dumps(dumps) if schedule.name in calls]
    if not schedules:
        raise RuntimeError(f"libtpu dumped no program of {', '.join(calls) or 'any kernel'}")
    other_cycles = sum(int(cycles) for cycles in _OTHER_CYCLES.findall(hlo))
    cycles = {s.name: count_cycles(s, find_trips(s.name, program.trips)) for s in schedules}
    main = max(schedules, key=lambda schedule: cycles[schedule.name])
    times = estimate(sum(cycles.values()) + other_cycles, program.work, target)
    return {
        "vmem_bytes": max(_vmem_bytes(call) for call in calls.values()),
        **_loop_figures(main, program),
        "cycles": round(sum(cycles.values())),
        "other_cycles": other_cycles,
        "needed_bytes": program.work.needed_bytes,
        "moved_bytes": program.work.moved_bytes,
        "needed_flops": program.work.needed_flops,
        "compute_us": times.compute_s * 1e6,
        "memory_us": times.memory_s * 1e6,
        "estimated_us": times.total_s * 1e6,
        "roofline_share": times.roofline_share,
    }


def _vmem_bytes(call: str) -> int:
    used = _VMEM_USED.search(call)
    return int(used[1]) if used else 0


def _loop_figures(schedule: Schedule, program: Program) -> dict[str, Any]:
    path = schedule.main_path()
    inner, around = schedule.use(path[-1] if path else None), [schedule.use(loop) for loop in path[:-1]]
    trips = find_trips(schedule.name, program.trips)
    tokens = program.work.kv_tokens
    return {
        "main_kernel": schedule.name,
        "inner_bundles": inner.bundles,
        "inner_cycles": inner.cycles,
        "around_bundles": [use.bundles for use in around],
        "bundles_per_kv_token": inner.bundles * trips[-1] / tokens if tokens else None,
        "mxu_busy": inner.mxu_busy,
        "vpu_busy": inner.vpu_busy,
        "vector_spills": inner.vector_spills,
        "scalar_spills": inner.scalar_spills,
        "inner_dmas": inner.dmas,
    }


if __name__ == "__main__":
    main()
