"""The kernels that only move KV cache, as rows of the table. On GPUs and CPUs XLA's own scatter does that well."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot.attention import attention_options, kv_layout
from pallas_kernels.aot.program import Program, Trips, Work
from pallas_kernels.aot.shapes import AttentionShape
from pallas_kernels.aot.targets import TpuTarget
from pallas_kernels.aot.trials import Trial, attention_metadata, random_rows
from pallas_kernels.kv_cache_update import copy_blocks, kv_cache_update
from pallas_kernels.kv_cache_update.tpu import MAX_PIECES
from pallas_kernels.paged_attention.kv_layout import KVLayout, piece_rows

_NUM_COPIES = 64


def build_update(shape: AttentionShape, _: TpuTarget) -> Program:
    """Writes the step's new tokens: pieces of one packed register's rows are read, filled in and written back."""
    layout = kv_layout(shape, "tpu")
    options = attention_options(shape)
    function = functools.partial(
        kv_cache_update, k_scale=options["k_scale"], v_scale=options["v_scale"], backend=layout.backend
    )
    rows = jax.ShapeDtypeStruct((shape.batch.num_tokens, shape.heads.num_kv_heads, shape.heads.head_dim), jnp.bfloat16)
    arguments = (_cache(layout, shape), rows, rows, jax.ShapeDtypeStruct((shape.batch.num_tokens,), jnp.int32))
    size = piece_rows(shape.block_size, layout.dtype)
    num_pieces = sum(
        math.ceil(seq / size) - (seq - query) // size
        for query, seq in zip(shape.batch.query_lens, shape.batch.seq_lens, strict=True)
    )
    row_bytes = layout.block_bytes // shape.block_size
    needed_row = 2 * shape.heads.num_kv_heads * shape.heads.head_dim * layout.dtype.itemsize
    work = Work(
        needed_bytes=2 * shape.batch.num_tokens * needed_row,
        needed_flops=0,
        moved_bytes=2 * num_pieces * size * row_bytes + shape.batch.num_tokens * row_bytes,
        first_bytes=size * row_bytes,
    )
    # Beside the main loop, one starts the first half of the pieces that are on their way at once.
    trips = {"kv_cache_update": Trips((num_pieces,), copies=min(num_pieces, MAX_PIECES // 2))}
    return Program(function=function, arguments=arguments, donated=(0,), step_arguments=(3,), work=work, trips=trips)


def build_copy(shape: AttentionShape, _: TpuTarget) -> Program:
    """Copies blocks within one layer's cache, each by one DMA."""
    layout = kv_layout(shape, "tpu")

    def function(kv: tuple[jax.Array, ...], sources: jax.Array, destinations: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(copy_blocks(cache, sources, destinations, backend=layout.backend) for cache in kv)

    ids = jax.ShapeDtypeStruct((_NUM_COPIES,), jnp.int32)
    num_bytes = 2 * _NUM_COPIES * layout.block_bytes
    work = Work(needed_bytes=num_bytes, needed_flops=0, moved_bytes=num_bytes)
    trips = {"copy_blocks": Trips((_NUM_COPIES,))}
    return Program(function=function, arguments=(_cache(layout, shape), ids, ids), donated=(0,), work=work, trips=trips)


def update_trial(shape: AttentionShape, backend: str) -> Trial:
    """Writes random rows to the slots of the step's tokens."""
    layout = kv_layout(shape, backend)
    cache_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    kv = _random_cache(cache_key, layout, shape)
    rows = (shape.batch.num_tokens, shape.heads.num_kv_heads, shape.heads.head_dim)
    k, v = (jax.random.normal(key, rows, jnp.bfloat16) for key in (k_key, v_key))
    slots = jnp.asarray(_slots(shape))
    before = layout.unpack(jax.tree.map(jnp.copy, kv))
    options = attention_options(shape)

    def expected() -> tuple[jax.Array, ...]:
        updated = kv_cache_update(
            before, k, v, slots, k_scale=options["k_scale"], v_scale=options["v_scale"], backend="reference"
        )
        return layout.pack(*updated)

    return Trial(arguments=(kv, k, v, slots), expected=expected, tolerance=0)


def copy_trial(shape: AttentionShape, backend: str) -> Trial:
    """Copies random blocks to others."""
    layout = kv_layout(shape, backend)
    kv = _random_cache(jax.random.key(0), layout, shape)
    ids = np.random.default_rng(0).permutation(np.arange(1, shape.num_blocks))[: 2 * _NUM_COPIES].astype(np.int32)
    sources, destinations = jnp.asarray(ids[:_NUM_COPIES]), jnp.asarray(ids[_NUM_COPIES:])
    before = jax.tree.map(jnp.copy, kv)

    def expected() -> tuple[jax.Array, ...]:
        return tuple(copy_blocks(cache, sources, destinations, backend="reference") for cache in before)

    return Trial(arguments=(kv, sources, destinations), expected=expected, tolerance=0)


def _cache(layout: KVLayout, shape: AttentionShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(array, layout.array_dtype) for array in layout.shapes(shape.num_blocks))


def _random_cache(key: jax.Array, layout: KVLayout, shape: AttentionShape) -> tuple[jax.Array, ...]:
    rows = (shape.num_blocks, shape.block_size, shape.heads.num_kv_heads, shape.heads.head_dim)
    k, v = (random_rows(half, rows, layout.dtype) for half in jax.random.split(key))
    return layout.pack(k, v)


def _slots(shape: AttentionShape) -> np.ndarray:
    """Returns [T] where the step's tokens go, sequence after sequence."""
    tables, seq_lens, starts = attention_metadata(shape)
    slots = [
        table[position // shape.block_size] * shape.block_size + position % shape.block_size
        for table, seq_len, num_tokens in zip(tables, seq_lens, np.diff(starts), strict=True)
        for position in range(seq_len - num_tokens, seq_len)
    ]
    return np.asarray(slots, np.int32)
