"""The table: rows as text for people and as JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels.aot.registry import BASELINE
from pallas_kernels.aot.workers import RowKey

_COMPARED = "paged_attention"  # with the in-tree kernel; other kernels have shapes of the same names
_HEADER = (
    "kernel",
    "shape",
    "target",
    "secs",
    "memory",
    "regs",
    "spills",
    "inner loop",
    "cycles",
    "per KV",
    "mxu",
    "vpu",
    "MB moved",
    "est us",
    "share",
    "reach",
    "in-tree us",
    "share",
)
_LEGEND = """\
memory: VMEM of a TPU kernel (MiB) or shared memory of a GPU program (KiB). regs: a GPU thread's registers.
spills: vector registers stored and loaded in the inner loop. inner loop: bundles of instructions (TPU) or
instructions of one warp (GPU); cycles: with the bundles that only wait. per KV: bundles per KV token, in decode.
mxu, vpu: share of the matrix and vector units' issue slots that the inner loop uses. est us: estimated from the
program and the chip's numbers, nothing was run; share: of the chip's roofline, bandwidth in decode and matrix rate in
prefill; reach: share of what the matrix units can do with products as narrow as head_dim: those of v6e and tpu7x are
256 wide, so that half of their rate is the most with head_dim 128. One TensorCore or one GPU. in-tree: JAX's own
ragged paged attention, the same estimate. What all layers of a model share isn't counted (once_a_step_cycles with
--json). A GPU's estimate is a bound: it leaves latencies out."""


class Row(NamedTuple):
    """One row of the table."""

    key: RowKey
    compiled: bool
    reason: str | None
    figures: Mapping[str, Any]


def to_json(row: Row) -> str:
    """Returns one line."""
    names = {"kernel": row.key.kernel, "shape": row.key.shape, "target": row.key.target}
    return json.dumps({**names, "compiled": row.compiled, "reason": row.reason, "figures": row.figures})


def format_table(rows: Sequence[Row], *, is_measured: bool = False) -> str:
    """Lays out all rows, with the reason of those that weren't compiled or are wrong, and a legend.

    With is_measured the times are those of check.py, which knows nothing of registers and bundles.
    """
    header = tuple(name.replace("est us", "measured us") for name in _HEADER) if is_measured else _HEADER
    baseline = {(row.key.shape, row.key.target): row.figures for row in rows if row.key.kernel == BASELINE}
    cells = [_cells(row, baseline.get((row.key.shape, row.key.target), {})) for row in rows]
    full = [row for row in (header, *cells) if len(row) == len(header)]
    widths = [max(len(row[column]) for row in full) for column in range(len(header))]
    lines = [_line(header, widths), "  ".join("-" * width for width in widths), *(_line(row, widths) for row in cells)]
    return "\n".join(lines if is_measured else [*lines, "", _LEGEND])


def summarize(rows: Sequence[Row]) -> str:
    """Returns one line: how many rows compiled."""
    compiled = sum(row.compiled for row in rows)
    return f"{compiled} of {len(rows)} rows compiled"


def _cells(row: Row, baseline: Mapping[str, Any]) -> tuple[str, ...]:
    names = row.key[:3]
    figures = row.figures
    if not row.compiled:
        return (*names, _number(figures.get("seconds"), 1), f"not compiled: {row.reason}")
    other = baseline if row.key.kernel == _COMPARED else {}
    return (
        *names,
        _number(figures["seconds"], 1),
        _memory(figures),
        _number(figures.get("registers")),
        _number(figures.get("spills")),
        _number(figures.get("inner_bundles", figures.get("inner_instructions"))),
        _number(figures.get("inner_cycles")),
        _number(figures.get("bundles_per_kv_token"), 2),
        _percent(figures.get("mxu_busy")),
        _percent(figures.get("vpu_busy")),
        _number(figures["moved_bytes"] / 1e6, 1),
        _number(_microseconds(figures), 1),
        _percent(figures["roofline_share"]),
        _percent(figures.get("reachable_share")),
        _number(_microseconds(other), 1),
        _percent(other.get("roofline_share")),
    )


def _memory(figures: Mapping[str, Any]) -> str:
    if "vmem_bytes" in figures:
        return f"{figures['vmem_bytes'] / 2**20:.1f} MiB"
    return f"{figures['shared_bytes'] / 2**10:.1f} KiB" if "shared_bytes" in figures else "-"


def _microseconds(figures: Mapping[str, Any]) -> float | None:
    return figures.get("measured_us", figures.get("estimated_us"))


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right; a reason takes the rest of its line."""
    cells = list(cells)
    is_full = len(cells) == len(widths)
    padded = [
        cell.ljust(width) if index < 3 or not is_full and index > 3 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "  ".join(padded).rstrip()
