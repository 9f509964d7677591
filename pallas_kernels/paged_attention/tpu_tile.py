"""What decode and prefill do alike with a tile in VMEM: [blocks, planes, P, 128], see kv_layout.py."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.kv_layout import LANES, piece_rows
from pallas_kernels.paged_attention.tpu_config import TpuConfig


class Blocks(NamedTuple):
    """Some of a tile's blocks, one after another."""

    first: int | jax.Array
    num_blocks: int


def load_keys(config: TpuConfig, kv: jax.Array, blocks: Blocks, head: int | jax.Array) -> jax.Array:
    """Returns the keys of one KV head in some blocks of the tile: [blocks * P, width]."""
    return _load(config, kv, blocks, head, config.key_planes)


def load_values(config: TpuConfig, kv: jax.Array, blocks: Blocks, head: int | jax.Array) -> jax.Array:
    """Returns the values like load_keys. If one plane holds both, they are in its upper lanes."""
    return _load(config, kv, blocks, head, config.value_planes)


def clear_tail(config: TpuConfig, kv: jax.Array, num_keys: jax.Array) -> None:
    """Zeroes the values past the first num_keys tokens, as far as they will be computed with.

    Their weights are zero, but what lies there may be NaN, and zero times that is NaN. Keys may stay: scores are
    masked by selection.
    """
    rows = piece_rows(config.block_size, kv.dtype)
    per_block = config.block_size // rows
    computed = pl.cdiv(num_keys, config.masked_tokens) * config.masked_tokens

    def clear(group: jax.Array, _: None) -> None:
        position = group * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
        offset = pl.multiple_of(jax.lax.rem(group, per_block) * rows, rows)
        for head in range(config.num_kv_heads):
            for plane in config.value_planes:
                where = (group // per_block, head * config.planes_per_head + plane, pl.ds(offset, rows))
                values = kv[where].astype(jnp.float32)
                kv[where] = jnp.where(position < num_keys, values, 0.0).astype(kv.dtype)

    jax.lax.fori_loop(num_keys // rows, computed // rows, clear, None)


def multiply(config: TpuConfig, left: jax.Array, right: jax.Array, *, transpose: bool = False) -> jax.Array:
    """Returns left @ right in float32, or left @ right.T."""
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if config.compute_dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _load(config: TpuConfig, kv: jax.Array, blocks: Blocks, head: int | jax.Array, planes: range) -> jax.Array:
    first = head * config.planes_per_head
    index = pl.ds(blocks.first, blocks.num_blocks)
    parts = [kv[index, first + plane].reshape(blocks.num_blocks * config.block_size, LANES) for plane in planes]
    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    return rows.astype(config.compute_dtype)
