"""jaxllm.json: what a converted model's folder says of itself. Every number in it is a claim. Imports no jax.

Knows the folder's names; doesn't know how weights lie in files (zarr_array.py) nor what they are for.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.model_files import MAX_JSON_BYTES, refuse_lfs_pointer

MANIFEST_NAME = "jaxllm.json"
WEIGHTS_NAME = "weights"
VOCABULARY_NAME = "vocabulary.gguf"
FORMAT = "jaxllm-orbax"
FORMAT_VERSION = 1
MAX_WEIGHTS = 1 << 20
MAX_DIMS = 8
DTYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
}
# A parameter's path in the model, which is also the name of its folder: no slash, and no name made of dots alone.
_WEIGHT_NAME = re.compile(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,15}", re.ASCII)


class StoredWeight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter as it is stored, laid out for the manifest's mesh."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]  # logical, one a dimension

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """jaxllm.json.

    Attributes:
      source: Name of the file or folder that was converted.
      quantization: The scheme of the weights, by its --quantization name; None where they are not quantised.
      mesh: Mesh axis -> devices that the weights are laid out for.
      weights: Path of the parameter in CausalLM -> what is stored.
    """

    format: str
    format_version: int
    jaxllm_version: str
    source: str
    quantization: str | None
    mesh: dict[str, int]
    weights: dict[str, StoredWeight]

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks a folder's manifest.

    Raises:
      ModelLoadError: It is damaged, or of a version that isn't read.
    """
    path = folder / MANIFEST_NAME
    refuse_lfs_pointer(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path}: may have at most {MAX_JSON_BYTES} bytes, got {size}")
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version)
        if (version.format, version.format_version) != (FORMAT, FORMAT_VERSION):
            raise ModelLoadError(
                f"{path}: expected format {FORMAT!r} version {FORMAT_VERSION}, got {version.format!r:.40} version "
                f"{version.format_version}; convert the model again with this jaxllm"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelLoadError(f"{path}: is damaged: {reason}") from error
    _check(path, manifest)
    return manifest


class Wanted(Protocol):
    """What a model asks of one weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def check_matches(manifest: Manifest, wanted: Mapping[str, Wanted], path: Path) -> None:
    """Checks that a converted model has the weights that its config asks for.

    Raises:
      ModelLoadError: One is missing, left over, or of another shape or kind of number.
    """
    stored = manifest.weights
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ModelLoadError(f"{path}: lacks the weight {missing[0]}; convert the model again")
    if left_over := sorted(stored.keys() - wanted.keys()):
        raise ModelLoadError(f"{path}: has a weight {left_over[0]}, which its config doesn't ask for")
    for name, weight in wanted.items():
        found = stored[name]
        if found.shape != weight.shape or not _can_become(DTYPES[found.dtype], weight.dtype):
            raise ModelLoadError(
                f"{path}: weight {name} must be {weight.dtype}{list(weight.shape)} by its config, got "
                f"{found.dtype}{list(found.shape)}; the folder is damaged or the config belongs to another model"
            )


def _can_become(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether numbers of one dtype may be loaded as another: floats as other floats, integers as they are."""
    return stored == wanted or _is_float(stored) and _is_float(wanted)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "fV"  # V: bfloat16 and its kin


class _Version(msgspec.Struct):
    """The part of every version's manifest that says which it is."""

    format: str
    format_version: int


def _check(path: Path, manifest: Manifest) -> None:
    if not 1 <= len(manifest.weights) <= MAX_WEIGHTS:
        raise ModelLoadError(f"{path}: must name 1 to {MAX_WEIGHTS} weights, got {len(manifest.weights)}")
    if not all(1 <= size <= 1 << 20 for size in manifest.mesh.values()):
        raise ModelLoadError(f"{path}: sizes of the mesh must be at least 1, got {manifest.mesh!r:.200}")
    for name, weight in manifest.weights.items():
        if not _WEIGHT_NAME.fullmatch(name):
            raise ModelLoadError(f"{path}: {name!r:.200} can't be a weight's name")
        has_sizes = len(weight.shape) <= MAX_DIMS and all(1 <= size < 1 << 48 for size in weight.shape)
        if not has_sizes or len(weight.axes) != len(weight.shape) or weight.dtype not in DTYPES:
            raise ModelLoadError(f"{path}: weight {name!r:.200} is damaged: {weight!r:.200}")
