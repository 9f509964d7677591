"""The chips that kernels are compiled for and what they can do, one TensorCore or one GPU at a time."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTarget:
    """One TensorCore of a TPU. v5p and tpu7x have two a chip, each with half of the chip's bandwidth."""

    name: str
    topology: str  # the smallest one that libtpu describes without more settings
    hbm_bytes_per_s: float
    bf16_flops: float  # a second
    int8_ops: float  # a second; 0: no int8 matrix unit
    mxu_flops_per_cycle: int  # bf16, all matrix units
    mxu_width: int  # rows and columns of a matrix unit: a narrower product takes as long
    vmem_bytes: int
    smem_bytes: int = 1 << 20

    @property
    def clock_hz(self) -> float:
        """What the matrix rate implies."""
        return self.bf16_flops / self.mxu_flops_per_cycle


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """A GPU of a compute capability, the one that most people run."""

    name: str
    device: str
    hbm_bytes_per_s: float
    bf16_flops: float  # a second, dense
    int8_ops: float
    num_multiprocessors: int
    clock_hz: float


_MIB = 1 << 20
# Four 128 x 128 matrix units of one row a cycle; later two of 256 x 256 with two rows a cycle.
_MXU_128 = 4 * 128 * 128 * 2
_MXU_256 = 2 * 256 * 256 * 2 * 2

TPU_TARGETS = {
    target.name: target
    for target in (
        TpuTarget(
            name="v5e",
            topology="v5e:2x2",
            hbm_bytes_per_s=0.82e12,
            bf16_flops=197e12,
            int8_ops=394e12,
            mxu_flops_per_cycle=_MXU_128,
            mxu_width=128,
            vmem_bytes=128 * _MIB,
        ),
        TpuTarget(
            name="v5p",
            topology="v5p:2x2x1",
            hbm_bytes_per_s=1.23e12,
            bf16_flops=229.5e12,
            int8_ops=459e12,
            mxu_flops_per_cycle=_MXU_128,
            mxu_width=128,
            vmem_bytes=64 * _MIB,
        ),
        TpuTarget(
            name="v6e",
            topology="v6e:2x2",
            hbm_bytes_per_s=1.64e12,
            bf16_flops=920e12,
            int8_ops=1840e12,
            mxu_flops_per_cycle=_MXU_256,
            mxu_width=256,
            vmem_bytes=128 * _MIB,
        ),
        TpuTarget(
            name="tpu7x",
            topology="tpu7x:2x2x1",
            hbm_bytes_per_s=3.7e12,
            bf16_flops=1155e12,
            int8_ops=0,
            mxu_flops_per_cycle=_MXU_256,
            mxu_width=256,
            vmem_bytes=64 * _MIB,
        ),
    )
}
GPU_TARGETS = {
    target.name: target
    for target in (
        GpuTarget(
            name="sm_80",
            device="A100-SXM4-80GB",
            hbm_bytes_per_s=2.039e12,
            bf16_flops=312e12,
            int8_ops=624e12,
            num_multiprocessors=108,
            clock_hz=1.41e9,
        ),
        GpuTarget(
            name="sm_90",
            device="H100 SXM",
            hbm_bytes_per_s=3.35e12,
            bf16_flops=989e12,
            int8_ops=1979e12,
            num_multiprocessors=132,
            clock_hz=1.83e9,
        ),
        GpuTarget(
            name="sm_100",
            device="B200",
            hbm_bytes_per_s=8.0e12,
            bf16_flops=2250e12,
            int8_ops=4500e12,
            num_multiprocessors=148,
            clock_hz=1.85e9,
        ),
    )
}
TARGETS: dict[str, TpuTarget | GpuTarget] = {**TPU_TARGETS, **GPU_TARGETS}


def parse_targets(text: str) -> list[str]:
    """Reads names with commas between them.

    Raises:
      argparse.ArgumentTypeError: for a name that is no target.
    """
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(TARGETS)}, got {unknown[0]!r}")
    return names


def missing_packages(targets: Sequence[str]) -> str:
    """Names the compilers that aren't installed; empty if all are."""
    needed = {"libtpu": list(TPU_TARGETS), "triton": list(GPU_TARGETS)}
    used = [package for package, names in needed.items() if any(target in names for target in targets)]
    return " and ".join(package for package in used if importlib.util.find_spec(package) is None)
