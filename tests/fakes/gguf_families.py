"""Writes the golden tiny models as llama.cpp's converter does, with the gguf package's own names for everything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from tests.fakes.golden_families import GoldenCase

Config = dict[str, Any]


def write_gguf(path: Path, architecture: str, case: GoldenCase) -> Path:
    """Writes a float32 GGUF file of llama.cpp's `architecture`, with a vocabulary of made-up tokens."""
    config, writer = case.config, GGUFWriter(path, architecture)
    is_gpt2 = architecture == "gpt2"
    num_layers = config["n_layer" if is_gpt2 else "num_hidden_layers"]
    hidden_size, num_heads = (
        config["n_embd" if is_gpt2 else "hidden_size"],
        config["n_head" if is_gpt2 else "num_attention_heads"],
    )
    writer.add_block_count(num_layers)
    writer.add_context_length(config["n_positions" if is_gpt2 else "max_position_embeddings"])
    writer.add_embedding_length(hidden_size)
    writer.add_head_count(num_heads)
    if is_gpt2:
        writer.add_feed_forward_length(config["n_inner"] or 4 * hidden_size)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        _add_rope(writer, architecture, config)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_uint32(f"{architecture}.attention.sliding_window_pattern", config["sliding_window_pattern"])
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            getattr(writer, f"add_{field}")(config[field])
    _add_vocabulary(writer, config)
    names = gguf.get_tensor_name_map(_ARCHS[architecture], num_layers)
    for name, values in case.tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, np.ascontiguousarray(_CHANGES.get(architecture, _same)(name, values, config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: GGUFWriter, architecture: str, config: Config) -> None:
    parameters = config["rope_parameters"]
    full = parameters.get("full_attention", parameters)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_freq_base(full["rope_theta"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(head_dim * parameters["partial_rotary_factor"]))
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif full["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        growth = config["max_position_embeddings"] / full["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            float(np.sqrt(1 + np.log(growth) / np.log(full["original_max_position_embeddings"])))
        )
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(full[f"{kind}_factor"], np.float32))


def _add_vocabulary(writer: GGUFWriter, config: Config) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token{i}" for i in range(config["vocab_size"])])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _same(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values


def _paired(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Puts row i of each head of q and k beside row i + D / 2."""
    for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            halves = values.reshape(config[field], 2, -1, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _norms_around_one(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    return values + 1 if name.endswith("norm.weight") else values


def _turned(name: str, values: np.ndarray, config: Config) -> np.ndarray:
    is_linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return values.T if is_linear else values


_ARCHS = {
    name: getattr(MODEL_ARCH, name.upper()) for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")
}
_CHANGES: dict[str, Callable[[str, np.ndarray, Config], np.ndarray]] = {
    "llama": _paired,
    "gemma2": _norms_around_one,
    "gemma3": _norms_around_one,
    "gpt2": _turned,
}
