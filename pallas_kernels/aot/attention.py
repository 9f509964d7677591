"""Our paged attention as rows of the table: the call to compile, and how often its loops run."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.aot.program import Program, Trips, Work
from pallas_kernels.aot.shapes import AttentionShape
from pallas_kernels.aot.targets import GpuTarget, TpuTarget
from pallas_kernels.paged_attention import KVLayout, paged_attention
from pallas_kernels.paged_attention.block_sizes import AttentionKey, find_tile_sizes
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_config import TileSizes, TpuConfig, decode_config, padded_group, prefill_config
from pallas_kernels.paged_attention.tpu_prefill import heads_at_a_time


def build(shape: AttentionShape, target: TpuTarget | GpuTarget) -> Program:
    """Makes the call of the public wrapper with the target's backend."""
    if isinstance(target, TpuTarget):
        layout = kv_layout(shape, "tpu")
        work, trips = _tpu_plan(shape, layout, find_tile_sizes(target.name, attention_key(shape)))
    else:
        layout = kv_layout(shape, "triton")
        work, trips = _gpu_plan(shape, layout)
    function = functools.partial(paged_attention, backend=layout.backend, **attention_options(shape))
    return _program(function, shape, layout, work, trips)


def build_sized(shape: AttentionShape, target: TpuTarget, fields: Sequence[int]) -> Program:
    """Makes the call of the TPU kernels with sizes that are to be tried: TileSizes, field by field."""
    sizes = TileSizes(*fields)
    layout = kv_layout(shape, "tpu")
    work, trips = _tpu_plan(shape, layout, sizes)
    options = attention_options(shape)

    def function(
        q: jax.Array, kv: tuple[jax.Array, ...], tables: jax.Array, seq_lens: jax.Array, starts: jax.Array
    ) -> jax.Array:
        return paged_attention_tpu(q, kv[0], tables, seq_lens, starts, sizes=sizes, **options)

    return _program(function, shape, layout, work, trips)


def _program(
    function: Callable[..., Any], shape: AttentionShape, layout: KVLayout, work: Work, trips: Mapping[str, Trips]
) -> Program:
    arguments = _arguments(shape, layout)
    return Program(function=function, arguments=arguments, step_arguments=(2, 3, 4), work=work, trips=trips)


def attention_key(shape: AttentionShape) -> AttentionKey:
    """What sizes are tuned for."""
    heads = shape.heads
    return AttentionKey(shape.kv_dtype, heads.num_heads, heads.num_kv_heads, heads.head_dim, shape.block_size)


def _arguments(shape: AttentionShape, layout: KVLayout) -> tuple[Any, ...]:
    """Queries and cache of a layer; block tables, lengths and starts of the step."""
    heads, batch = shape.heads, shape.batch
    return (
        jax.ShapeDtypeStruct((batch.num_tokens, heads.num_heads, heads.head_dim), jnp.bfloat16),
        tuple(jax.ShapeDtypeStruct(array, layout.array_dtype) for array in layout.shapes(shape.num_blocks)),
        jax.ShapeDtypeStruct((batch.num_seqs, shape.blocks_per_seq), jnp.int32),
        jax.ShapeDtypeStruct((batch.num_seqs,), jnp.int32),
        jax.ShapeDtypeStruct((batch.num_seqs + 1,), jnp.int32),
    )


def attention_options(shape: AttentionShape) -> dict[str, Any]:
    """The wrapper's static options; a cache of one byte a number is scaled."""
    scale = 1.0 if shape.kv_dtype == "bfloat16" else 1 / 64
    return {
        "scale": shape.heads.head_dim**-0.5,
        "sliding_window": shape.heads.sliding_window,
        "k_scale": scale,
        "v_scale": scale,
    }


def kv_layout(shape: AttentionShape, backend: str) -> KVLayout:
    """The cache of one layer."""
    return KVLayout(
        backend=backend,
        block_size=shape.block_size,
        num_kv_heads=shape.heads.num_kv_heads,
        head_dim=shape.heads.head_dim,
        dtype=jnp.dtype(shape.kv_dtype),
    )


class _Row(NamedTuple):
    """Some queries of one sequence, which attend together, and the context that they see."""

    num_queries: int
    first_block: int
    end: int  # tokens


class _Walk(NamedTuple):
    """What the rows of one kernel add up to."""

    rows: int
    tiles: int
    parts: int  # of the tiles: as much context as is computed at a time
    masked: int  # of the parts: not every query sees all of it
    masked_steps: int  # into which these are cut
    blocks: int  # copied


def _rows(shape: AttentionShape, query_tile: int, *, is_decode: bool) -> list[_Row]:
    """Cuts the sequences that a kernel takes, those with one query or those with several, as the kernels do."""
    rows = []
    for query_len, seq_len in zip(shape.batch.query_lens, shape.batch.seq_lens, strict=True):
        if (query_len == 1) == is_decode:
            for offset in range(0, query_len, query_tile):
                num_queries = min(query_tile, query_len - offset)
                end = seq_len - query_len + offset + num_queries
                window = shape.heads.sliding_window
                first_visible = max(end - num_queries - window + 1, 0) if window else 0
                rows.append(_Row(num_queries, first_visible // shape.block_size, end))
    return rows


def _tpu_plan(shape: AttentionShape, layout: KVLayout, sizes: TileSizes) -> tuple[Work, dict[str, Trips]]:
    options: dict[str, Any] = {
        "num_kv_heads": shape.heads.num_kv_heads,
        "group": padded_group(shape.heads.num_heads // shape.heads.num_kv_heads),
        "head_dim": shape.heads.head_dim,
        "block_size": shape.block_size,
        "table_width": shape.blocks_per_seq,
        "kv_dtype": layout.dtype,
        "q_dtype": jnp.dtype(jnp.bfloat16),
        "scale": 1.0,
        "v_scale": 1.0,
        "sliding_window": shape.heads.sliding_window,
        "logit_soft_cap": None,
        "has_sinks": False,
        "sizes": sizes,
    }
    decode, prefill = decode_config(**options), prefill_config(**options)
    walks = {
        "decode": _walk(decode, _rows(shape, 1, is_decode=True)),
        "prefill": _walk(prefill, _rows(shape, prefill.query_tile, is_decode=False)),
    }
    bodies = {name: (walk.rows, walk.tiles, walk.parts) for name, walk in walks.items()}
    num_parts = max(walks["prefill"].parts, 1)
    masked, whole = walks["prefill"].masked_steps / num_parts, 1 - walks["prefill"].masked / num_parts
    copies = {name: walk.blocks / max(walk.tiles, 1) for name, walk in walks.items()}
    trips = {
        "paged_attention_decode": Trips(bodies["decode"], copies["decode"]),
        # Some KV heads at a time, and a version with masks and one without.
        "paged_attention_prefill": Trips(
            (*bodies["prefill"], walks["prefill"].parts * (prefill.num_kv_heads // heads_at_a_time(prefill))),
            copies["prefill"],
            arms=(masked, whole),
        ),
    }
    main = decode if walks["decode"].parts > walks["prefill"].parts else prefill
    padded_qo = 2 * shape.batch.num_tokens * decode.num_heads * decode.width * 2
    work = Work(
        needed_bytes=shape.needed_bytes,
        needed_flops=shape.needed_flops,
        moved_bytes=sum(walk.blocks for walk in walks.values()) * layout.block_bytes + padded_qo,
        first_bytes=min(main.blocks_per_tile, shape.blocks_per_seq) * layout.block_bytes,
        kv_tokens=walks["decode"].parts * decode.compute_tokens if shape.batch.is_decode else 0,
        product_width=shape.heads.head_dim,
    )
    return work, trips


def _walk(config: TpuConfig, rows: list[_Row]) -> _Walk:
    """Follows tpu_pipeline.py and, for masks, tpu_prefill.py."""
    tiles = parts = masked = masked_steps = blocks = 0
    for row in rows:
        row_blocks = math.ceil(row.end / config.block_size) - row.first_block
        blocks += row_blocks
        tiles += math.ceil(row_blocks / config.blocks_per_tile)
        first_query = row.end - row.num_queries
        for first_key in range(row.first_block * config.block_size, row.end, config.compute_tokens):
            parts += 1
            is_whole = first_key + config.compute_tokens - 1 <= first_query
            if config.sliding_window is not None:
                is_whole &= first_key > first_query + config.query_tile - 1 - config.sliding_window
            if not is_whole:
                masked += 1
                masked_steps += math.ceil(min(row.end - first_key, config.compute_tokens) / config.masked_tokens)
    return _Walk(len(rows), tiles, parts, masked, masked_steps, blocks)


def _gpu_plan(shape: AttentionShape, layout: KVLayout) -> tuple[Work, dict[str, Trips]]:
    """Trips are the chunks of all programs of the grid together. Context is read per tile of queries."""
    from pallas_kernels.paged_attention.triton_tiling import Tiling, decode_tiling, prefill_tiling

    heads, batch = shape.heads, shape.batch
    group, max_context = heads.num_heads // heads.num_kv_heads, shape.blocks_per_seq * shape.block_size
    prefill = prefill_tiling(group, heads.head_dim, is_float32=False)
    decode = decode_tiling(
        group, heads.head_dim, layout.dtype.itemsize, batch.num_seqs, heads.num_kv_heads, max_context
    )
    trips, moved = {}, 2 * 2 * batch.num_tokens * heads.num_heads * heads.head_dim
    tilings: dict[str, Tiling] = {"decode": decode, "prefill": prefill}
    for name, tiling in tilings.items():
        chunks = tokens = 0
        for row in _rows(shape, tiling.queries, is_decode=name == "decode"):
            first = max(row.end - row.num_queries - heads.sliding_window + 1, 0) if heads.sliding_window else 0
            chunks += math.ceil(row.end / tiling.chunk) - first // tiling.chunk
            tokens += row.end - first
        programs = heads.num_kv_heads * tiling.head_tiles
        trips[f"paged_attention_{name}"] = Trips((chunks * programs,))
        moved += tokens * tiling.head_tiles * 2 * heads.num_kv_heads * heads.head_dim * layout.dtype.itemsize
    return Work(shape.needed_bytes, shape.needed_flops, moved), trips
