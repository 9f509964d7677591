"""Looks for the sizes of the TPU attention kernels: compiles candidates, keeps what is estimated to be fastest.

usage: python -m pallas_kernels.aot.tune [--targets v5e,v5p,v6e,tpu7x]

Writes pallas_kernels/paged_attention/block_sizes.json. Never takes sizes whose buffers need more than half of VMEM, and
none that spill registers in the inner loop where others don't.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.aot.attention import attention_key
from pallas_kernels.aot.shapes import ATTENTION_SHAPES, DECODE_64, PREFILL, AttentionShape
from pallas_kernels.aot.targets import TPU_TARGETS, missing_packages, parse_targets
from pallas_kernels.aot.workers import RowKey, compile_rows
from pallas_kernels.paged_attention.block_sizes import TABLE_PATH, default_sizes
from pallas_kernels.paged_attention.tpu_config import TileSizes

_MIB = 1 << 20
_KERNEL = "paged_attention"
Answers = Mapping[RowKey, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot.tune", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", type=parse_targets, default=list(TPU_TARGETS), metavar="NAMES")
    targets = [name for name in parser.parse_args(arguments).targets if name in TPU_TARGETS]
    if missing := missing_packages(targets):
        print(f"compiling for {', '.join(targets)} needs {missing}: pip install 'jaxllm[aot]'", file=sys.stderr)
        return 2
    chosen: dict[tuple[str, str], TileSizes] = {}
    for name, candidates, batch in (
        ("decode", decode_candidates, DECODE_64.name),
        ("prefill", prefill_candidates, PREFILL.name),
    ):
        shapes = distinct_shapes(batch)
        keys = [
            RowKey(_KERNEL, shape.name, target, dataclasses.astuple(sizes))
            for shape in shapes
            for target in targets
            for sizes in candidates(chosen.get((target, str(attention_key(shape))), default_sizes(target)))
        ]
        print(f"{name}: {len(keys)} candidates", file=sys.stderr)
        answers = dict(compile_rows(keys, os.cpu_count() or 1))
        for shape, target in itertools.product(shapes, targets):
            best = choose(answers, shape.name, target)
            if best is not None:
                chosen[target, str(attention_key(shape))] = best
    _write(chosen)
    return 0


def distinct_shapes(batch: str) -> list[AttentionShape]:
    """Lists the table's attentions in one batch, each once: several models may have the same heads."""
    shapes = [shape for shape in ATTENTION_SHAPES.values() if shape.batch.name == batch]
    return list({attention_key(shape): shape for shape in reversed(shapes)}.values())[::-1]


def decode_candidates(start: TileSizes) -> list[TileSizes]:
    """Lists sizes to try in decode: few tokens at a time where registers are short, many where nothing else is."""
    return [dataclasses.replace(start, decode_tokens=tokens) for tokens in (256, 1024, 2048)]


def prefill_candidates(start: TileSizes) -> list[TileSizes]:
    """Lists sizes to try in prefill, beside what decode chose."""
    sizes = ((256, 16), (512, 8))
    return [dataclasses.replace(start, row_block=rows, prefill_units=units) for rows, units in sizes]


def choose(answers: Answers, shape: str, target: str) -> TileSizes | None:
    """Returns the fastest sizes of those that compiled within half of VMEM, without spills if there are such.

    Of those that wait for memory all alike the one with the least to compute.
    """
    limit = TPU_TARGETS[target].vmem_bytes // 2
    fitting = {
        key.sizes: answer["figures"]
        for key, answer in answers.items()
        if (key.shape, key.target) == (shape, target)
        and answer["compiled"]
        and answer["figures"]["vmem_bytes"] <= limit
    }
    if not fitting:
        return None

    def cost(sizes: tuple[int, ...]) -> tuple[bool, float, float]:
        figures = fitting[sizes]
        return figures["spills"] + figures["scalar_spills"] > 0, figures["estimated_us"], figures["compute_us"]

    return TileSizes(*min(fitting, key=cost))


def _write(chosen: Mapping[tuple[str, str], TileSizes]) -> None:
    """Replaces the entries of what was tuned and keeps all others."""
    table = json.loads(TABLE_PATH.read_text())
    for (target, key), sizes in chosen.items():
        table.setdefault(target, {})[key] = dataclasses.asdict(sizes)
    TABLE_PATH.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
