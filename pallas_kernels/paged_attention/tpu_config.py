"""Static choices of the TPU kernels: shapes, options and tile sizes. No array passes through here."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.kv_layout import LANES, num_lane_tiles, planes_per_head


@dataclass(frozen=True)
class TileSizes:
    """How much is done at a time. The defaults suit every chip; scripts/tune_block_sizes looks for better ones.

    Attributes:
      kv_buffer_bytes: Of each of the two buffers that blocks are copied to; at least what is computed at a time.
      decode_tokens: Context tokens whose scores are held at a time, in decode.
      prefill_tokens: The same in prefill, where every query sees them all.
      prefill_masked_tokens: And where not; what no query sees is left out in steps of this.
      prefill_rows: Queries times heads of one KV head that attend together in prefill.
      row_block: Of them, those whose products are one instruction of the kernel's source.
      prefill_units: Row blocks of KV heads whose code stands in one stretch, for the compiler to overlap.
      sums_by_products: Whether the matrix unit adds up the weights of prefill: 0 or 1. Good where it is 256 wide, since
        values of 128 lanes leave half of it idle.
    """

    kv_buffer_bytes: int = 4 << 20
    decode_tokens: int = 1024
    prefill_tokens: int = 512
    prefill_masked_tokens: int = 256
    prefill_rows: int = 512
    row_block: int = 256
    prefill_units: int = 16
    sums_by_products: int = 0


DEFAULT_SIZES = TileSizes()
VMEM_LIMIT_BYTES = 32 << 20  # half of what the smallest chip has
PREFILL_STATE_BYTES = 16 << 20  # of it, for queries, results and the softmax's state
_ROW_BYTES = 5 * 4 + 3 * 4  # of a row's lane: queries and results, two buffers of each and one; and the state
_MIN_QUERY_TILE = 16


@dataclass(frozen=True, kw_only=True)
class TpuConfig:
    """Everything that one kernel is compiled for.

    Attributes:
      num_kv_heads: K.
      group: Query heads of a KV head, G, as padded_group has it.
      head_dim: D.
      block_size: P.
      table_width: B.
      q_dtype: Of queries and results.
      compute_dtype: Of the operands of the matrix products.
      scale: Of the products of queries and stored keys.
      v_scale: Of stored values.
      sliding_window: See paged_attention.
      logit_soft_cap: See paged_attention.
      has_sinks: Whether there are sinks.
      query_tile: Tokens of one sequence that attend together; 1 in decode.
      blocks_per_tile: Blocks copied at a time.
      compute_blocks: Blocks whose scores are held at a time; divides blocks_per_tile.
      masked_blocks: The same where a mask hides some from some queries; divides compute_blocks.
      sizes: What the tile sizes were made from.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    table_width: int
    q_dtype: jnp.dtype
    compute_dtype: jnp.dtype
    scale: float
    v_scale: float
    sliding_window: int | None
    logit_soft_cap: float | None
    has_sinks: bool
    query_tile: int
    blocks_per_tile: int
    compute_blocks: int
    masked_blocks: int
    sizes: TileSizes

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def pack(self) -> int:
        """Queries to a 32-bit word."""
        return 4 // self.q_dtype.itemsize

    @property
    def width(self) -> int:
        """Lanes of a query and of a result."""
        return num_lane_tiles(self.head_dim) * LANES

    @property
    def planes_per_head(self) -> int:
        return planes_per_head(self.head_dim)

    @property
    def value_planes(self) -> range:
        """A head's planes that hold values; of the first half come keys, or they are in the same plane."""
        return range(self.planes_per_head // 2, self.planes_per_head)

    @property
    def key_planes(self) -> range:
        return range(max(1, self.planes_per_head // 2))

    @property
    def compute_tokens(self) -> int:
        return self.compute_blocks * self.block_size

    @property
    def masked_tokens(self) -> int:
        return self.masked_blocks * self.block_size


def padded_group(group: int) -> int:
    """Returns the query heads of a KV head that the kernels compute: an even number.

    Two heads are a 32-bit word of bfloat16, so that strided loads can pick them; and in decode fewer KV heads share a
    register with another. One head alone stays alone: it would double the work.
    """
    return group + (group > 1 and group % 2)


def decode_config(
    *, kv_dtype: jnp.dtype, q_dtype: jnp.dtype, sizes: TileSizes = DEFAULT_SIZES, **options: Any
) -> TpuConfig:
    """Returns the configuration of the kernel for single queries. options: the fields that _config doesn't fill in."""
    tokens = sizes.decode_tokens
    return _config(sizes, kv_dtype, q_dtype, query_tile=1, compute_tokens=tokens, masked_tokens=tokens, **options)


def prefill_config(
    *, kv_dtype: jnp.dtype, q_dtype: jnp.dtype, sizes: TileSizes = DEFAULT_SIZES, **options: Any
) -> TpuConfig:
    """Returns the configuration of the kernel for several queries. options: the fields that _config doesn't fill in."""
    row_bytes = options["num_kv_heads"] * num_lane_tiles(options["head_dim"]) * LANES * _ROW_BYTES
    rows = min(sizes.prefill_rows, PREFILL_STATE_BYTES // row_bytes)
    query_tile = max(_MIN_QUERY_TILE, 1 << max(1, rows // options["group"]).bit_length() - 1)
    tokens = {"compute_tokens": sizes.prefill_tokens, "masked_tokens": sizes.prefill_masked_tokens}
    return _config(sizes, kv_dtype, q_dtype, query_tile=query_tile, **tokens, **options)


def _config(
    sizes: TileSizes, kv_dtype: jnp.dtype, q_dtype: jnp.dtype, compute_tokens: int, masked_tokens: int, **options: Any
) -> TpuConfig:
    """Fills in tile sizes. Whole blocks are copied and computed, so that small blocks are taken by the dozen."""
    block_size, num_planes = options["block_size"], options["num_kv_heads"] * planes_per_head(options["head_dim"])
    block_bytes = num_planes * block_size * LANES * kv_dtype.itemsize
    compute_tokens = min(compute_tokens, max(LANES, sizes.kv_buffer_bytes * block_size // block_bytes))
    compute_blocks = max(1, compute_tokens // LANES * LANES // block_size)
    masked_blocks = max(1, masked_tokens // LANES * LANES // block_size)
    if compute_blocks % masked_blocks:
        masked_blocks = compute_blocks
    tiles = max(1, sizes.kv_buffer_bytes // (block_bytes * compute_blocks))
    return TpuConfig(
        q_dtype=q_dtype,
        compute_dtype=jnp.promote_types(q_dtype, kv_dtype) if kv_dtype.itemsize > 1 else q_dtype,
        compute_blocks=compute_blocks,
        masked_blocks=masked_blocks,
        sizes=sizes,
        blocks_per_tile=tiles * compute_blocks,
        **options,
    )
