"""Paged attention for TPUs: one kernel for sequences with a single query, one for all others.

Both walk over lists of rows that are made here, from the batch's metadata, by plain XLA (the same for every layer, so
that it is computed once a step). tpu_pipeline.py moves the data, tpu_decode.py and tpu_prefill.py compute.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_decode, tpu_prefill
from pallas_kernels.paged_attention.flash import LOG2_E
from pallas_kernels.paged_attention.kv_layout import LANES, num_kv_heads_of
from pallas_kernels.paged_attention.tpu_config import (
    DEFAULT_SIZES,
    VMEM_LIMIT_BYTES,
    TileSizes,
    TpuConfig,
    decode_config,
    prefill_config,
)
from pallas_kernels.paged_attention.tpu_pipeline import Buffers, Work, run


def paged_attention_tpu(
    q: jax.Array,  # [T, H, D]
    kv: jax.Array,  # [N, planes, P, 128]
    block_tables: jax.Array,  # [S, B]
    seq_lens: jax.Array,  # [S]
    query_start_loc: jax.Array,  # [S + 1]
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sizes: TileSizes = DEFAULT_SIZES,
    interpret: Any = False,
) -> jax.Array:
    """See pallas_kernels.paged_attention.paged_attention. `interpret` is pallas_call's."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = num_kv_heads_of((kv,), head_dim)
    options: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "group": num_heads // num_kv_heads,
        "head_dim": head_dim,
        "block_size": kv.shape[2],
        "table_width": block_tables.shape[1],
        "kv_dtype": kv.dtype,
        "q_dtype": q.dtype,
        "scale": scale * k_scale,
        "v_scale": v_scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "has_sinks": sinks is not None,
        "sizes": sizes,
    }
    decode, prefill = decode_config(**options), prefill_config(**options)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, decode.width - head_dim)))
    grouped = padded.reshape(num_tokens, num_kv_heads, -1, decode.width)
    metadata = (block_tables, seq_lens, query_start_loc)
    call = functools.partial(_call, kv=kv, sinks=sinks, interpret=interpret)
    out = call(decode, tpu_decode, decode_work(decode, *metadata), grouped, None)
    if num_tokens > 1:
        out = call(prefill, tpu_prefill, prefill_work(prefill, *metadata, num_tokens=num_tokens), grouped, out)
    first_lane = LANES // 2 if decode.planes_per_head == 1 else 0
    return out.reshape(num_tokens, num_heads, -1)[:, :, first_lane : first_lane + head_dim]


def decode_work(config: TpuConfig, block_tables: jax.Array, seq_lens: jax.Array, query_start_loc: jax.Array) -> Work:
    """Lists the sequences with one query, in order. R = S."""
    is_single = query_start_loc[1:] - query_start_loc[:-1] == 1
    seq = jnp.argsort(~is_single, stable=True).astype(jnp.int32)
    end = seq_lens[seq]
    ones = jnp.ones_like(seq)
    return _work(config, jnp.sum(is_single), seq, query_start_loc[seq], ones, end, block_tables)


def prefill_work(
    config: TpuConfig,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    num_tokens: int,
) -> Work:
    """Cuts the sequences with several queries into tiles, in order. R is what num_tokens and S allow."""
    num_seqs, size = block_tables.shape[0], config.query_tile
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    num_tiles = jnp.where(query_lens > 1, (query_lens + size - 1) // size, 0)
    last_tile = jnp.cumsum(num_tiles)
    row = jnp.arange(num_tokens // size + min(num_seqs, num_tokens // 2))
    seq = jnp.minimum(jnp.searchsorted(last_tile, row, side="right"), num_seqs - 1)
    offset = (row - (last_tile - num_tiles)[seq]) * size
    num_queries = jnp.clip(query_lens[seq] - offset, 0, size)
    end = seq_lens[seq] - query_lens[seq] + offset + num_queries
    return _work(config, last_tile[-1], seq, query_start_loc[seq] + offset, num_queries, end, block_tables)


def _work(
    config: TpuConfig,
    num_rows: jax.Array,
    seq: jax.Array,
    token: jax.Array,
    num_queries: jax.Array,
    end: jax.Array,
    block_tables: jax.Array,
) -> Work:
    first_block = jnp.zeros_like(end)
    if config.sliding_window is not None:
        first_visible = end - num_queries - config.sliding_window + 1
        first_block = jnp.maximum(first_visible, 0) // config.block_size
    rows = (seq, token, num_queries, first_block, end)
    seq, token, num_queries, first_block, end = (column.astype(jnp.int32) for column in rows)
    tables = block_tables.astype(jnp.int32).reshape(-1)
    return Work(num_rows.astype(jnp.int32)[None], seq, token, num_queries, first_block, end, tables)


def _call(
    config: TpuConfig,
    module: Any,
    work: Work,
    q: jax.Array,
    out: jax.Array | None,
    *,
    kv: jax.Array,
    sinks: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel of one module. With `out`: [T, K, G, D] only the work's tokens are written to it, in place."""
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    operands, specs = [*work, q, kv], [hbm, hbm]
    if sinks is not None:
        operands.append(module.spread_sinks(config, sinks.astype(jnp.float32) * LOG2_E))
        specs.append(vmem)
    aliases = {}
    if out is not None:
        aliases = {len(operands): 0}
        operands.append(out)
        specs.append(hbm)
    query_shape = (2, config.query_tile, config.num_kv_heads, config.group, config.width)
    buffers = [
        pltpu.VMEM(query_shape, q.dtype),
        pltpu.VMEM((2, config.blocks_per_tile, *kv.shape[1:]), kv.dtype),
        pltpu.VMEM(query_shape, q.dtype),
        *(pltpu.SemaphoreType.DMA((2,)),) * 3,
    ]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(work),
        grid=(1,),
        in_specs=specs,
        out_specs=hbm,
        scratch_shapes=[*buffers, *module.scratch_shapes(config)],
    )
    return pl.pallas_call(
        functools.partial(_kernel, config, module, len(operands)),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
        name=f"paged_attention_{module.__name__.rsplit('_', 1)[1]}",
    )(*operands)


def _kernel(config: TpuConfig, module: Any, num_operands: int, *refs: Any) -> None:
    """Gives the refs their names: operands in _call's order, then the result, then scratch memory."""
    num_scalars = len(Work._fields)
    work, (q, kv, *others) = Work(*refs[:num_scalars]), refs[num_scalars:num_operands]
    out, *scratch = refs[num_operands:]
    buffers, own = Buffers(*scratch[: len(Buffers._fields)]), scratch[len(Buffers._fields) :]
    sinks = others[0] if config.has_sinks else None
    run(config, work, q, kv, out, buffers, module.make_compute(config, sinks, *own))
