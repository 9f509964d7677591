"""Figures of a program compiled for a GPU, for the table."""

from typing import Any

from pallas_kernels.aot.gpu import GpuKernel, compile_for_gpu
from pallas_kernels.aot.program import Program
from pallas_kernels.aot.roofline import estimate_gpu, find_trips
from pallas_kernels.aot.targets import GpuTarget


class RefusedError(Exception):
    """JAX, triton or ptxas doesn't compile the program."""


def compile_program(program: Program, target: GpuTarget) -> dict[str, Any]:
    """Compiles every kernel of a program; figures are those of the kernel that issues most.

    Raises:
      RefusedError: with the compiler's reason.
    """
    compilation = compile_for_gpu(program.function, program.arguments, target.name)
    if compilation.reason is not None:
        raise RefusedError(compilation.reason)
    issued = [_warp_instructions(kernel, program) for kernel in compilation.kernels]
    if not issued:
        raise RefusedError("the program holds no Triton kernel")
    main = compilation.kernels[issued.index(max(issued))]
    times = estimate_gpu(sum(issued), _num_programs(main), program.work, target)
    loop = main.sass.loop
    return {
        "shared_bytes": main.shared_bytes,
        "registers": main.sass.registers,
        "main_kernel": main.name,
        "num_warps": main.num_warps,
        "grid": list(main.grid),
        "inner_instructions": loop.instructions if loop else None,
        "inner_matrix": loop.matrix if loop else None,
        "spills": loop.spills if loop else 0,
        "spill_bytes": main.sass.spill_bytes,
        "moved_bytes": round(program.work.moved_bytes),
        "needed_bytes": round(program.work.needed_bytes),
        "needed_flops": round(program.work.needed_flops),
        **times.figures(),
    }


def _num_programs(kernel: GpuKernel) -> int:
    return kernel.grid[0] * kernel.grid[1] * kernel.grid[2]


def _warp_instructions(kernel: GpuKernel, program: Program) -> float:
    """Instructions of all warps: the main loop's as often as it runs, and all others once a program of the grid."""
    loop = kernel.sass.loop.instructions if kernel.sass.loop else 0
    runs = find_trips(kernel.name, program.trips).bodies[-1]
    return kernel.num_warps * (loop * runs + (kernel.sass.instructions - loop) * _num_programs(kernel))
