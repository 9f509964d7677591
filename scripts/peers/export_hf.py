"""Writes a model as a Hugging Face folder in bfloat16: config.json and model.safetensors, no tokenizer.

For peers that can't read GGUF; they are given token ids. Run in jaxllm's environment.
"""

import json
from pathlib import Path

import ml_dtypes
from safetensors.numpy import save_file

from jaxllm.model_loader.checkpoint import open_checkpoint


def export_hf(model: str, folder: Path) -> None:
    """Writes `model` into `folder`, unless it is there already. The last file written is config.json."""
    config_path = folder / "config.json"
    if config_path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(model)
    tensors = {name: checkpoint.read(name).astype(ml_dtypes.bfloat16) for name in checkpoint.tensor_names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # A config translated from GGUF names its architecture, but not Hugging Face's name for the family.
    config = {"model_type": "llama", **checkpoint.config, "torch_dtype": "bfloat16"}
    config_path.write_text(json.dumps(config, indent=1), encoding="utf-8")
