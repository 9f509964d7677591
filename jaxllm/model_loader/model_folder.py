"""What a model's folder holds beside its weights: configs, and the files of its tokenizer. Imports no jax."""

from pathlib import Path
from typing import Any

from jaxllm.model_loader.model_files import read_json

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
TEMPLATE_NAME = "chat_template.jinja"
# Everything that a tokenizer may be read from; a folder has some of them.
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_NAME,
    "chat_template.json",
)


class ModelFolder:
    """A folder's configs, and nothing of its weights: all that `--load-format dummy` needs.

    Attributes:
      path: The folder.
      config: config.json, with eos_token_id taken from generation_config.json where that has one.
      generation_config: generation_config.json, or empty.
      quantization: None.

    Raises:
      ModelLoadError: A file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.generation_config = read_configs(path)
        self.quantization: str | None = None


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns config.json and generation_config.json as ModelFolder describes them.

    Raises:
      ModelLoadError: A file is missing or damaged.
    """
    config = read_json(folder / CONFIG_NAME)
    path = folder / GENERATION_CONFIG_NAME
    generation_config = read_json(path) if path.exists() else {}
    if generation_config.get("eos_token_id") is not None:
        config["eos_token_id"] = generation_config["eos_token_id"]
    return config, generation_config
