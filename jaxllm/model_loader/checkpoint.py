"""Finds a model by the word the user gave, and opens it. Imports no jax.

Doesn't know how weights become device arrays: loader.py does.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.exceptions import ModelLoadError, ModelNotFoundError
from jaxllm.model_loader import demo_models, hub
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.model_files import PICKLE_SUFFIXES, refuse_pickle
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint


class Checkpoint(Protocol):
    """An opened model: its config in memory, its tensors on disk, under Hugging Face names.

    Attributes:
      path: The .gguf file or the folder.
      config: In the form of Hugging Face's config.json.
      generation_config: In the form of generation_config.json; empty where the checkpoint has none.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def tensor_names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor: in its stored dtype, or float32 where it was quantised."""
        ...


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a model.

    Args:
      model: A path to a .gguf file or a Hugging Face folder, an alias of demo_models, or a hub id
        `org/name[@revision]`. A path that exists wins.

    Raises:
      ModelNotFoundError: Nothing by that name is here, and none could be fetched.
      ModelLoadError: A file is damaged, incomplete or of a kind that isn't read.
      UnsupportedModelError: The model's family or number format isn't supported.
    """
    path = locate(model)
    if path.is_dir():
        return _open_folder(path)
    refuse_pickle(path)
    if path.suffix.lower() == ".safetensors":
        raise ModelLoadError(f"{path}: is one file of a model; give the folder that also holds its config.json")
    return GGUFCheckpoint(path)


def locate(model: str) -> Path:
    """Returns the file or folder that `model` names, fetching it where needed. Opens nothing.

    Raises:
      ModelNotFoundError: Nothing by that name is here, and none could be fetched.
    """
    path = _existing_path(model)
    if path is not None:
        return path
    if demo_models.is_alias(model):
        return demo_models.fetch(model)
    refuse_pickle(Path(model))
    parsed = hub.parse_hub_id(model)
    if parsed is None or model.lower().endswith(".gguf"):
        raise ModelNotFoundError(
            f"no model {model!r:.300}: no such file or folder, no built-in model "
            f"({demo_models.alias_list()}), no hub id (org/name); "
            "give a .gguf file or a folder with config.json and *.safetensors"
        )
    return hub.fetch_snapshot(*parsed)


def _existing_path(model: str) -> Path | None:
    if not model or "\0" in model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name longer than paths may be, or an unknown ~user
        return None


def _open_folder(path: Path) -> Checkpoint:
    if (path / "config.json").exists():
        return HuggingFaceCheckpoint(path)
    names = sorted(file.name for file in path.iterdir())
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    pickles = [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
    hint = ""
    if ggufs:
        hint = f"; it holds {ggufs[0]}: give that file"
    elif pickles:
        hint = f"; {pickles[0]} is a pickle, which can run code, and is never read"
    raise ModelLoadError(f"{path}: expected a folder with config.json and *.safetensors, it has no config.json{hint}")
