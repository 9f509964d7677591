"""Compiles a program for a TPU that isn't there and reads the figures of its kernels.

Works in a process whose environment workers.py prepared: libtpu is told there what to dump and to look for no TPU.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.bundles import Schedule, read_dumps
from pallas_kernels.aot.hlo import count_other_cycles, find_kernel_calls
from pallas_kernels.aot.program import Program, Trips
from pallas_kernels.aot.roofline import count_cycles, estimate, find_main_loop, find_trips
from pallas_kernels.aot.targets import TpuTarget

_VMEM_USED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')


class TpuCompiler:
    """XLA:TPU and Mosaic for one TensorCore."""

    def __init__(self, target: TpuTarget, dumps: Path) -> None:
        """Args: the chip, and the folder that libtpu was told to dump to."""
        device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
        self._target = target
        self._dumps = dumps
        self._mesh = Mesh(np.array([device]), ("device",))

    def compile(self, program: Program) -> dict[str, Any]:
        """Returns the figures. What JAX, Mosaic or XLA raise goes through."""
        shutil.rmtree(self._dumps, ignore_errors=True)
        self._dumps.mkdir()
        return _figures(program, self._optimized_hlo(program), self._target, read_dumps(self._dumps))

    def _optimized_hlo(self, program: Program) -> str:
        sharding = NamedSharding(self._mesh, PartitionSpec())
        arguments = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), program.arguments
        )
        # The abstract mesh tells Pallas which chip it is for.
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            jitted = jax.jit(program.function, donate_argnums=program.donated, out_shardings=sharding, keep_unused=True)
            hlo = jitted.lower(*arguments).compile().as_text()
        assert hlo is not None
        return hlo


def _figures(program: Program, hlo: str, target: TpuTarget, dumped: list[Schedule]) -> dict[str, Any]:
    calls = find_kernel_calls(hlo)
    schedules = [schedule for schedule in dumped if schedule.name in calls]
    if not schedules:
        raise RuntimeError(f"libtpu dumped no program of {', '.join(calls) or 'any kernel'}")
    cycles = {s.name: count_cycles(s, find_trips(s.name, program.trips)) for s in schedules}
    other = count_other_cycles(hlo, _step_parameters(program))
    times = estimate(sum(cycles.values()) + other.layer, program.work, target)
    main = max(schedules, key=lambda schedule: cycles[schedule.name])
    return {
        "vmem_bytes": max(_vmem_bytes(call) for call in calls.values()),
        "main_kernel": main.name,
        **_loop_figures(main, find_trips(main.name, program.trips), program.work.kv_tokens),
        "kernel_cycles": round(sum(cycles.values())),
        "other_cycles": other.layer,
        "once_a_step_cycles": other.step,
        "moved_bytes": round(program.work.moved_bytes),
        "needed_bytes": round(program.work.needed_bytes),
        "needed_flops": round(program.work.needed_flops),
        **times.figures(),
    }


def _step_parameters(program: Program) -> set[int]:
    """Numbers of the parameters that are the same in every layer: arguments flattened."""
    sizes = [len(jax.tree.leaves(argument)) for argument in program.arguments]
    return {sum(sizes[:position]) + leaf for position in program.step_arguments for leaf in range(sizes[position])}


def _vmem_bytes(call: str) -> int:
    used = _VMEM_USED.search(call)
    return int(used[1]) if used else 0


def _loop_figures(schedule: Schedule, trips: Trips, kv_tokens: int) -> dict[str, Any]:
    path, runs = find_main_loop(schedule, trips)
    inner, num_runs = schedule.use(path[-1] if path else None), runs[-1] if runs else 1
    return {
        "inner_bundles": inner.bundles,
        "inner_cycles": inner.cycles,
        "around_bundles": [schedule.use(loop).bundles for loop in path[:-1]],
        "bundles_per_kv_token": round(inner.bundles * num_runs / kv_tokens, 3) if kv_tokens else None,
        "mxu_busy": round(inner.mxu_busy, 3),
        "vpu_busy": round(inner.vpu_busy, 3),
        "spills": inner.vector_spills,
        "scalar_spills": inner.scalar_spills,
    }
