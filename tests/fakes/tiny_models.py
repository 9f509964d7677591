"""Tiny random Llama checkpoints with a small real tokenizer, written as GGUF and as Hugging Face folders."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the capital of France is Paris and the capital of Italy is Rome",
    "one two three four five six seven",
]


@dataclass(frozen=True)
class TinyModel:
    """A Llama model: its Hugging Face config, float32 tensors by Hugging Face names, and BPE vocabulary."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokens: tuple[str, ...]
    merges: tuple[str, ...]


@cache
def tiny_vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (tokens, merges) of a byte-level BPE with 300 tokens: 3 special ones, 256 bytes, 41 merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple(" ".join(merge) for merge in model["merges"])


def tiny_llama(seed: int = 0, **overrides: Any) -> TinyModel:
    """Makes a 2-layer model with 4 heads, 2 kv heads and head dim 16; overrides are config fields."""
    tokens, merges = tiny_vocabulary()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(tokens),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    return TinyModel(config, _random_tensors(config, np.random.default_rng(seed)), tokens, merges)


def micro_llama() -> TinyModel:
    """Makes a model so small that its file can be opened thousands of times: 1 layer, 6 tokens."""
    model = tiny_llama(
        vocab_size=6,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    return replace(model, tokens=(*SPECIAL_TOKENS, "a", "b", "ab"), merges=("a b",))


def write_tiny_gguf(
    path: Path,
    model: TinyModel,
    weight_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    add_vocabulary: Callable[[gguf.GGUFWriter, TinyModel], None] | None = None,
) -> Path:
    """Writes a GGUF file as llama.cpp's converter does, with matrices stored as `weight_type`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    (add_vocabulary or _add_gguf_vocabulary)(writer, model)
    for name, values in model.tensors.items():
        stored = _llama_cpp_rows(name, values, config)
        is_matrix = values.ndim == 2
        tensor_type = weight_type if is_matrix else GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored, tensor_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_folder(path: Path, model: TinyModel, num_shards: int = 1, dtype: np.dtype | type = np.float32) -> Path:
    """Writes a Hugging Face folder, with an index where there are several shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config))
    write_tiny_tokenizer(path, model)
    tensors = {name: values.astype(dtype) for name, values in model.tensors.items()}
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, path / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_tiny_tokenizer(path: Path, model: TinyModel) -> None:
    """Writes the vocabulary and the chat template beside a Hugging Face model."""
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    _hugging_face_tokenizer(model).save(str(path / "tokenizer.json"))


def gguf_name(name: str) -> str:
    """Returns llama.cpp's name of a tensor: model.layers.0.mlp.up_proj.weight is blk.0.ffn_up.weight."""
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(ours, theirs)
    return name


def _add_gguf_vocabulary(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(model.tokens))
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in model.tokens])
    writer.add_token_merges(list(model.merges))
    writer.add_bos_token_id(model.config["bos_token_id"])
    writer.add_eos_token_id(model.config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)


def _hugging_face_tokenizer(model: TinyModel) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(model.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in model.merges)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _llama_cpp_rows(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Reorders q and k rows as llama.cpp's converter does: each head's two halves are interleaved."""
    for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            halves = values.reshape(config[field], 2, -1, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def _random_tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, k_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q_rows, hidden),
            f"{prefix}.self_attn.k_proj.weight": (k_rows, hidden),
            f"{prefix}.self_attn.v_proj.weight": (k_rows, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q_rows),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: _random_tensor(shape, rng) for name, shape in shapes.items()}


def _random_tensor(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Returns a matrix scaled to keep activations near 1, or a norm's weights near 1."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
