"""Any model as a Hugging Face folder in float32: what transformers would have saved, made of what we read."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxllm.model_loader.checkpoint import Checkpoint
from jaxllm.tokenizer.loader import open_tokenizer


def export_folder(path: Path, checkpoint: Checkpoint, num_shards: int) -> Path:
    """Writes config.json, the tokenizer's files, shards and their index. Holds one shard in memory."""
    path.mkdir()
    for name, content in open_tokenizer(checkpoint).files().items():
        (path / name).write_bytes(content)
    (path / "config.json").write_text(json.dumps(checkpoint.config))
    names: list[str] = checkpoint.tensor_names()
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: np.ascontiguousarray(checkpoint.read(name)) for name in mine}, path / file_name)
        weight_map |= dict.fromkeys(mine, file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
