"""How the queries of a prefill tile become rows: one KV head's under one another, as the matrix unit wants them.

A tile lies in memory token after token, all heads of a token together: [tokens, H, W]. The rows of one KV head are
scattered over it. Where a strided load can pick them they are ordered

    by pairs of heads, then by token, then by head of the pair        bfloat16, two heads to a 32-bit word
    by head, then by token                                            float32

Otherwise (bfloat16 and an odd group) they are ordered by token, then by head, and the compiler rearranges registers,
which is several times slower.

Example, float32, query_tile 2, heads a and b: rows a0 b0 a1 b1 of the tile become a0 a1 b0 b1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.kv_layout import LANES
from pallas_kernels.paged_attention.tpu_config import TpuConfig

_CHUNK = 16  # tokens that are moved at a time


def scratch_shape(config: TpuConfig) -> Any:
    """Returns the memory in which words are picked by strides: [W / 128, tokens * H / pack, 128].

    Strided loads take 128 lanes, so that wider rows are cut.
    """
    num_words = config.query_tile * _words_per_token(config) if _is_strided(config) else 8
    return pltpu.VMEM((config.width // LANES, num_words, LANES), jnp.uint32)


def stage_queries(config: TpuConfig, tile: Any, words: Any) -> None:
    """Prepares the reading of tile: [tokens, H, W]. Call it before load_rows."""
    if _is_strided(config):
        per_token = _words_per_token(config)
        for first in range(0, config.query_tile, _CHUNK):
            chunk = pltpu.bitcast(tile[first : first + _CHUNK], jnp.uint32)
            _write(words, slice(first * per_token, (first + _CHUNK) * per_token), chunk.reshape(-1, config.width))


def load_rows(config: TpuConfig, tile: Any, words: Any, head: int) -> jax.Array:
    """Returns the queries of one KV head: [tokens * G, W] float32."""
    if not _is_strided(config):
        mine = tile[:, head * config.group : (head + 1) * config.group].astype(jnp.float32)
        return mine.reshape(-1, config.width)
    loaded = [pltpu.bitcast(_read(words, index), config.q_dtype) for index in _word_indices(config, head)]
    return jnp.concatenate(loaded, axis=0).astype(jnp.float32)


def store_rows(config: TpuConfig, tile: Any, words: Any, head: int, rows: jax.Array) -> None:
    """Puts the results of one KV head: [tokens * G, W] where unstage_results finds them, or into the tile itself."""
    rows = rows.astype(config.q_dtype)
    if not _is_strided(config):
        mine = rows.reshape(config.query_tile, config.group, config.width)
        tile[:, head * config.group : (head + 1) * config.group] = mine
        return
    size = config.query_tile * config.pack
    for number, index in enumerate(_word_indices(config, head)):
        _write(words, index, pltpu.bitcast(rows[number * size : (number + 1) * size], jnp.uint32))


def unstage_results(config: TpuConfig, tile: Any, words: Any) -> None:
    """Fills tile: [tokens, H, W] with what store_rows stored for every head."""
    if _is_strided(config):
        per_token = _words_per_token(config)
        for first in range(0, config.query_tile, _CHUNK):
            chunk = _read(words, slice(first * per_token, (first + _CHUNK) * per_token))
            tile[first : first + _CHUNK] = pltpu.bitcast(chunk.reshape(_CHUNK, per_token, config.width), config.q_dtype)


def token_of_rows(config: TpuConfig, rows: slice, lanes: int) -> jax.Array:
    """Returns which token of the tile each row is: [R, lanes] int32."""
    row = rows.start + jax.lax.broadcasted_iota(jnp.int32, (rows.stop - rows.start, lanes), 0)
    if not _is_strided(config):
        return jax.lax.div(row, config.group)
    in_block = row & (config.query_tile * config.pack - 1)
    return jax.lax.shift_right_logical(in_block, config.pack - 1)


def spread_heads(config: TpuConfig, values: jax.Array) -> jax.Array:
    """Gives each row its head's value. values: [G, L] of one KV head; returns [tokens * G, L]."""
    lanes, pack = values.shape[1], config.pack
    if not _is_strided(config):
        spread = jnp.broadcast_to(values[None], (config.query_tile, config.group, lanes))
        return spread.reshape(-1, lanes)
    size = config.query_tile * pack
    is_second = (jax.lax.broadcasted_iota(jnp.int32, (size, lanes), 0) & (pack - 1)) == 1
    blocks = []
    for first in range(0, config.group, pack):
        block = jnp.broadcast_to(values[first : first + 1], (size, lanes))
        if pack == 2:
            block = jnp.where(is_second, values[first + 1 : first + 2], block)
        blocks.append(block)
    return jnp.concatenate(blocks, axis=0)


def _read(words: Any, index: Any) -> jax.Array:
    """Returns words: [n, W], joined from their lane tiles."""
    return jnp.concatenate([words[tile, index] for tile in range(words.shape[0])], axis=1)


def _write(words: Any, index: Any, values: jax.Array) -> None:
    for tile in range(words.shape[0]):
        words[tile, index] = values[:, tile * LANES : (tile + 1) * LANES]


def _is_strided(config: TpuConfig) -> bool:
    return config.group % config.pack == 0


def _words_per_token(config: TpuConfig) -> int:
    return config.num_heads // config.pack


def _word_indices(config: TpuConfig, head: int) -> list[Any]:
    """Returns where in the words each block of a KV head's rows is."""
    per_token, per_head = _words_per_token(config), config.group // config.pack
    return [pl.ds(head * per_head + block, config.query_tile, per_token) for block in range(per_head)]
