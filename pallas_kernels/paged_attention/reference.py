"""Paged attention in its plainest form: the definition of correct. Slow; for tests."""

import numpy as np


def paged_attention_reference(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """Computes causal attention one sequence, one token and one head at a time, in float64.

    Args:
      q: [T, H, D] queries; sequence s owns rows query_start_loc[s] to query_start_loc[s + 1].
      k_cache: [N, P, K, D] keys.
      v_cache: [N, P, K, D] values.
      block_tables: [S, B] block ids.
      seq_lens: [S] tokens of each sequence; its queries are the last of them.
      query_start_loc: [S + 1].
      scale: Multiplies the scores.

    Returns:
      [T, H, D] float64; zero for tokens that no sequence owns.
    """
    num_heads, group = q.shape[1], q.shape[1] // k_cache.shape[2]
    out = np.zeros(q.shape, np.float64)
    for s, seq_len in enumerate(seq_lens):
        k = k_cache[block_tables[s]].reshape(-1, *k_cache.shape[2:])[:seq_len].astype(np.float64)  # [seq_len, K, D]
        v = v_cache[block_tables[s]].reshape(-1, *v_cache.shape[2:])[:seq_len].astype(np.float64)
        first, last = query_start_loc[s], query_start_loc[s + 1]
        for t in range(first, last):
            num_visible = seq_len - (last - t) + 1
            for h in range(num_heads):
                scores = k[:num_visible, h // group] @ q[t, h].astype(np.float64) * scale
                probs = np.exp(scores - scores.max())
                out[t, h] = probs @ v[:num_visible, h // group] / probs.sum()
    return out
