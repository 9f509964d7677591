"""Compiles Pallas-Triton kernels for NVIDIA GPUs on a machine that has none.

JAX lowers a program for CUDA anywhere; each kernel's Triton IR lies in the program as bytecode. triton's wheel turns
that into PTX and machine code for a chosen architecture. XLA does the same on a machine with a GPU, with its own copy
of triton, so figures may differ a little there. Knows no particular kernel.
"""

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from pallas_kernels.aot.sass import Sass, read_cubin

# Target: compute capability, a device of that kind and its number of multiprocessors.
_DEVICES = {
    "sm_80": (80, "NVIDIA A100-SXM4-80GB", 108),
    "sm_90": (90, "NVIDIA H100 80GB HBM3", 132),
    "sm_100": (100, "NVIDIA B200", 148),
}
TARGETS = tuple(_DEVICES)
_CALL_TARGET = "__gpu$xla.gpu.triton"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuKernel:
    """One kernel compiled for one target."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    seconds: float  # to compile, lowering not included
    shared_bytes: int  # shared memory of one program of the grid
    sass: Sass


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCompilation:
    """All kernels of one program for one target, or the reason why there are none."""

    target: str
    seconds: float  # lowering included
    kernels: tuple[GpuKernel, ...] = ()
    reason: str | None = None  # why it didn't compile

    @property
    def is_compiled(self) -> bool:
        return self.reason is None


class _Lowered(NamedTuple):
    name: str
    triton_ir: bytes  # MLIR bytecode
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int


def compile_for_gpu(function: Callable[..., Any], arguments: Sequence[Any], target: str) -> GpuCompilation:
    """Compiles every Pallas-Triton kernel of a program.

    Args:
      function: The program; jitted or to be jitted here.
      arguments: Its arguments, jax.ShapeDtypeStruct trees.
      target: One of TARGETS.

    Returns:
      The figures of each kernel in program order. What JAX, triton or ptxas refuse becomes a reason, not an exception.

    Raises:
      ValueError: for a target that isn't known.
    """
    if target not in _DEVICES:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    start = time.perf_counter()
    try:
        kernels = tuple(_compile(kernel, target) for kernel in _lower(function, arguments, target))
    except Exception as error:  # whatever the compilers raise is the row's answer
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return GpuCompilation(target=target, seconds=time.perf_counter() - start, reason=reason)
    return GpuCompilation(target=target, seconds=time.perf_counter() - start, kernels=kernels)


def _lower(function: Callable[..., Any], arguments: Sequence[Any], target: str) -> list[_Lowered]:
    jitted = jax.jit(function)
    with warnings.catch_warnings(), _abstract_device(target):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    return [_read_call(call) for call in _triton_calls(module.operation)]


def _abstract_device(target: str) -> AbstractContextManager[Any]:
    """Tells JAX from 0.11 on which device to lower for; before that it has no say and takes capability 9.0."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    _, kind, num_cores = _DEVICES[target]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=num_cores, platform="cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _triton_calls(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                name = inner.operation.name
                if name == "stablehlo.custom_call" and _text(inner.attributes["call_target_name"]) == _CALL_TARGET:
                    yield inner.operation
                yield from _triton_calls(inner.operation)


def _read_call(call: ir.Operation) -> _Lowered:
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])

    def number(key: str) -> int:
        return ir.IntegerAttr(config[key]).value

    return _Lowered(
        name=_text(config["name"]),
        triton_ir=ir.StringAttr(config["ir"]).value_bytes,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
    )


def _text(attribute: ir.Attribute) -> str:
    return ir.StringAttr(attribute).value


def _compile(kernel: _Lowered, target: str) -> GpuKernel:
    import triton  # a development dependency; the kernels themselves don't need it
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    capability = _DEVICES[target][0]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # so that nothing is taken from an earlier run
        path = Path(folder) / "kernel.ttir"
        path.write_text(_as_text(kernel.triton_ir))
        compiled = triton.compile(str(path), target=GPUTarget("cuda", capability, 32), options=options)
        cubin = compiled.asm["cubin"]
    return GpuKernel(
        name=kernel.name,
        grid=kernel.grid,
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        seconds=time.perf_counter() - start,
        shared_bytes=compiled.metadata.shared,
        sass=read_cubin(cubin),
    )


def _as_text(bytecode: bytes) -> str:
    context = ir.Context()
    triton_dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(bytecode))
