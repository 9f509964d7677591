"""A GGUF file seen as a Hugging Face checkpoint: its config, tensor names and row order translated.

Knows llama.cpp's conventions; doesn't know how bytes lie in the file (gguf_reader.py) nor what a model does
with the tensors.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_architectures import ARCHITECTURES, ROPE_TENSORS, GGUFArchitecture
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.quantization import Rows

_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)", re.ASCII)
_TOP_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)", re.ASCII)
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """Implements checkpoint.Checkpoint on a GGUF file.

    Attributes:
      path: The file.
      gguf: The opened file; the tokenizer reads its vocabulary from there.
      config: What Hugging Face's config.json would say.
      generation_config: Empty: GGUF has none.
      quantization: None: tensors are de-quantised when they are read.

    Raises:
      ModelLoadError: The file is damaged or contradicts itself.
      UnsupportedModelError: The model is of a family, or of a variant, that isn't run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = GGUFFile(path)
        self._architecture = architecture = self.gguf.require("general.architecture", str)
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: GGUF architecture {architecture!r:.80} is not supported; "
                f"supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        self._family = ARCHITECTURES[architecture]
        self._stored_names = {
            huggingface_name(path, stored, self._family): stored
            for stored in self.gguf.tensors
            if stored not in ROPE_TENSORS
        }
        self.config = _translate_config(self.gguf, architecture)
        self.generation_config: dict[str, Any] = {}
        self.quantization: str | None = None
        self._check_counts()

    def tensor_names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.gguf.tensors[self._stored_names[name]].shape

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, as Hugging Face's file has it."""
        values = self.gguf.read(self._stored_names[name])
        family = self._family
        if family.has_paired_rows and ".q_proj." in name:
            return self._unpermuted(name, values, self.config["num_attention_heads"])
        if family.has_paired_rows and ".k_proj." in name:
            return self._unpermuted(name, values, self.config["num_key_value_heads"])
        if family.norm_offset and name.endswith("norm.weight"):
            return values - np.float32(family.norm_offset)
        if name.endswith(tuple(family.transposed)) and values.ndim == 2:
            return values.T
        return values

    def rows(self, name: str) -> Rows:
        """Returns one matrix as `read`, but a few rows at a time where they stand in the file as in Hugging Face's."""
        family = self._family
        is_paired = family.has_paired_rows and (".q_proj." in name or ".k_proj." in name)
        if is_paired or name.endswith(tuple(family.transposed)):
            return self.read(name)
        return self.gguf.rows(self._stored_names[name])

    def _unpermuted(self, name: str, values: np.ndarray, num_heads: int) -> np.ndarray:
        if num_heads < 1 or values.shape[0] % (2 * num_heads):
            raise ModelLoadError(
                f"{self.path}: {name} has {values.shape[0]} rows, which {num_heads} heads can't share evenly"
            )
        return unpermute_rows(values, num_heads)

    def _check_counts(self) -> None:
        """Checks the counts that the metadata and the tensors both state."""
        layers = {int(match[1]) for name in self.gguf.tensors if (match := _LAYER_TENSOR.fullmatch(name))}
        num_layers = self.gguf.require(f"{self._architecture}.block_count", int)
        if num_layers != len(layers) or max(layers, default=-1) + 1 != num_layers:
            raise ModelLoadError(
                f"{self.path}: the metadata states {num_layers} layers, the file has tensors for {len(layers)}"
            )
        embedding = self.gguf.tensors.get("token_embd.weight")
        vocab_size = self.config["vocab_size"]
        if embedding is None or embedding.shape[0] != vocab_size:
            rows = "none" if embedding is None else embedding.shape[0]
            raise ModelLoadError(f"{self.path}: expected {vocab_size} rows in token_embd.weight, got {rows}")


def huggingface_name(path: Path, stored: str, family: GGUFArchitecture) -> str:
    """Returns the Hugging Face name: Llama's blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight.

    Raises:
      UnsupportedModelError: The family has no such tensor.
    """
    top, layer = _TOP_TENSOR.fullmatch(stored), _LAYER_TENSOR.fullmatch(stored)
    if top is not None and top[1] in family.top_names:
        return f"{family.top_names[top[1]]}.{top[2]}"
    if layer is not None and layer[2] in family.layer_names:
        return f"{family.layers}.{int(layer[1])}.{family.layer_names[layer[2]]}.{layer[3]}"
    raise UnsupportedModelError(f"{path}: tensor {stored!r:.80} is not one of {family.architecture}'s")


def unpermute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q and k rows.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3) …; Hugging Face rotates row i with row i + D/2. With
    D = 4, a head that llama.cpp stores as rows [0, 2, 1, 3] comes back as [0, 1, 2, 3].

    Args:
      values: `[num_heads * D, ...]`.
    """
    halves = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _translate_config(gguf: GGUFFile, architecture: str) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    _refuse_experts(gguf, architecture)
    family = ARCHITECTURES[architecture]
    num_heads = gguf.require(key("attention.head_count"), int)
    hidden_size = gguf.require(key("embedding_length"), int)
    head_dim = gguf.get(key("attention.key_length"), int) or hidden_size // max(num_heads, 1)
    _check_head_dim(gguf, architecture, head_dim, family.may_rotate_part)
    rope_theta = gguf.get(key("rope.freq_base"), float) or 10000.0
    return {
        "architectures": [family.architecture],
        "vocab_size": len(gguf.require("tokenizer.ggml.tokens", list[str])),
        "hidden_size": hidden_size,
        "intermediate_size": gguf.require(key("feed_forward_length"), int),
        "num_hidden_layers": gguf.require(key("block_count"), int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.get(key("attention.head_count_kv"), int) or num_heads,
        "max_position_embeddings": gguf.require(key("context_length"), int),
        "rms_norm_eps": gguf.get(key("attention.layer_norm_rms_epsilon"), float),
        "rope_theta": rope_theta,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_token_ids(gguf),
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(gguf, architecture, head_dim, rope_theta),
        **family.config(gguf),
    }


def _refuse_experts(gguf: GGUFFile, architecture: str) -> None:
    if gguf.get(f"{architecture}.expert_count", int):
        raise UnsupportedModelError(f"{gguf.path}: mixture-of-experts models of GGUF are not supported")


def _check_head_dim(gguf: GGUFFile, architecture: str, head_dim: int, may_rotate_part: bool) -> None:
    for name in ("rope.dimension_count", "attention.value_length"):
        length = gguf.get(f"{architecture}.{name}", int)
        is_part = may_rotate_part and name == "rope.dimension_count"
        if length and length != head_dim and not is_part:
            raise UnsupportedModelError(
                f"{gguf.path}: {architecture}.{name} must equal the head dimension {head_dim}, got {length}"
            )


def _eos_token_ids(gguf: GGUFFile) -> list[int]:
    """Returns the ids that end a text: end of sequence, of turn and of message, without repeats."""
    found = [gguf.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _rope_scaling(gguf: GGUFFile, architecture: str, head_dim: int, theta: float) -> dict[str, Any] | None:
    original_len = gguf.get(f"{architecture}.rope.scaling.original_context_length", int)
    if _ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, head_dim, theta, original_len or 8192)
    kind = gguf.get(f"{architecture}.rope.scaling.type", str) or "none"
    factor = gguf.get(f"{architecture}.rope.scaling.factor", float)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original_len:
        scaling["original_max_position_embeddings"] = original_len
    return scaling


def _llama3_scaling(gguf: GGUFFile, head_dim: int, theta: float, original_len: int) -> dict[str, Any]:
    """Finds the Llama 3 parameters behind the per-frequency factors that llama.cpp stores.

    Raises:
      UnsupportedModelError: The stored factors are not Llama 3's.
    """
    stored = gguf.read(_ROPE_FACTORS)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_len,
    }
    if stored.shape != (head_dim // 2,) or not np.allclose(
        stored, _llama3_factors(scaling, head_dim, theta), rtol=1e-3
    ):
        raise UnsupportedModelError(
            f"{gguf.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3's rope scaling"
        )
    return scaling


def _llama3_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """Returns what each of the head_dim // 2 frequencies is divided by: 1 where high, `factor` where low."""
    wavelengths = 2 * math.pi * np.power(theta, np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
