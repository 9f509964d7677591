"""Compiles rows for one target, a line of JSON in and a line of JSON out, in a process of its own.

Compilers read their settings when they start and may end the whole process, so workers.py runs this as
`python -m pallas_kernels.aot.worker TARGET DUMP_FOLDER` in an environment that it prepares.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_kernels.aot.program import Program
from pallas_kernels.aot.registry import KERNELS
from pallas_kernels.aot.targets import TARGETS, GpuTarget, TpuTarget
from pallas_kernels.aot.workers import RowKey

_Compile = Callable[[Program], dict[str, Any]]


def main() -> None:
    """Answers each request on standard input until it ends."""
    target, dumps = TARGETS[sys.argv[1]], Path(sys.argv[2])
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        compile_program = _compiler(target, dumps)
        for line in sys.stdin:
            answer = _answer(RowKey(**json.loads(line)), target, compile_program)
            print(json.dumps(answer), file=answers, flush=True)


def _compiler(target: TpuTarget | GpuTarget, dumps: Path) -> _Compile:
    """Imports only the compiler that the target needs."""
    if isinstance(target, TpuTarget):
        from pallas_kernels.aot.tpu import TpuCompiler

        return TpuCompiler(target, dumps).compile
    from pallas_kernels.aot.gpu_figures import compile_program

    return lambda program: compile_program(program, target)


def _answer(key: RowKey, target: TpuTarget | GpuTarget, compile_program: _Compile) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        figures, reason = compile_program(_build(key, target)), None
    except Exception as error:  # whatever the compilers refuse is the row's answer
        lines = str(error).strip().splitlines() or [""]
        figures, reason = {}, f"{type(error).__name__}: {lines[0]}"
    figures["seconds"] = round(time.perf_counter() - start, 2)
    return {"compiled": reason is None, "reason": reason, "figures": figures}


def _build(key: RowKey, target: TpuTarget | GpuTarget) -> Program:
    kernel = KERNELS[key.kernel]
    return kernel.build_sized(key.shape, target, key.sizes) if key.sizes else kernel.build(key.shape, target)


if __name__ == "__main__":
    main()
