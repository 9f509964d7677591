"""Batches for attention kernels, poisoned wherever nobody may look, and an oracle in float64 to compare with."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import KVLayout


class AttentionBatch(NamedTuple):
    """The arguments of a paged attention in the split layout, as numpy arrays."""

    q: np.ndarray  # [T, H, D]
    k_cache: np.ndarray  # [N, P, K, D]
    v_cache: np.ndarray  # [N, P, K, D]
    block_tables: np.ndarray  # [S, B]
    seq_lens: np.ndarray  # [S]
    query_start_loc: np.ndarray  # [S + 1]

    @property
    def num_real(self) -> int:
        """Tokens that aren't padding."""
        return int(self.query_start_loc[-1])

    def pack(self, backend: str, *, values_are_keys: bool = False) -> tuple[jax.Array, ...]:
        """Returns the cache in a backend's layout."""
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        layout = KVLayout(
            backend=backend,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.k_cache.dtype,
            values_are_keys=values_are_keys,
        )
        return layout.pack(jnp.asarray(self.k_cache), jnp.asarray(self.v_cache))


def make_batch(
    sequences: list[tuple[int, int]],
    *,
    num_seqs: int,
    num_tokens: int,
    table_width: int,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_blocks: int | None = None,
    seed: int = 0,
) -> AttentionBatch:
    """Draws a batch whose null block, free slots and padding tokens are NaN.

    Args:
      sequences: (queries, tokens before them) of each sequence; no queries: padding, or a sequence that waits.
      num_seqs: S, at least len(sequences).
      num_tokens: T.
      table_width: B.
      block_size: P.
      num_kv_heads: K.
      group: H / K.
      head_dim: D.
      num_blocks: N; None: those that are needed and one that nobody owns.
      seed: Of the numbers.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-(queries + before) // block_size) if queries else 0 for queries, before in sequences]
    num_blocks = num_blocks or sum(needed) + 2
    caches = np.full((2, num_blocks, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, num_blocks))
    block_tables = np.zeros((num_seqs, table_width), np.int32)
    seq_lens, query_lens = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, np.int32)
    for s, (queries, before) in enumerate(sequences):
        seq_lens[s], query_lens[s] = (queries + before if queries else 0), queries
        mine, ids = ids[: needed[s]], ids[needed[s] :]
        block_tables[s, : needed[s]] = mine
        for index, block in enumerate(mine):
            num_rows = min(block_size, queries + before - index * block_size)
            caches[:, block, :num_rows] = rng.standard_normal((2, num_rows, num_kv_heads, head_dim))
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.standard_normal((num_tokens, num_kv_heads * group, head_dim)).astype(np.float32)
    q[query_start_loc[-1] :] = np.nan
    return AttentionBatch(q, caches[0], caches[1], block_tables, seq_lens, query_start_loc)


def attention_oracle(
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> np.ndarray:
    """Computes attention one sequence, one token and one head at a time. Returns the real tokens' rows, float64."""
    num_heads, group = batch.q.shape[1], batch.q.shape[1] // batch.k_cache.shape[2]
    out = np.zeros((batch.num_real, *batch.q.shape[1:]), np.float64)
    for s, seq_len in enumerate(batch.seq_lens):
        k, v = (_rows(cache, batch.block_tables[s], seq_len) for cache in (batch.k_cache, batch.v_cache))
        first, last = batch.query_start_loc[s], batch.query_start_loc[s + 1]
        for t in range(first, last):
            end = seq_len - (last - t) + 1
            start = 0 if sliding_window is None else max(0, end - sliding_window)
            for h in range(num_heads):
                scores = k[start:end, h // group] @ batch.q[t, h].astype(np.float64) * k_scale * scale
                if logit_soft_cap is not None:
                    scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - scores.max()))
                out[t, h] = weights @ v[start:end, h // group] / total * v_scale
    return out


def _rows(cache: np.ndarray, block_table: np.ndarray, seq_len: int) -> np.ndarray:
    return cache[block_table].reshape(-1, *cache.shape[2:])[:seq_len].astype(np.float64)  # [seq_len, K, D]
