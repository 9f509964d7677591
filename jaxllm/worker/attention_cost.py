"""Measures what one decode step's attention costs beside its products with weights. Loads a model for its sizes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.intmath import cdiv
from jaxllm.layers.linear import project
from jaxllm.model_loader.loader import load_model
from jaxllm.worker.cache_engine import layout_of
from pallas_kernels.paged_attention import KVLayout, paged_attention
from sharding.mesh import make_mesh

CACHE_DTYPES = ("float32", "bfloat16", "int8")
_ROUNDS = 9  # each measures everything once: the best of them counts, since other work only ever adds
_FLOAT32 = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class AttentionCost:
    """One decode step, all layers together.

    Attributes:
      cache_dtype: Of the keys and values.
      attention_us: Microseconds of attention.
      products_us: Microseconds of the products with the weights in float32, logits included.
      share: The former as a share of the latter.
    """

    cache_dtype: str
    attention_us: float
    products_us: float
    share: float


def measure_attention(config: EngineConfig, num_seqs: int, context_len: int) -> list[AttentionCost]:
    """Times float32 queries of num_seqs sequences over context_len tokens each, for every dtype of the cache."""
    mesh = make_mesh(jax.devices()[:1])
    model = load_model(config, mesh, _FLOAT32, _FLOAT32)
    weights = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim == 2]
    draw = np.random.default_rng(0)
    runs: dict[str, Callable[[], Any]] = {"": _products(weights, num_seqs, draw)}
    for cache_dtype in CACHE_DTYPES:
        layout = layout_of(config, mesh, jnp.dtype(cache_dtype), jax.default_backend())
        runs[cache_dtype] = _attention(config, layout, num_seqs, context_len, draw)
    times = _best_us(runs)
    return [AttentionCost(name, times[name], times[""], times[name] / times[""]) for name in CACHE_DTYPES]


def _products(weights: list[jax.Array], num_rows: int, draw: np.random.Generator) -> Callable[[], Any]:
    """Returns what multiplies rows with each weight: [O, I]. An embedding counts once, as the logits' weight."""
    rows = {
        size: jnp.asarray(draw.standard_normal((num_rows, size), np.float32))
        for size in {weight.shape[1] for weight in weights}
    }
    multiply = jax.jit(project)
    return lambda: [multiply(rows[weight.shape[1]], weight) for weight in weights]


def _attention(
    config: EngineConfig, layout: KVLayout, num_seqs: int, context_len: int, draw: np.random.Generator
) -> Callable[[], Any]:
    """Returns what attends in each layer, over a cache of its own."""
    model = config.model
    blocks_per_seq = cdiv(context_len, layout.block_size)
    num_blocks = num_seqs * blocks_per_seq + 1
    tables = jnp.asarray(draw.permutation(num_blocks - 1).reshape(num_seqs, blocks_per_seq) + 1, jnp.int32)
    metadata = (tables, jnp.full(num_seqs, context_len, jnp.int32), jnp.arange(num_seqs + 1, dtype=jnp.int32))
    shape = num_seqs, model.num_attention_heads, model.head_dim
    queries = jnp.asarray(draw.standard_normal(shape, np.float32))
    rows = 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim
    caches = [
        layout.pack(*jnp.asarray(draw.integers(-9, 9, rows, np.int8), layout.dtype))
        for _ in range(model.num_hidden_layers)
    ]
    attend = jax.jit(partial(paged_attention, scale=model.head_dim**-0.5))
    return lambda: [attend(queries, cache, *metadata) for cache in caches]


def _best_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the shortest time of each run, in microseconds. They take turns; the first round compiles."""
    best: dict[str, float] = {}
    for index in range(_ROUNDS + 1):
        for name, run in runs.items():
            start_ns = time.perf_counter_ns()
            jax.block_until_ready(run())
            if index:
                best[name] = min(best.get(name, float("inf")), (time.perf_counter_ns() - start_ns) / 1000)
    return best
