"""Attention over a KV cache that lies in blocks."""

from importlib import import_module

import jax

from pallas_kernels.backends import choose_backend
from pallas_kernels.paged_attention.kv_layout import KVLayout, layout_of_arrays

__all__ = ["KVLayout", "paged_attention"]

_FUNCTIONS = {name: f"paged_attention_{name}" for name in ("tpu", "triton", "xla", "reference")}


def paged_attention(
    q: jax.Array,
    kv: tuple[jax.Array, ...],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str | None = None,
) -> jax.Array:
    """Computes causal attention of each sequence's newest tokens over its blocks, grouped-query heads included.

    The keys and values of the new tokens are already in the cache. Sequences with one token and sequences with many
    may be mixed, in any order. What no token may see (block 0, rows past a sequence's end, padding) is never used, so
    it may hold anything, NaN included; the same goes for table entries of blocks that lie before every window.

    Args:
      q: [T, H, D] queries, sequence after sequence.
      kv: One layer's cache, in the backend's KVLayout. H is a multiple of K. Where the layout has two arrays and values
        are keys too, the keys' alone.
      block_tables: [S, B] int32, physical block ids in logical order.
      seq_lens: [S] int32, tokens of each sequence with this step's; 0 for padding.
      query_start_loc: [S + 1] int32, first query of each sequence.
      scale: Multiplies the scores; usually D ** -0.5. This and all that follows is static but for sinks.
      sliding_window: A token sees itself and the sliding_window - 1 tokens before it. None: all.
      logit_soft_cap: Scores become cap * tanh(score / cap), after the scale and before the mask. None: they don't.
      sinks: [H] one logit a head that takes part in the softmax and has no value. None: no such thing.
      k_scale: What a stored key is multiplied with; for int8 and fp8 caches.
      v_scale: The same of values.
      backend: One of pallas_kernels.BACKENDS; None chooses, see pallas_kernels.backends.

    Returns:
      [T, H, D] in q's dtype; rows of padding tokens hold rubbish.

    Raises:
      ValueError: The shapes don't fit, or an option is out of its range.
    """
    backend = choose_backend(backend)
    _check_shapes(q, kv, backend)
    _check_options(q, sliding_window, logit_soft_cap, sinks)
    module = import_module(f"pallas_kernels.paged_attention.{backend}")
    out = getattr(module, _FUNCTIONS[backend])(
        q,
        *(kv if backend == "tpu" or len(kv) == 2 else (*kv, None)),
        block_tables,
        seq_lens,
        query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return out.astype(q.dtype)


def _check_shapes(q: jax.Array, kv: tuple[jax.Array, ...], backend: str) -> None:
    _, num_heads, head_dim = q.shape
    shapes = " and ".join(str(array.shape) for array in kv)
    if len(kv) not in ((1,) if backend == "tpu" else (1, 2)):
        raise ValueError(f"a cache of {len(kv)} arrays ({shapes}) is not in the layout of backend {backend}")
    layout = layout_of_arrays(kv, head_dim, backend)
    if tuple(array.shape[1:] for array in kv) != layout.block_shapes or num_heads % layout.num_kv_heads:
        raise ValueError(f"q {q.shape} doesn't fit a KV cache of {shapes}")


def _check_options(
    q: jax.Array, sliding_window: int | None, logit_soft_cap: float | None, sinks: jax.Array | None
) -> None:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise ValueError(f"logit_soft_cap must be positive, got {logit_soft_cap}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be one a query head, [{q.shape[1]}], got {sinks.shape}")
