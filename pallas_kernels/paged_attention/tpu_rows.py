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
    """Returns the memory in which words are picked by strides: [W / 128, tokens * stride, 128].

    Strided loads take 128 lanes, so that wider rows are cut.
    """
    num_words = config.query_tile * _stride(config) if _is_strided(config) else 8
    return pltpu.VMEM((config.width // LANES, num_words, LANES), jnp.uint32)


def stage_queries(config: TpuConfig, tile: Any, words: Any) -> None:
    """Prepares the reading of tile: [tokens, H, W]. Call it before load_rows."""
    if _is_strided(config):
        for tokens in _copied_tokens(config):
            chunk = pltpu.bitcast(tile[tokens], jnp.uint32)
            _write(words, _words_of(config, tokens), chunk.reshape(-1, config.width))


def chunks(config: TpuConfig) -> list[slice]:
    """Returns which rows of a KV head are loaded and stored at a time. Fewer rows stay in registers."""
    size = config.query_tile * (config.pack if _is_strided(config) else config.group)
    return [slice(first, first + size) for first in range(0, config.query_tile * config.group, size)]


def load_rows(config: TpuConfig, tile: Any, words: Any, head: int, chunk: slice) -> jax.Array:
    """Returns the queries of one KV head in one of the chunks: [R, W] float32."""
    if not _is_strided(config):
        mine = tile[:, head * config.group : (head + 1) * config.group].astype(jnp.float32)
        return mine.reshape(-1, config.width)
    return pltpu.bitcast(_read(words, _word_index(config, head, chunk)), config.q_dtype).astype(jnp.float32)


def store_rows(config: TpuConfig, tile: Any, words: Any, head: int, chunk: slice, rows: jax.Array) -> None:
    """Puts the results of one KV head in one chunk where unstage_results finds them, or into the tile itself."""
    rows = rows.astype(config.q_dtype)
    if not _is_strided(config):
        mine = rows.reshape(config.query_tile, config.group, config.width)
        tile[:, head * config.group : (head + 1) * config.group] = mine
        return
    _write(words, _word_index(config, head, chunk), pltpu.bitcast(rows, jnp.uint32))


def unstage_results(config: TpuConfig, tile: Any, words: Any) -> None:
    """Fills tile: [tokens, H, W] with what store_rows stored for every head."""
    if _is_strided(config):
        for tokens in _copied_tokens(config):
            chunk = _read(words, _words_of(config, tokens))
            shape = (tokens.stop - tokens.start, _words_per_token(config), config.width)
            tile[tokens] = pltpu.bitcast(chunk.reshape(shape), config.q_dtype)


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


def _stride(config: TpuConfig) -> int:
    """Returns the words from one token to the next.

    Memory has 32 banks, a row of 128 lanes in each; with a stride of 16 rows only two of eight rows can be loaded at
    once, with one of 24 four.
    """
    per_token = _words_per_token(config)
    return per_token + 8 if per_token % 16 == 0 else per_token


def _copied_tokens(config: TpuConfig) -> list[slice]:
    """Returns the tokens whose words are copied at a time: they lie one after another."""
    size = 1 if _stride(config) > _words_per_token(config) else _CHUNK
    return [slice(first, first + size) for first in range(0, config.query_tile, size)]


def _words_of(config: TpuConfig, tokens: slice) -> slice:
    first = tokens.start * _stride(config)
    return slice(first, first + (tokens.stop - tokens.start) * _words_per_token(config))


def _word_index(config: TpuConfig, head: int, chunk: slice) -> Any:
    """Returns where in the words one chunk of a KV head's rows is."""
    number = chunk.start // (config.query_tile * config.pack)
    return pl.ds(head * (config.group // config.pack) + number, config.query_tile, _stride(config))
