"""What llama.cpp calls each family's tensors and metadata, and how its tensors differ from Hugging Face's.

Tables and small functions of metadata; gguf_checkpoint.py applies them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxllm.model_loader.gguf_reader import GGUFFile

Config = dict[str, Any]

# Read together with the metadata: they are the rotation's, and no weights.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP_NAMES = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORM_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORM_NAMES = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA_NORM_NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA_NAMES = {**_PRE_NORM_NAMES, **_ATTENTION_NAMES, **_MLP_NAMES}


def _no_more(gguf: GGUFFile) -> Config:
    return {}


class GGUFArchitecture(NamedTuple):
    """One general.architecture.

    Attributes:
      architecture: Hugging Face's class name.
      layer_names: llama.cpp's part of a layer -> Hugging Face's, under `layers`.
      config: What the metadata says in this family's words, beside what all say alike.
      top_names: The same for what stands outside the layers.
      layers: Hugging Face's name of the list of layers.
      has_paired_rows: Whether the rows of q and k stand as llama.cpp rotates them, neighbours together.
      norm_offset: What norms are larger by than in Hugging Face's files.
      may_rotate_part: Whether a part of each head may be rotated alone.
      transposed: Hugging Face's names, under `layers`, of matrices that it stores as [in, out].
    """

    architecture: str
    layer_names: Mapping[str, str]
    config: Callable[[GGUFFile], Config] = _no_more
    top_names: Mapping[str, str] = _TOP_NAMES
    layers: str = "model.layers"
    has_paired_rows: bool = False
    norm_offset: float = 0.0
    may_rotate_part: bool = False
    transposed: frozenset[str] = frozenset()


def _gemma2(gguf: GGUFFile) -> Config:
    return {
        "attn_logit_softcapping": gguf.get("gemma2.attn_logit_softcapping", float),
        "final_logit_softcapping": gguf.get("gemma2.final_logit_softcapping", float),
        "sliding_window": gguf.get("gemma2.attention.sliding_window", int),
        "query_pre_attn_scalar": _query_scalar(gguf, "gemma2", layers_of_27b=46),
    }


def _gemma3(gguf: GGUFFile) -> Config:
    return {
        "final_logit_softcapping": gguf.get("gemma3.final_logit_softcapping", float),
        "sliding_window": gguf.get("gemma3.attention.sliding_window", int),
        "sliding_window_pattern": gguf.get("gemma3.attention.sliding_window_pattern", int) or 6,
        "rope_local_base_freq": gguf.get("gemma3.rope.freq_base_swa", float) or 10000.0,
        "query_pre_attn_scalar": _query_scalar(gguf, "gemma3", layers_of_27b=62),
    }


def _query_scalar(gguf: GGUFFile, architecture: str, layers_of_27b: int) -> int:
    """Returns 1 / scale² of the scores, which the file leaves out: D, but M / H in the models of 27B parameters."""
    if gguf.require(f"{architecture}.block_count", int) != layers_of_27b:
        return gguf.require(f"{architecture}.attention.key_length", int)
    num_heads = gguf.require(f"{architecture}.attention.head_count", int)
    return gguf.require(f"{architecture}.embedding_length", int) // max(num_heads, 1)


def _gpt2(gguf: GGUFFile) -> Config:
    return {
        "n_embd": gguf.require("gpt2.embedding_length", int),
        "n_inner": gguf.require("gpt2.feed_forward_length", int),
        "n_layer": gguf.require("gpt2.block_count", int),
        "n_head": gguf.require("gpt2.attention.head_count", int),
        "n_positions": gguf.require("gpt2.context_length", int),
        "layer_norm_epsilon": gguf.require("gpt2.attention.layer_norm_epsilon", float),
    }


def _phi3(gguf: GGUFFile) -> Config:
    num_heads = max(gguf.require("phi3.attention.head_count", int), 1)
    head_dim = gguf.require("phi3.embedding_length", int) // num_heads
    rotated = gguf.get("phi3.rope.dimension_count", int) or head_dim
    config: Config = {
        "partial_rotary_factor": rotated / max(head_dim, 1),
        "sliding_window": gguf.get("phi3.attention.sliding_window", int),
    }
    names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if all(name in gguf.tensors for name in names.values()):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            **{field: gguf.read(name).ravel().tolist() for field, name in names.items()},
            "original_max_position_embeddings": gguf.require("phi3.rope.scaling.original_context_length", int),
            "attention_factor": gguf.get("phi3.rope.scaling.attn_factor", float),
        }
    return config


_PHI3_NAMES = {
    **_PRE_NORM_NAMES,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

ARCHITECTURES = {
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM", {**_GEMMA_NORM_NAMES, **_ATTENTION_NAMES, **_MLP_NAMES}, _gemma2, norm_offset=1.0
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        {**_GEMMA_NORM_NAMES, **_HEAD_NORM_NAMES, **_ATTENTION_NAMES, **_MLP_NAMES},
        _gemma3,
        norm_offset=1.0,
    ),
    "gpt2": GGUFArchitecture(
        "GPT2LMHeadModel",
        _GPT2_NAMES,
        _gpt2,
        top_names={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        transposed=frozenset({"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}),
    ),
    "llama": GGUFArchitecture("LlamaForCausalLM", _LLAMA_NAMES, has_paired_rows=True),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", _PHI3_NAMES, _phi3, may_rotate_part=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", _LLAMA_NAMES),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", {**_LLAMA_NAMES, **_HEAD_NORM_NAMES}),
}
