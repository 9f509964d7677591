"""Llama without cache, blocks, batches or fused weights: the obvious implementation, in float64 numpy."""

import numpy as np

from tests.fakes.tiny_models import TinyModel


def dense_logits(
    model: TinyModel, token_ids: list[int], cached: list[tuple[np.ndarray, np.ndarray]] | None = None
) -> np.ndarray:
    """Returns [len(token_ids), V] logits of one text. `cached` gets each layer's keys, not rotated, and its values."""
    config = model.config
    weights = {name: values.astype(np.float64) for name, values in model.tensors.items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        h = _norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = x + _attention(h, weights, name, config, [] if cached is None else cached)
        h = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate = h @ weights[f"{name}.mlp.gate_proj.weight"].T
        up = h @ weights[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    x = _norm(x, weights["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return x @ weights[head].T


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(x, weights, name, config, cached):
    num_heads, num_kv_heads, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    num_tokens = len(x)

    def heads(part, count):
        return (x @ weights[f"{name}.self_attn.{part}_proj.weight"].T).reshape(num_tokens, count, dim)

    q, k, v = heads("q", num_heads), heads("k", num_kv_heads), heads("v", num_kv_heads)
    cached.append((k, v))
    q, k = _rotate(q, config["rope_theta"]), _rotate(k, config["rope_theta"])
    out = np.zeros((num_tokens, num_heads, dim))
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T / np.sqrt(dim)
        scores[np.triu_indices(num_tokens, 1)] = -np.inf
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = probs @ v[:, kv_head] / probs.sum(-1, keepdims=True)
    return out.reshape(num_tokens, -1) @ weights[f"{name}.self_attn.o_proj.weight"].T


def _rotate(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
