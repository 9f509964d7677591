"""Finds a model by the word the user gave, and opens it. Imports no jax.

Doesn't know how weights become device arrays: loader.py does.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.exceptions import ModelLoadError, ModelNotFoundError
from jaxllm.model_loader import aliases, demo_models, hub
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.model_files import PICKLE_SUFFIXES, read_json, refuse_pickle
from jaxllm.model_loader.model_folder import CONFIG_NAME, ModelFolder
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint, is_converted
from jaxllm.model_loader.quantized_checkpoint import QuantizedCheckpoint
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint
from jaxllm.model_loader.stored_quantization import stored_format


class OpenedModel(Protocol):
    """What the front end needs of an opened model; its weights may be of any form, or none.

    Attributes:
      path: The .gguf file or the folder.
      config: In the form of Hugging Face's config.json.
      generation_config: In the form of generation_config.json; empty where the checkpoint has none.
      quantization: The scheme, a name in quantization.SCHEMES, whose numbers the weights are stored as; None where they
        come as floats.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantization: str | None


class Checkpoint(OpenedModel, Protocol):
    """An opened model whose tensors are on disk, under Hugging Face names."""

    def tensor_names(self) -> list[str]: ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor: in its stored dtype, or float32 where it was quantised."""
        ...


def open_checkpoint(model: str, load_format: str = "auto") -> Checkpoint | OrbaxCheckpoint:
    """Opens a model with its weights.

    Args:
      model: A path to a .gguf file, a Hugging Face folder or a converted one, a name of aliases, or a hub id
        `org/name[@revision]`. A path that exists wins.
      load_format: What it must be: "safetensors", "gguf" or "orbax"; "auto" takes what it is.

    Raises:
      ModelNotFoundError: Nothing by that name is here, and none could be fetched.
      ModelLoadError: A file is damaged, incomplete or of a kind that isn't read.
      UnsupportedModelError: The model's family or number format isn't supported.
    """
    path = locate(model)
    found = _format_of(path)
    if load_format not in ("auto", found):
        raise ModelLoadError(f"{path}: is of format {found}, not {load_format}; set --load-format auto")
    match found:
        case "gguf":
            return GGUFCheckpoint(path)
        case "orbax":
            return OrbaxCheckpoint(path)
        case _:
            config = read_json(path / CONFIG_NAME)
            return QuantizedCheckpoint(path) if stored_format(config) else HuggingFaceCheckpoint(path)


def open_model(model: str, load_format: str = "auto") -> OpenedModel:
    """Opens what the front end needs of a model. As open_checkpoint, but "dummy" does without the weights.

    Raises:
      ModelNotFoundError, ModelLoadError, UnsupportedModelError: As open_checkpoint.
    """
    if load_format != "dummy":
        return open_checkpoint(model, load_format)
    path = locate(model, has_weights=False)
    return ModelFolder(path) if (path / CONFIG_NAME).exists() else open_checkpoint(str(path))


def locate(model: str, has_weights: bool = True) -> Path:
    """Returns the file or folder that `model` names, fetching it where needed. Opens nothing.

    Args:
      model: As in open_checkpoint.
      has_weights: Whether the weights of a hub model are fetched too.

    Raises:
      ModelNotFoundError: Nothing by that name is here, and none could be fetched.
    """
    path = _existing_path(model)
    if path is not None:
        return hub.cached_snapshot(path) or path
    meant = aliases.resolve(model)
    if demo_models.is_alias(meant):
        return demo_models.fetch(meant)
    refuse_pickle(Path(model))
    parsed = hub.parse_hub_id(meant)
    if parsed is None or model.lower().endswith(".gguf"):
        close = aliases.nearest(model)
        hint = f"did you mean {close}? " if close else ""
        raise ModelNotFoundError(
            f"no model {model!r:.300}: {hint}no such file or folder, no built-in model "
            f"({demo_models.alias_list()}), no short name (`jaxllm models` lists them), no hub id (org/name); "
            "give a .gguf file or a folder with config.json and *.safetensors"
        )
    return hub.fetch_snapshot(*parsed, has_weights=has_weights)


def _existing_path(model: str) -> Path | None:
    if not model or "\0" in model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name longer than paths may be, or an unknown ~user
        return None


def _format_of(path: Path) -> str:
    """Returns "gguf", "orbax" or "safetensors".

    Raises:
      ModelLoadError: It is none of them.
    """
    if not path.is_dir():
        refuse_pickle(path)
        if path.suffix.lower() == ".safetensors":
            raise ModelLoadError(f"{path}: is one file of a model; give the folder that also holds its config.json")
        return "gguf"
    if is_converted(path):
        return "orbax"
    if (path / CONFIG_NAME).exists():
        return "safetensors"
    names = sorted(file.name for file in path.iterdir())
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    pickles = [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
    hint = ""
    if ggufs:
        hint = f"; it holds {ggufs[0]}: give that file"
    elif pickles:
        hint = f"; {pickles[0]} is a pickle, which can run code, and is never read"
    raise ModelLoadError(f"{path}: expected a folder with config.json and *.safetensors, it has no config.json{hint}")
