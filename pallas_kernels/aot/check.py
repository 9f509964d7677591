"""Runs the table's programs on the accelerator of this machine: results against the reference, and their times.

usage: python -m pallas_kernels.aot.check {gpu,tpu} [--fast] [--json]

Exit status: 0, 1 if a result is wrong or a row fails, 2 if there is no such accelerator.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.aot.program import Program
from pallas_kernels.aot.registry import KERNELS
from pallas_kernels.aot.report import Row, format_table, summarize, to_json
from pallas_kernels.aot.roofline import ideal_seconds
from pallas_kernels.aot.targets import GPU_TARGETS, TPU_TARGETS, GpuTarget, TpuTarget
from pallas_kernels.aot.trials import Trial
from pallas_kernels.aot.workers import RowKey

_TPU_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
# Same compute capability, other memory.
_GPU_BANDWIDTHS = {"H200": 4.8e12, "A100-SXM4-40GB": 1.555e12, "A100-PCIE-40GB": 1.555e12}
_MIN_BATCH_S = 0.05
_NUM_BATCHES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot.check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("platform", choices=("gpu", "tpu"))
    parser.add_argument("--fast", action="store_true", help="a few shapes of each kernel instead of the whole table")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    target = find_target(device.platform, device.device_kind, str(getattr(device, "compute_capability", "")))
    if device.platform != options.platform or target is None:
        print(
            f"{options.platform}_check: JAX finds {device.device_kind}, no {options.platform.upper()} that the kernels "
            "are for",
            file=sys.stderr,
        )
        return 2
    rows = []
    for kernel in KERNELS.values():
        if target.name in kernel.targets:
            for shape in kernel.fast_shapes if options.fast else kernel.shapes:
                rows.append(_run_row(RowKey(kernel.name, shape, target.name), target))
                if options.json:
                    print(to_json(rows[-1]), flush=True)
    if not options.json:
        print(format_table(rows, is_measured=True))
    print(f"{summarize(rows)} on {device.device_kind}", file=sys.stderr)
    wrong = [row for row in rows if row.reason is not None and KERNELS[row.key.kernel].must_compile(row.key)]
    for row in wrong:
        print(f"wrong: {' / '.join(row.key[:3])}: {row.reason}", file=sys.stderr)
    return 1 if wrong else 0


def find_target(platform: str, device_kind: str, compute_capability: str) -> TpuTarget | GpuTarget | None:
    """Returns the numbers of a device as JAX names it; None for a CPU or a chip that the kernels aren't for."""
    if platform == "tpu":
        return TPU_TARGETS.get(_TPU_KINDS.get(device_kind, ""))
    target = GPU_TARGETS.get(f"sm_{compute_capability.replace('.', '')}") if platform == "gpu" else None
    for name, bandwidth in _GPU_BANDWIDTHS.items():
        if target is not None and name in device_kind:
            return dataclasses.replace(target, device=device_kind, hbm_bytes_per_s=bandwidth)
    return target


def _run_row(key: RowKey, target: TpuTarget | GpuTarget) -> Row:
    kernel = KERNELS[key.kernel]
    start = time.perf_counter()
    try:
        figures, reason = run_program(kernel.build(key.shape, target), kernel.make_trial(key.shape, target), target)
    except Exception as error:  # the row's answer
        lines = str(error).strip().splitlines() or [""]
        seconds = round(time.perf_counter() - start, 2)
        return Row(key, False, f"{type(error).__name__}: {lines[0]}", {"seconds": seconds})
    return Row(key, True, reason, figures)


def run_program(program: Program, trial: Trial, target: TpuTarget | GpuTarget) -> tuple[dict[str, Any], str | None]:
    """Runs a program, compares its result and times it.

    Returns:
      Figures, and what is wrong with the result; None if nothing is.
    """
    start = time.perf_counter()
    run = jax.jit(program.function, donate_argnums=program.donated).lower(*trial.arguments).compile()
    seconds = time.perf_counter() - start
    expected = jax.tree.map(np.asarray, trial.expected())
    result = jax.block_until_ready(run(*trial.arguments))
    error = largest_error(jax.tree.map(np.asarray, result), expected)
    # A program that may overwrite an argument gets its own result back in that place.
    arguments = (result, *trial.arguments[1:]) if program.donated else trial.arguments
    measured_s = measure(run, arguments, is_chained=bool(program.donated))
    figures = {
        "seconds": round(seconds, 2),
        "error": error,
        "moved_bytes": round(program.work.moved_bytes),
        "measured_us": round(measured_s * 1e6, 2),
        "roofline_share": round(ideal_seconds(program.work, target) / measured_s, 3),
    }
    is_right = error <= trial.tolerance
    return (
        figures,
        None if is_right else f"differs from the reference by {error:.2g}, at most {trial.tolerance} is right",
    )


def largest_error(result: Any, expected: Any) -> float:
    """Returns the largest difference of two trees of arrays, relative to 1 + the expected size; inf for a NaN."""

    def error(left: np.ndarray, right: np.ndarray) -> float:
        left, right = left.astype(np.float64), right.astype(np.float64)
        return float(np.nan_to_num(np.abs(left - right) / (1 + np.abs(right)), nan=np.inf).max())

    return max(jax.tree.leaves(jax.tree.map(error, result, expected)))


def measure(run: Callable[..., Any], arguments: tuple[Any, ...], *, is_chained: bool) -> float:
    """Returns seconds a call: the median of some batches, each long enough for the clock and queued without waiting."""

    def batch(num_calls: int) -> float:
        nonlocal arguments
        start = time.perf_counter()
        for _ in range(num_calls):
            result = run(*arguments)
            if is_chained:
                arguments = (result, *arguments[1:])
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / num_calls

    num_calls = max(1, round(_MIN_BATCH_S / max(batch(3), 1e-6)))
    return statistics.median(batch(num_calls) for _ in range(_NUM_BATCHES))


if __name__ == "__main__":
    sys.exit(main())
