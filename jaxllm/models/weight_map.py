"""Which checkpoint tensors a parameter is made of. A family lists its layer's; the frame's are here."""

from typing import NamedTuple

from jaxllm.config import ModelConfig


class Weight(NamedTuple):
    """How one parameter is made.

    Attributes:
      names: Checkpoint tensors, joined along their first dimension in this order.
    """

    names: tuple[str, ...]


def frame_weights(config: ModelConfig) -> dict[str, Weight]:
    """Returns the weights outside the layers, by parameter path."""
    weights = {
        "frame.embed.weight": Weight(("model.embed_tokens.weight",)),
        "frame.norm.weight": Weight(("model.norm.weight",)),
    }
    if not config.tie_word_embeddings:
        weights["frame.lm_head.weight"] = Weight(("lm_head.weight",))
    return weights


def linear_weights(path: str, names: tuple[str, ...], has_bias: bool) -> dict[str, Weight]:
    """Returns the weights of one Linear at `path` that joins the checkpoint's linear layers `names`."""
    weights = {f"{path}.weight": Weight(tuple(f"{name}.weight" for name in names))}
    if has_bias:
        weights[f"{path}.bias"] = Weight(tuple(f"{name}.bias" for name in names))
    return weights
