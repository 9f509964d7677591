"""What the compiled kernels must keep to, so that a change that makes one slower is noticed where no chip is.

Limits are of the estimates, which repeat exactly with the same compilers. Knows rows and their figures only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.aot.registry import BASELINE
from pallas_kernels.aot.report import Row
from pallas_kernels.aot.shapes import ATTENTION_SHAPES, DECODE_64, LLAMA_3_8B, PREFILL, AttentionShape

_ATTENTION = "paged_attention"
_DECODE = AttentionShape(heads=LLAMA_3_8B, batch=DECODE_64).name
_PREFILL = AttentionShape(heads=LLAMA_3_8B, batch=PREFILL).name


class Limit(NamedTuple):
    """The least share of a chip's roofline, and in decode the most bundles a KV token."""

    share: float
    bundles_per_kv_token: float | None = None


# Of the rows that stand for all others. Matrix units 256 wide can't reach half of their rate with head_dim 128.
LIMITS = {
    (_DECODE, "v5e"): Limit(0.85, 1.44),
    (_DECODE, "v5p"): Limit(0.85, 1.44),
    (_DECODE, "v6e"): Limit(0.85, 1.28),
    (_DECODE, "tpu7x"): Limit(0.85, 1.28),
    (_PREFILL, "v5e"): Limit(0.60),
    (_PREFILL, "v5p"): Limit(0.60),
    (_PREFILL, "v6e"): Limit(0.26),
    (_PREFILL, "tpu7x"): Limit(0.25),
}


def find_misses(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each limit that a compiled attention row misses."""
    in_tree = {(row.key.shape, row.key.target): row for row in rows if row.key.kernel == BASELINE and row.compiled}
    misses = []
    for row in rows:
        if row.key.kernel == _ATTENTION and row.compiled:
            other = in_tree.get((row.key.shape, row.key.target))
            misses += [f"{' / '.join(row.key[:3])}: {text}" for text in _misses(row, other)]
    return misses


def _misses(row: Row, in_tree: Row | None) -> Iterator[str]:
    figures, limit = row.figures, LIMITS.get((row.key.shape, row.key.target))
    spills = figures["spills"] + figures.get("scalar_spills", 0)  # a GPU's registers are of one kind
    if ATTENTION_SHAPES[row.key.shape].batch.is_decode and spills:
        yield f"{spills} spills in the inner loop, a decode loop must have none"
    if limit is not None and figures["roofline_share"] < limit.share:
        yield f"{figures['roofline_share']:.1%} of the roofline, at least {limit.share:.0%} is wanted"
    if limit is not None and limit.bundles_per_kv_token is not None:
        bundles = figures["bundles_per_kv_token"]
        if bundles > limit.bundles_per_kv_token:
            yield f"{bundles} bundles a KV token, at most {limit.bundles_per_kv_token} are wanted"
    if in_tree is not None and figures["estimated_us"] > in_tree.figures["estimated_us"]:
        yield f"{figures['estimated_us']} us, the in-tree kernel takes {in_tree.figures['estimated_us']}"
