"""The kernels of the table: by name, who makes their programs, for which shapes and targets. Imports none of them."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.aot.program import Program
from pallas_kernels.aot.shapes import ATTENTION_SHAPES, MATMUL_SHAPES, AttentionShape
from pallas_kernels.aot.targets import TARGETS, TPU_TARGETS, GpuTarget, TpuTarget
from pallas_kernels.aot.workers import RowKey

BASELINE = "in-tree ragged_paged_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of the table."""

    name: str
    builder: str  # module:function, imported late: (shape, target) -> Program
    shapes: Mapping[str, Any]  # by name
    fast_shapes: tuple[str, ...]  # those that CI compiles each time
    targets: tuple[str, ...]
    trial: str  # module:function, imported late: (shape, backend) -> Trial
    sized_builder: str = ""  # module:function: (shape, target, sizes) -> Program, for kernels whose sizes are tuned
    may_refuse: bool = False  # a row that doesn't compile is no failure

    def build(self, shape: str, target: TpuTarget | GpuTarget) -> Program:
        """Makes the program of one row."""
        build: Callable[[Any, Any], Program] = _import(self.builder)
        return build(self.shapes[shape], target)

    def build_sized(self, shape: str, target: TpuTarget | GpuTarget, sizes: Sequence[int]) -> Program:
        """Makes the same program with other sizes."""
        build: Callable[[Any, Any, Any], Program] = _import(self.sized_builder)
        return build(self.shapes[shape], target, sizes)

    def make_trial(self, shape: str, target: TpuTarget | GpuTarget) -> Any:
        """Makes arguments and expected results of one row, a trials.Trial."""
        return _import(self.trial)(self.shapes[shape], "tpu" if isinstance(target, TpuTarget) else "triton")

    def must_compile(self, key: RowKey) -> bool:
        """Whether the table is wrong if this row isn't compiled."""
        return not self.may_refuse


def _import(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def _of_batches(*names: str) -> dict[str, AttentionShape]:
    return {key: shape for key, shape in ATTENTION_SHAPES.items() if shape.batch.name in names}


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="paged_attention",
            builder="pallas_kernels.aot.attention:build",
            shapes=ATTENTION_SHAPES,
            fast_shapes=(
                "Llama-3-8B decode-64x2048",
                "Llama-3-8B prefill-2048",
                "Llama-3-70B/TP8 decode-64x2048",
                "Gemma-3-27B mixed-512+32",
                "SmolLM2-135M decode-64x2048",
                "Llama-3-8B decode-64x2048 int8-kv",
            ),
            targets=tuple(TARGETS),
            trial="pallas_kernels.aot.trials:attention_trial",
            sized_builder="pallas_kernels.aot.attention:build_sized",
        ),
        Kernel(
            name="kv_cache_update",
            builder="pallas_kernels.aot.memory:build_update",
            trial="pallas_kernels.aot.memory:update_trial",
            shapes=_of_batches("decode-64x2048", "decode-256x2048", "prefill-2048"),
            fast_shapes=("Llama-3-8B decode-64x2048", "SmolLM2-135M prefill-2048"),
            targets=tuple(TPU_TARGETS),
        ),
        Kernel(
            name="copy_blocks",
            builder="pallas_kernels.aot.memory:build_copy",
            trial="pallas_kernels.aot.memory:copy_trial",
            shapes=_of_batches("decode-64x2048"),
            fast_shapes=("Llama-3-8B decode-64x2048",),
            targets=tuple(TPU_TARGETS),
        ),
        Kernel(
            name="quantized_matmul",
            builder="pallas_kernels.aot.matmul:build",
            trial="pallas_kernels.aot.matmul:make_trial",
            shapes=MATMUL_SHAPES,
            fast_shapes=(
                "Llama-3-8B gate_up w8a8 T64",
                "Llama-3-8B gate_up w8a8 T2048",
                "Llama-3-8B down w8 T64",
                "Llama-3-8B down w4 T64",
            ),
            targets=tuple(TARGETS),
        ),
        Kernel(
            name=BASELINE,
            builder="pallas_kernels.aot.baseline:build",
            shapes=ATTENTION_SHAPES,
            fast_shapes=("Llama-3-70B/TP8 decode-64x2048",),
            targets=tuple(TPU_TARGETS),
            trial="pallas_kernels.aot.baseline:make_trial",
            may_refuse=True,
        ),
    )
}
