"""Writes a model as a folder that loads faster: its weights as the engine holds them, in an Orbax checkpoint.

The folder is whole by itself: configs, what the tokenizer is read from, weights, and the manifest that describes them.
It appears under its name when it is complete; sizes of all its files are checked when it is loaded.
"""

import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jaxllm
from jaxllm.config import DTYPES
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError
from jaxllm.model_loader.checkpoint import Checkpoint, open_checkpoint
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.loader import load_model
from jaxllm.model_loader.model_files import read_json
from jaxllm.model_loader.model_folder import CONFIG_NAME, GENERATION_CONFIG_NAME, TOKENIZER_NAMES
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.model_loader.orbax_manifest import (
    FORMAT,
    FORMAT_VERSION,
    VOCABULARY_NAME,
    WEIGHTS_NAME,
    Manifest,
    StoredWeight,
    write_manifest,
)
from jaxllm.model_loader.orbax_writer import save_weights
from jaxllm.model_loader.quantized_checkpoint import QuantizedCheckpoint
from jaxllm.model_loader.stored_quantization import without_quantization
from jaxllm.models.causal_lm import CausalLM
from sharding.mesh import make_mesh
from sharding.partition import pieces_of
from sharding.rules import axis_name


def convert(
    source: str, target: Path, dtype: str = "auto", quantization: str | None = None, tensor_parallel_size: int = 1
) -> Manifest:
    """Converts a model, on as many devices of the CPU as it is laid out for.

    Args:
      source: As EngineArgs.model, but not converted yet.
      target: The folder to write, which must not exist.
      dtype: Of the stored floats, one of DTYPES; "auto" keeps the source's, float32 where that is quantised.
      quantization: How weights are stored, a name in quantization.SCHEMES; None: as floats.
      tensor_parallel_size: Devices that the weights are laid out for. Others can load them too, not as fast.

    Returns:
      What stands in the folder's manifest.

    Raises:
      ConfigError: The target exists or can't be written, or an argument breaks a rule.
      ModelLoadError: The source can't be found, read or understood.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: exists; give a folder that doesn't, or remove it first")
    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, OrbaxCheckpoint):
        raise ConfigError(f"{checkpoint.path}: is converted already; give the model that it was made from")
    if isinstance(checkpoint, QuantizedCheckpoint) and quantization is None:
        raise ConfigError(
            f"{checkpoint.path}: its weights are stored as numbers, which are converted to others only; set "
            "--quantization, or load it as it is"
        )
    args = EngineArgs(model=source, dtype=dtype, quantization=quantization, tensor_parallel_size=tensor_parallel_size)
    config = args.create_engine_config(checkpoint)
    stored_dtype = jnp.dtype(_stored_dtype(checkpoint, dtype))
    mesh = make_mesh(jax.local_devices(backend="cpu")[:tensor_parallel_size])
    weights, stored = _named(load_model(config, mesh, stored_dtype, stored_dtype), mesh)
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        jaxllm_version=jaxllm.__version__,
        source=checkpoint.path.name,
        quantization=config.quantization,
        weights=stored,
    )
    try:
        _write(target.absolute(), checkpoint, manifest, weights)
    except OSError as error:
        raise ConfigError(f"{target}: can't be written: {error.strerror or error}") from error
    return manifest


def _write(target: Path, checkpoint: Checkpoint, manifest: Manifest, weights: dict[str, jax.Array]) -> None:
    """Writes everything into a folder beside the target, which then takes its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.incomplete-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        _write_configs(folder, checkpoint)
        save_weights(folder / WEIGHTS_NAME, weights)
        write_manifest(folder, manifest)
        folder.rename(target)


def _write_configs(folder: Path, checkpoint: Checkpoint) -> None:
    if isinstance(checkpoint, GGUFCheckpoint):
        (folder / CONFIG_NAME).write_text(json.dumps(checkpoint.config, indent=1), encoding="utf-8")
        checkpoint.gguf.write_metadata(folder / VOCABULARY_NAME)
        return
    config = read_json(checkpoint.path / CONFIG_NAME)
    if isinstance(checkpoint, QuantizedCheckpoint):
        config = without_quantization(config)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in (GENERATION_CONFIG_NAME, *TOKENIZER_NAMES):
        if (checkpoint.path / name).exists():
            shutil.copyfile(checkpoint.path / name, folder / name)


def _stored_dtype(checkpoint: Checkpoint, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")  # transformers 5, and before it
    return stated if stated in DTYPES else "float32"


def _named(model: CausalLM, mesh: Mesh) -> tuple[dict[str, jax.Array], dict[str, StoredWeight]]:
    """Returns a model's weights by their paths in it, and what the manifest says of them."""
    weights, stored = {}, {}
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        name, array, axes = ".".join(map(str, path)), parameter.get_value(), parameter.get_metadata("logical_axes")
        weights[name] = array
        names = tuple(axis_name(axis) for axis in axes)
        stored[name] = StoredWeight(array.shape, array.dtype.name, names, pieces_of(mesh, axes))
    return weights, stored
