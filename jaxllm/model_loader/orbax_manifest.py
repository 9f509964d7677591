"""jaxllm.json: what a converted model's folder says of itself. Every number in it is a claim. Imports no jax.

Knows the folder's names; doesn't know how weights lie in files (zarr_array.py) nor what they are for.
"""

import math
import re
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.model_files import MAX_JSON_BYTES, refuse_lfs_pointer
from jaxllm.quantization import SCHEMES

MANIFEST_NAME = "jaxllm.json"
WEIGHTS_NAME = "weights"
VOCABULARY_NAME = "vocabulary.gguf"
FORMAT = "jaxllm-orbax"
FORMAT_VERSION = 1
MAX_WEIGHTS = 1 << 20
MAX_DIMS = 8
MAX_PIECES = 1 << 12
DTYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype("i1"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
# A parameter's path in the model, which is also the name of its folder: no slash, and no name made of dots alone.
_WEIGHT_NAME = re.compile(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,15}", re.ASCII)


class StoredWeight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter as it is stored.

    Attributes:
      shape: Of what is stored.
      dtype: A name in DTYPES.
      axes: The logical axis of each dimension.
      pieces: How many devices it is laid out for along each dimension; see sharding/split.py.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    pieces: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """jaxllm.json.

    Attributes:
      source: Name of the file or folder that was converted.
      quantization: The scheme of the weights, a name in quantization.SCHEMES; None where they are floats.
      weights: Path of the parameter in CausalLM -> what is stored.
    """

    format: str
    format_version: int
    jaxllm_version: str
    source: str
    quantization: str | None
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


class _Version(msgspec.Struct):
    """The part of every version's manifest that says which it is."""

    format: str
    format_version: int


def _check(path: Path, manifest: Manifest) -> None:
    if not 1 <= len(manifest.weights) <= MAX_WEIGHTS:
        raise ModelLoadError(f"{path}: must name 1 to {MAX_WEIGHTS} weights, got {len(manifest.weights)}")
    if manifest.quantization is not None and manifest.quantization not in SCHEMES:
        raise ModelLoadError(
            f"{path}: quantization must be one of {', '.join(SCHEMES)}, got {manifest.quantization!r:.40}"
        )
    for name, weight in manifest.weights.items():
        if not _WEIGHT_NAME.fullmatch(name):
            raise ModelLoadError(f"{path}: {name!r:.200} can't be a weight's name")
        has_sizes = len(weight.shape) <= MAX_DIMS and all(1 <= size < 1 << 48 for size in weight.shape)
        has_pieces = len(weight.pieces) == len(weight.shape) and all(1 <= n <= MAX_PIECES for n in weight.pieces)
        if not has_sizes or not has_pieces or len(weight.axes) != len(weight.shape) or weight.dtype not in DTYPES:
            raise ModelLoadError(f"{path}: weight {name!r:.200} is damaged: {weight!r:.200}")
