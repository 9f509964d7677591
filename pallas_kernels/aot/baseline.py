"""JAX's in-tree ragged paged attention for TPUs, the kernel that ours is measured against."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes import TUNED_BLOCK_SIZES, simplify_key

from pallas_kernels.aot.attention import attention_options
from pallas_kernels.aot.program import Program, Trips, Work
from pallas_kernels.aot.shapes import AttentionShape
from pallas_kernels.aot.targets import TpuTarget
from pallas_kernels.aot.trials import Trial, attention_trial

# Its table of tuned sizes by chip; that has nothing for tpu7x.
_DEVICE = {"v5e": "TPU v5", "v5p": "TPU v5", "v6e": "TPU v6", "tpu7x": "TPU v6"}
_LANES = 128


def build(shape: AttentionShape, target: TpuTarget) -> Program:
    """Makes the call with the sizes of the nearest entry of its own table. head_dim is padded to 128."""
    heads, batch = shape.heads, shape.batch
    head_dim = -(-heads.head_dim // _LANES) * _LANES
    kv_dtype = jnp.dtype(shape.kv_dtype)
    q_heads, kv_rows = get_min_heads_per_blk(heads.num_heads, 2 * heads.num_kv_heads, jnp.bfloat16, kv_dtype)
    pages, queries = _block_sizes(shape, target, q_heads, kv_rows // 2, head_dim)
    scale = None if shape.kv_dtype == "bfloat16" else attention_options(shape)["k_scale"]
    function = functools.partial(
        ragged_paged_attention,
        sm_scale=heads.head_dim**-0.5,
        sliding_window=heads.sliding_window,
        num_kv_pages_per_block=pages,
        num_queries_per_block=queries,
        vmem_limit_bytes=target.vmem_bytes // 2,
        k_scale=scale,
        v_scale=scale,
    )
    kv_pages = (shape.num_blocks, shape.block_size, 2 * heads.num_kv_heads, head_dim)
    arguments = (
        jax.ShapeDtypeStruct((batch.num_tokens, heads.num_heads, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(kv_pages, kv_dtype),
        jax.ShapeDtypeStruct((batch.num_seqs,), jnp.int32),
        jax.ShapeDtypeStruct((batch.num_seqs, shape.blocks_per_seq), jnp.int32),
        jax.ShapeDtypeStruct((batch.num_seqs + 1,), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    tile_tokens = pages * shape.block_size
    tile_bytes = tile_tokens * 2 * heads.num_kv_heads * head_dim * kv_dtype.itemsize
    head_blocks = heads.num_heads // q_heads
    steps, pairs, tiles = _trips(shape, queries, tile_tokens)
    return Program(
        function=function,
        arguments=arguments,
        step_arguments=(2, 3, 4, 5),
        work=Work(
            needed_bytes=shape.needed_bytes,
            needed_flops=shape.needed_flops,
            moved_bytes=tiles * tile_bytes + 2 * batch.num_tokens * heads.num_heads * head_dim * 2,
            first_bytes=tile_bytes / head_blocks,
            kv_tokens=tiles * tile_tokens if batch.is_decode else 0,
            product_width=heads.head_dim,
        ),
        trips={"ragged_paged_attention_kernel": Trips((steps * head_blocks, pairs * head_blocks, tiles * head_blocks))},
    )


def _block_sizes(
    shape: AttentionShape, target: TpuTarget, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int]:
    key = simplify_key(
        (
            jnp.bfloat16,
            jnp.dtype(shape.kv_dtype),
            num_heads,
            num_kv_heads,
            head_dim,
            shape.block_size,
            shape.batch.num_tokens,
            shape.blocks_per_seq,
        )
    )
    table = TUNED_BLOCK_SIZES[_DEVICE[target.name]]
    pages, queries = table[min(table, key=lambda entry: _distance(entry, key))]
    return min(shape.blocks_per_seq, pages), min(shape.batch.num_tokens, queries)


def _distance(left: Sequence[str | int], right: Sequence[str | int]) -> float:
    """How far two keys of the table are apart: a factor of two counts as much as another dtype."""
    return sum(
        abs(math.log2(a / b)) if isinstance(a, int) and isinstance(b, int) else float(a != b)
        for a, b in zip(left, right, strict=True)
    )


def _trips(shape: AttentionShape, queries: int, tile_tokens: int) -> tuple[int, int, int]:
    """Blocks of queries, pairs of a block and a sequence in it, and KV tiles that these pairs read.

    The kernel reads every tile of a sequence, also those that the causal mask or the window hides.
    """
    pairs = tiles = start = 0
    for query_len, seq_len in zip(shape.batch.query_lens, shape.batch.seq_lens, strict=True):
        blocks = (start + query_len - 1) // queries - start // queries + 1
        pairs += blocks
        tiles += blocks * -(-seq_len // tile_tokens)
        start += query_len
    return -(-shape.batch.num_tokens // queries), pairs, tiles


def make_trial(shape: AttentionShape, _: str) -> Trial:
    """The trial of our own kernel, its cache with keys and values interleaved and head_dim padded to 128."""
    trial = attention_trial(shape, "reference")
    q, (k, v), tables, seq_lens, starts = trial.arguments
    head_dim = shape.heads.head_dim
    padding = ((0, 0),) * (q.ndim - 1) + ((0, -head_dim % _LANES),)
    pages = jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, head_dim)
    pages = jnp.pad(pages, ((0, 0), *padding))
    num_seqs = jnp.array([shape.batch.num_seqs], jnp.int32)

    def expected() -> jax.Array:
        return jnp.pad(trial.expected(), padding)

    arguments = (jnp.pad(q, padding), pages, seq_lens, tables, starts, num_seqs)
    return Trial(arguments=arguments, expected=expected, tolerance=trial.tolerance)
