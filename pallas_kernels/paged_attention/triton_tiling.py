"""How the Triton attention cuts its work: sizes of tiles and chunks, warps and pipeline stages.

Chosen by compiling for sm_80, sm_90 and sm_100 and reading registers, spills and shared memory; not timed.
"""

from typing import NamedTuple

_MIN_ROWS = 16  # the least that a product on tensor cores takes
_MAX_DECODE_ROWS = 64
_DECODE_CHUNK_BYTES = 8192  # of keys; the values are as many
# Of these the pipeliner takes two for the block ids, which are read first; what is left buffers keys and values twice.
_NUM_STAGES = 5
_MAX_ROW_BYTES = 512  # of keys, from which on chunks are shorter and programs have twice the registers
_WANTED_PROGRAMS = 256  # enough to give every multiprocessor of the largest GPU two
_MIN_SPLIT_CONTEXT = 256  # tokens; a shorter piece isn't worth joining
_MAX_SPLITS = 32


class Tiling(NamedTuple):
    """One kernel's sizes. Static, all of them."""

    rows: int  # of the score matrix: queries * heads, rounded up to a power of two
    heads: int  # query heads of one KV head in a tile
    queries: int  # a tile
    head_tiles: int  # tiles that the query heads of one KV head take
    chunk: int  # context tokens at a time
    num_splits: int  # programs that share one tile's context
    num_warps: int
    num_stages: int


def decode_tiling(
    group: int, head_dim: int, itemsize: int, num_seqs: int, num_kv_heads: int, max_context: int
) -> Tiling:
    """Returns the sizes for one query a sequence.

    Args:
      group: Query heads a KV head.
      head_dim: D.
      itemsize: Bytes of a stored number; 4 where products are of float32.
      num_seqs: S, padding included.
      num_kv_heads: K.
      max_context: Tokens that a block table has room for.
    """
    rows = min(max(pow2_ceil(group), _MIN_ROWS), _MAX_DECODE_ROWS)
    heads = min(group, rows)
    head_tiles = -(-group // heads)
    row_bytes = pow2_ceil(head_dim) * itemsize
    chunk, num_warps = min(max(_DECODE_CHUNK_BYTES // row_bytes, 32), 128), 4
    if row_bytes > _MAX_ROW_BYTES:
        chunk, num_warps = 16, 8
    wanted = -(-_WANTED_PROGRAMS // (num_seqs * num_kv_heads * head_tiles))
    num_splits = max(min(wanted, max_context // _MIN_SPLIT_CONTEXT, _MAX_SPLITS), 1)
    return Tiling(rows, heads, 1, head_tiles, chunk, num_splits, num_warps, _NUM_STAGES)


def prefill_tiling(group: int, head_dim: int, *, is_float32: bool) -> Tiling:
    """Returns the sizes for several queries a sequence; arguments as for decode_tiling.

    A product of float32 is three, whose operands take twice as many registers and more: larger tiles would spill.
    """
    if is_float32:
        rows, chunk, num_warps = (32, 32, 4) if head_dim <= 128 else (16, 16, 8)
    else:
        rows, chunk, num_warps = (128, 64, 8) if head_dim <= 128 else (64, 32, 8)
    heads = min(group, rows)
    return Tiling(rows, heads, rows // heads, -(-group // heads), chunk, 1, num_warps, _NUM_STAGES)


def pow2_ceil(number: int) -> int:
    """Returns the least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
