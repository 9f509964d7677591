"""The kernels of the table: by name, who makes their programs and for which shapes and targets."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.aot.program import Program
from pallas_kernels.aot.shapes import ATTENTION_SHAPES
from pallas_kernels.aot.targets import TPU_TARGETS, GpuTarget, TpuTarget

BASELINE = "in-tree ragged_paged_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of the table."""

    name: str
    builder: str  # module:function, imported late: (shape, target) -> Program
    shapes: Mapping[str, Any]  # by name
    targets: tuple[str, ...]

    def build(self, shape: str, target: TpuTarget | GpuTarget) -> Program:
        """Makes the program of one row."""
        module, function = self.builder.split(":")
        build: Callable[[Any, Any], Program] = getattr(importlib.import_module(module), function)
        return build(self.shapes[shape], target)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name=BASELINE,
            builder="pallas_kernels.aot.baseline:build",
            shapes=ATTENTION_SHAPES,
            targets=tuple(TPU_TARGETS),
        ),
    )
}
