"""Real arguments for programs of the table, and what they must return: for a machine that has the chip."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot.attention import attention_options, kv_layout
from pallas_kernels.aot.shapes import AttentionShape
from pallas_kernels.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One program to run."""

    arguments: tuple[Any, ...]  # arrays, as the program takes them
    expected: Callable[[], Any]  # what it must return, by the reference
    tolerance: float  # of the error, relative to 1 + the size of the expected number


def attention_trial(shape: AttentionShape, backend: str) -> Trial:
    """Random queries over a random cache whose blocks were handed out at random."""
    layout = kv_layout(shape, backend)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (shape.batch.num_tokens, shape.heads.num_heads, shape.heads.head_dim))
    q = q.astype(jnp.bfloat16)
    rows = (shape.num_blocks, shape.block_size, shape.heads.num_kv_heads, shape.heads.head_dim)
    k, v = (random_rows(key, rows, layout.dtype) for key in keys[1:])
    metadata = tuple(jnp.asarray(array) for array in attention_metadata(shape))

    def expected() -> jax.Array:
        options = {**attention_options(shape), "backend": "reference"}
        return jax.jit(lambda *arguments: paged_attention(*arguments, **options))(q, (k, v), *metadata)

    return Trial(arguments=(q, jax.jit(layout.pack)(k, v), *metadata), expected=expected, tolerance=1e-2)


def attention_metadata(shape: AttentionShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns block tables [S, B], sequence lengths [S] and query starts [S + 1], all int32; block 0 is nobody's."""
    batch, width = shape.batch, shape.blocks_per_seq
    ids = np.random.default_rng(0).permutation(np.arange(1, shape.num_blocks))[: batch.num_seqs * width]
    starts = np.cumsum([0, *batch.query_lens])
    tables = ids.reshape(batch.num_seqs, width)
    return tables.astype(np.int32), np.asarray(batch.seq_lens, np.int32), starts.astype(np.int32)


def random_rows(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draws numbers of variance about 1, or of the whole range of int8; in fp8 up to its 448 / 64 = 7 by the scale."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -127, 128, dtype)
    spread = 64.0 if dtype.itemsize == 1 else 1.0
    return (jax.random.normal(key, shape, jnp.bfloat16) * spread).astype(dtype)
