"""Which checkpoint tensors a parameter is made of. The maps of most families; the others write their own."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config import ModelConfig


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins tensors along their first dimension."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)


def transposed(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Turns one matrix that is stored as [in, out]."""
    (matrix,) = parts
    return matrix.T


def plus_one(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Adds 1 to a norm's weight that is stored as its distance from 1."""
    (weight,) = parts
    return weight.astype(np.float32) + 1


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks the experts' matrices, stored as [out, in], to [E, in, out]."""
    return np.stack([part.T for part in parts])


def stacked_pairs(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks the experts' gate and up matrices: all gates, then all ups, stored as [out, in], to [E, in, 2 out]."""
    middle = len(parts) // 2
    pairs = zip(parts[:middle], parts[middle:], strict=True)
    return np.stack([np.concatenate(pair, axis=0).T for pair in pairs])


class Weight(NamedTuple):
    """How one parameter is made.

    Attributes:
      names: Checkpoint tensors.
      arrange: Makes the parameter of them, given in this order.
    """

    names: tuple[str, ...]
    arrange: Callable[[Sequence[np.ndarray]], np.ndarray] = joined


def frame_weights(config: ModelConfig) -> dict[str, Weight]:
    """Returns the weights outside the layers, by parameter path."""
    weights = {
        "frame.embed.weight": Weight(("model.embed_tokens.weight",)),
        "frame.norm.weight": Weight(("model.norm.weight",)),
    }
    if not config.tie_word_embeddings:
        weights["frame.lm_head.weight"] = Weight(("lm_head.weight",))
    return weights


def attention_weights(index: int, qkv_bias: bool, out_bias: bool) -> dict[str, Weight]:
    """Returns the weights of layer `index`'s attention where query, key and value are stored apart."""
    name = f"model.layers.{index}.self_attn"
    return {
        **linear_weights("attention.qkv", tuple(f"{name}.{part}_proj" for part in "qkv"), qkv_bias),
        **linear_weights("attention.out", (f"{name}.o_proj",), out_bias),
    }


def head_norm_weights(index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`'s norms of queries and keys."""
    name = f"model.layers.{index}.self_attn"
    return {f"attention.head_norms.{part}.weight": Weight((f"{name}.{part}_norm.weight",)) for part in "qk"}


def gated_mlp_weights(index: int, has_bias: bool, part: str = "mlp", path: str = "mlp") -> dict[str, Weight]:
    """Returns the weights of layer `index`'s gated MLP, at `path`, where gate and up are stored apart in `part`."""
    name = f"model.layers.{index}.{part}"
    return {
        **linear_weights(f"{path}.gate_up", (f"{name}.gate_proj", f"{name}.up_proj"), has_bias),
        **linear_weights(f"{path}.down", (f"{name}.down_proj",), has_bias),
    }


def expert_weights(
    name: str, num_experts: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Weight]:
    """Returns the weights of a layer's experts, stored one by one under `name`, whose matrices are called so."""

    def names(part: str) -> tuple[str, ...]:
        return tuple(f"{name}.{expert}.{part}.weight" for expert in range(num_experts))

    return {
        "mlp.experts.gate_up": Weight((*names(gate), *names(up)), stacked_pairs),
        "mlp.experts.down": Weight(names(down), stacked),
    }


def pre_norm_weights(index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`'s two norms, as Llama calls them."""
    name = f"model.layers.{index}"
    return {
        "attention_norm.weight": Weight((f"{name}.input_layernorm.weight",)),
        "mlp_norm.weight": Weight((f"{name}.post_attention_layernorm.weight",)),
    }


def linear_weights(path: str, names: tuple[str, ...], has_bias: bool) -> dict[str, Weight]:
    """Returns the weights of one Linear at `path` that joins the checkpoint's linear layers `names`."""
    weights = {f"{path}.weight": Weight(tuple(f"{name}.weight" for name in names))}
    if has_bias:
        weights[f"{path}.bias"] = Weight(tuple(f"{name}.bias" for name in names))
    return weights
