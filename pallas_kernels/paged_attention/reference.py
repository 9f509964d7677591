"""Paged attention in its plainest form: the definition of correct. One token after another, all in float32."""

import jax
import jax.numpy as jnp


def paged_attention_reference(
    q: jax.Array,  # [T, H, D]
    k_cache: jax.Array,  # [N, P, K, D]
    v_cache: jax.Array | None,  # [N, P, K, D]; None: values are keys
    block_tables: jax.Array,  # [S, B]
    seq_lens: jax.Array,  # [S]
    query_start_loc: jax.Array,  # [S + 1]
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [H]
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> jax.Array:
    """See pallas_kernels.paged_attention.paged_attention. Returns [T, H, D] float32, zeros for padding tokens."""
    v_cache = k_cache if v_cache is None else v_cache
    num_tokens, num_heads, _ = q.shape
    num_kv_heads = k_cache.shape[2]
    num_seqs, table_width = block_tables.shape
    context = jnp.arange(table_width * k_cache.shape[1])  # [C], positions that a table can hold
    exact = jax.lax.Precision.HIGHEST

    def attend(token: jax.Array) -> jax.Array:
        seq = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right") - 1, 0, num_seqs - 1)
        position = seq_lens[seq] - (query_start_loc[seq + 1] - token)
        visible = context <= position
        if sliding_window is not None:
            visible &= context > position - sliding_window
        k = _context(k_cache, block_tables[seq], visible) * k_scale  # [C, K, D]
        v = _context(v_cache, block_tables[seq], visible) * v_scale
        grouped = q[token].astype(jnp.float32).reshape(num_kv_heads, num_heads // num_kv_heads, -1)
        scores = jnp.einsum("kgd,ckd->kgc", grouped, k, precision=exact).reshape(num_heads, -1) * scale
        if logit_soft_cap is not None:
            scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, sinks.astype(jnp.float32)[:, None]], axis=1)
        probs = jax.nn.softmax(scores, axis=1)[:, : context.size]
        probs = probs.reshape(num_kv_heads, num_heads // num_kv_heads, -1)
        out = jnp.einsum("kgc,ckd->kgd", probs, v, precision=exact).reshape(num_heads, -1)
        return jnp.where(token < query_start_loc[-1], out, 0.0)

    return jax.lax.map(attend, jnp.arange(num_tokens))


def _context(cache: jax.Array, block_table: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns one sequence's rows [C, K, D] in float32, those that aren't visible as zeros."""
    rows = cache[block_table].reshape(-1, *cache.shape[2:]).astype(jnp.float32)
    return jnp.where(visible[:, None, None], rows, 0.0)
