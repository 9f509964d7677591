"""Compiles every kernel for chips that this machine doesn't have, and prints what the compilers made of it.

usage: python -m pallas_kernels.aot --targets v5e,v5p,v6e,tpu7x,sm_80,sm_90,sm_100 [--fast] [--json]

Exit status: 0, 1 if a row doesn't compile that must, 2 if it can't start, 3 if all compile but one misses a limit of
limits.py: a decode loop that spills, too little of the roofline, slower than the in-tree kernel.
"""

import argparse
import os
import sys
from collections.abc import Hashable, Sequence

from pallas_kernels.aot.in_tree import read_rows
from pallas_kernels.aot.limits import find_misses
from pallas_kernels.aot.registry import BASELINE, KERNELS
from pallas_kernels.aot.report import Row, format_table, summarize, to_json
from pallas_kernels.aot.targets import TARGETS, missing_packages, parse_targets
from pallas_kernels.aot.workers import RowKey, compile_rows

_COMPARED = ("paged_attention", BASELINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parse(arguments)
    targets = options.targets
    missing = missing_packages(targets)
    if missing:
        print(f"compiling for {', '.join(targets)} needs {missing}: pip install 'jaxllm[aot]'", file=sys.stderr)
        return 2
    keys = select_rows(targets, is_fast=options.fast)
    rows = kept_rows(keys)
    groups = group_rows([key for key in keys if key not in rows])
    if options.json:
        for row in rows.values():
            print(to_json(row), flush=True)
    for first, answer in compile_rows(list(groups), os.cpu_count() or 1):
        for key in groups[first]:
            rows[key] = Row(key, answer["compiled"], answer["reason"], answer["figures"])
            if options.json:
                print(to_json(rows[key]), flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} rows", end="", file=sys.stderr, flush=True)
    ordered = [rows[key] for key in dict.fromkeys((*keys, *rows))]
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    if not options.json:
        print(format_table(ordered))
    print(summarize(ordered), file=sys.stderr)
    failures = [row for row in ordered if not row.compiled and KERNELS[row.key.kernel].must_compile(row.key)]
    for row in failures:
        print(f"must compile but doesn't: {' / '.join(row.key[:3])}: {row.reason}", file=sys.stderr)
    misses = find_misses(ordered)
    for miss in misses:
        print(f"misses a limit: {miss}", file=sys.stderr)
    return 1 if failures else 3 if misses else 0


def kept_rows(keys: Sequence[RowKey]) -> dict[RowKey, Row]:
    """Returns the rows of in_tree.json that stand beside those of `keys`, apart from what CI compiles each time."""
    always = KERNELS[BASELINE].fast_shapes
    beside = {(key.shape, key.target) for key in keys if key.kernel in _COMPARED and key.shape not in always}
    return {row.key: row for place, row in read_rows().items() if place in beside}


def select_rows(targets: Sequence[str], *, is_fast: bool) -> list[RowKey]:
    """Lists the rows, kernel by kernel; with is_fast a few of each kernel."""
    return [
        RowKey(kernel.name, shape, target)
        for kernel in KERNELS.values()
        for shape in (kernel.fast_shapes if is_fast else kernel.shapes)
        for target in targets
        if target in kernel.targets
    ]


def group_rows(keys: Sequence[RowKey]) -> dict[RowKey, list[RowKey]]:
    """Puts rows together that are the same program, so that it is compiled once; by the first of each."""
    groups: dict[Hashable, list[RowKey]] = {}
    for key in keys:
        program = KERNELS[key.kernel].shapes[key.shape].program
        groups.setdefault((key.kernel, key.target, program), []).append(key)
    return {group[0]: group for group in groups.values()}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--targets",
        type=parse_targets,
        default=list(TARGETS),
        metavar="NAMES",
        help=f"with commas between them, of {', '.join(TARGETS)}; all if not given",
    )
    parser.add_argument("--fast", action="store_true", help="a few shapes of each kernel instead of the whole table")
    parser.add_argument("--json", action="store_true", help="one JSON object a row, as soon as it is compiled")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
