"""Paged attention for TPUs: one kernel for sequences with a single query, one for all others.

tpu_pipeline.py finds the work and moves the data, tpu_decode.py and tpu_prefill.py compute.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_decode, tpu_prefill
from pallas_kernels.paged_attention.block_sizes import AttentionKey, find_tile_sizes
from pallas_kernels.paged_attention.flash import LOG2_E
from pallas_kernels.paged_attention.kv_layout import LANES, planes_per_head
from pallas_kernels.paged_attention.tpu_config import (
    VMEM_LIMIT_BYTES,
    TileSizes,
    TpuConfig,
    decode_config,
    padded_group,
    prefill_config,
)
from pallas_kernels.paged_attention.tpu_pipeline import Batch, Buffers, run

_STATIC = ("scale", "sliding_window", "logit_soft_cap", "k_scale", "v_scale", "sizes", "interpret")


# Traced and lowered once for all layers that are alike: half a second each.
@functools.partial(jax.jit, static_argnames=_STATIC)
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
    sizes: TileSizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See pallas_kernels.paged_attention.paged_attention.

    Without `sizes` those are taken that were tuned for the chip. `interpret` is pallas_call's.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1] // planes_per_head(head_dim)
    group = num_heads // num_kv_heads
    key = AttentionKey(kv.dtype.name, num_heads, num_kv_heads, head_dim, block_size=kv.shape[2])
    options: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "group": padded_group(group),
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
        "sizes": sizes or find_tile_sizes(_chip(), key),
    }
    decode, prefill = decode_config(**options), prefill_config(**options)
    more_heads, batch = decode.group - group, Batch(block_tables.reshape(-1), seq_lens, query_start_loc)
    padding = ((0, 0), (0, 0), (0, more_heads), (0, decode.width - head_dim))
    padded = jnp.pad(q.reshape(num_tokens, num_kv_heads, group, head_dim), padding)
    padded = padded.reshape(num_tokens, decode.num_heads, decode.width)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(num_kv_heads, group), ((0, 0), (0, more_heads))).reshape(-1)
    call = functools.partial(_call, batch=batch, q=padded, kv=kv, sinks=sinks, interpret=interpret)
    out = call(decode, tpu_decode, out=None)
    if num_tokens > 1:
        out = call(prefill, tpu_prefill, out=out)
    first_lane = LANES // 2 if decode.planes_per_head == 1 else 0
    out = out.reshape(num_tokens, num_kv_heads, decode.group, decode.width)
    return out[:, :, :group, first_lane : first_lane + head_dim].reshape(q.shape)


def _chip() -> str | None:
    """The chip that is compiled for, as block_sizes names it. It need not be there; None in an interpreter."""
    if not pltpu.is_tpu_device():
        return None
    name = pltpu.get_tpu_info().chip_version.value
    return name if name.startswith("v") else f"tpu{name}"


def _call(
    config: TpuConfig,
    module: Any,
    *,
    batch: Batch,
    q: jax.Array,
    kv: jax.Array,
    out: jax.Array | None,
    sinks: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel of one module. With `out`: [T, H, W] its own tokens' rows are written to it, in place."""
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    operands, specs = [*batch, q, kv], [hbm, hbm]
    if sinks is not None:
        operands.append(module.spread_sinks(config, sinks.astype(jnp.float32) * LOG2_E))
        specs.append(vmem)
    aliases = {}
    if out is not None:
        aliases = {len(operands): 0}
        operands.append(out)
        specs.append(hbm)
    query_shape = (2, config.query_tile, config.num_heads, config.width)
    buffers = [
        pltpu.VMEM(query_shape, q.dtype),
        pltpu.VMEM((2, config.blocks_per_tile, *kv.shape[1:]), kv.dtype),
        pltpu.VMEM(query_shape, q.dtype),
        *(pltpu.SemaphoreType.DMA((2,)),) * 3,
    ]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(batch),
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
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,  # the interpreter checks them
        ),
        interpret=interpret,
        name=f"paged_attention_{module.__name__.rsplit('_', 1)[1]}",
    )(*operands)


def _kernel(config: TpuConfig, module: Any, num_operands: int, *refs: Any) -> None:
    """Gives the refs their names: operands in _call's order, then the result, then scratch memory."""
    num_scalars = len(Batch._fields)
    batch, (q, kv, *others) = Batch(*refs[:num_scalars]), refs[num_scalars:num_operands]
    out, *scratch = refs[num_operands:]
    buffers, own = Buffers(*scratch[: len(Buffers._fields)]), scratch[len(Buffers._fields) :]
    sinks = others[0] if config.has_sinks else None
    run(config, batch, q, kv, out, buffers, module.make_compute(config, sinks, *own))
