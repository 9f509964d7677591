from typing import Any

import pytest

from pallas_kernels.aot.limits import LIMITS, find_misses
from pallas_kernels.aot.registry import BASELINE, KERNELS
from pallas_kernels.aot.report import Row
from pallas_kernels.aot.workers import RowKey

DECODE, PREFILL = "Llama-3-8B decode-64x2048", "Llama-3-8B prefill-2048"


def row(shape: str = DECODE, target: str = "v6e", kernel: str = "paged_attention", **figures: Any) -> Row:
    good = {"spills": 0, "scalar_spills": 0, "roofline_share": 0.99, "bundles_per_kv_token": 1.1, "estimated_us": 300.0}
    return Row(RowKey(kernel, shape, target), True, None, {**good, **figures})


def _gpu_row(shape: str = DECODE, spills: int = 0) -> Row:
    figures = {"spills": spills, "roofline_share": 0.3, "estimated_us": 300.0}
    return Row(RowKey("paged_attention", shape, "sm_90"), True, None, figures)


def test_rows_within_their_limits_miss_nothing() -> None:
    assert find_misses([row(), row(PREFILL, "v5e", roofline_share=0.6), row(kernel=BASELINE)]) == []


@pytest.mark.parametrize(
    ("faulty", "miss"),
    [
        (row("SmolLM2-135M decode-64x2048", spills=3), "SmolLM2-135M decode-64x2048 / v6e: 3 spills in the inner loop"),
        (row(scalar_spills=1), "1 spills"),
        (_gpu_row(spills=2), "Llama-3-8B decode-64x2048 / sm_90: 2 spills in the inner loop"),
        (row(roofline_share=0.849), "84.9% of the roofline, at least 85% is wanted"),
        (row(PREFILL, "v5e", roofline_share=0.599), "59.9% of the roofline, at least 60% is wanted"),
        (row(bundles_per_kv_token=1.281), "1.281 bundles a KV token, at most 1.28 are wanted"),
        (row(target="v5e", bundles_per_kv_token=1.441), "1.441 bundles a KV token, at most 1.44"),
    ],
)
def test_a_miss_is_named(faulty: Row, miss: str) -> None:
    (line,) = find_misses([faulty])
    assert miss in line and line.startswith("paged_attention / ")


def test_the_in_tree_kernel_may_not_be_faster() -> None:
    in_tree = row("Gemma-3-27B mixed-512+32", kernel=BASELINE, estimated_us=299.0)
    ours = row("Gemma-3-27B mixed-512+32")
    assert find_misses([ours, in_tree]) == [
        "paged_attention / Gemma-3-27B mixed-512+32 / v6e: 300.0 us, the in-tree kernel takes 299.0"
    ]
    assert find_misses([ours, in_tree._replace(key=in_tree.key._replace(target="v5e"))]) == []


def test_prefill_may_spill_and_other_rows_have_no_limits() -> None:
    refused = Row(RowKey("paged_attention", DECODE, "v6e"), False, "no", {})
    others = [row(PREFILL, spills=4000, roofline_share=0.3), row(kernel="copy_blocks", spills=1), refused]
    assert find_misses([*others, _gpu_row(), _gpu_row(PREFILL, spills=1)]) == []


def test_every_limit_is_of_a_row_that_ci_compiles() -> None:
    kernel = KERNELS["paged_attention"]
    assert {shape for shape, _ in LIMITS} <= set(kernel.fast_shapes)
    assert {target for _, target in LIMITS} <= set(kernel.targets)
