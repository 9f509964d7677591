"""The in-tree kernel's figures, kept in in_tree.json: its rows take up to minutes to compile and change with JAX only.

usage: python -m pallas_kernels.aot.in_tree [--targets v5e,v5p,v6e,tpu7x] [--fast]

Compiles the rows that the file lacks and adds each as soon as it is there. Entries of other versions are dropped.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pallas_kernels.aot.registry import BASELINE, KERNELS
from pallas_kernels.aot.report import Row
from pallas_kernels.aot.targets import TPU_TARGETS, missing_packages, parse_targets
from pallas_kernels.aot.workers import RowKey, compile_rows

PATH = Path(__file__).with_name("in_tree.json")
_ATTENTION = "paged_attention"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot.in_tree", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", type=parse_targets, default=list(TPU_TARGETS), metavar="NAMES")
    parser.add_argument("--fast", action="store_true", help="only the shapes that CI compiles")
    options = parser.parse_args(arguments)
    targets = [name for name in options.targets if name in TPU_TARGETS]
    if missing := missing_packages(targets):
        print(f"compiling for {', '.join(targets)} needs {missing}: pip install 'jaxllm[aot]'", file=sys.stderr)
        return 2
    kernel = KERNELS[_ATTENTION]
    rows = read_rows()
    keys = [
        RowKey(BASELINE, shape, target)
        for shape in (kernel.fast_shapes if options.fast else kernel.shapes)
        for target in targets
        if (shape, target) not in rows
    ]
    for key, answer in compile_rows(keys, num_processes=1):
        rows[key.shape, key.target] = Row(key, answer["compiled"], answer["reason"], answer["figures"])
        write_rows(rows)
    return 0


def read_rows() -> dict[tuple[str, str], Row]:
    """Returns the kept rows by shape and target; none if they are of other versions of JAX and libtpu than these."""
    table, versions = json.loads(PATH.read_text()), _versions()
    if not versions or table["versions"] != versions:
        return {}
    return {
        (shape, target): Row(RowKey(BASELINE, shape, target), **row)
        for target, rows in table["rows"].items()
        for shape, row in rows.items()
    }


def write_rows(rows: dict[tuple[str, str], Row]) -> None:
    """Replaces the file."""
    by_target: dict[str, dict[str, Any]] = {}
    for (shape, target), row in rows.items():
        entry = {"compiled": row.compiled, "reason": row.reason, "figures": dict(row.figures)}
        by_target.setdefault(target, {})[shape] = entry
    PATH.write_text(json.dumps({"versions": _versions(), "rows": by_target}, indent=1, sort_keys=True) + "\n")


def _versions() -> dict[str, str]:
    """Returns those of the installed packages; without libtpu nothing that was kept is of use."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {}


if __name__ == "__main__":
    sys.exit(main())
