"""A folder that `python -m jaxllm.convert` wrote, opened and checked. Imports no jax."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.model_loader.model_files import find_file, refuse_link_out
from jaxllm.model_loader.model_folder import ModelFolder
from jaxllm.model_loader.orbax_manifest import (
    DTYPES,
    MANIFEST_NAME,
    VOCABULARY_NAME,
    WEIGHTS_NAME,
    read_manifest,
)
from jaxllm.model_loader.zarr_array import ZarrArray


class OrbaxCheckpoint(ModelFolder):
    """A converted model: weights under their names in our model, laid out for a mesh, perhaps quantised.

    Attributes:
      quantization: The scheme whose numbers the weights are stored as; None where they are floats.
      manifest: What is stored. Each of its weights is there, with the stated shape, dtype and number of bytes.

    Raises:
      ModelLoadError: A file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.manifest = read_manifest(path)
        self.quantization = self.manifest.quantization
        weights_path = path / WEIGHTS_NAME
        for folder in (weights_path, *(weights_path / name for name in self.manifest.weights)):
            if folder.is_symlink():
                raise ModelLoadError(f"{folder}: must be an ordinary folder; links are not followed")
        self._arrays = {
            name: ZarrArray(weights_path / name, weight.shape, DTYPES[weight.dtype])
            for name, weight in self.manifest.weights.items()
        }

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The metadata of the GGUF file that was converted, for its vocabulary; None where tokenizer files are there.

        Raises:
          ModelLoadError: It is damaged.
        """
        vocabulary = find_file(self.path, VOCABULARY_NAME)
        if vocabulary is None:
            return None
        refuse_link_out(vocabulary)
        return GGUFFile(vocabulary)

    def read(self, name: str, region: Sequence[slice]) -> np.ndarray:
        """Returns a part of a weight, one slice a dimension, in its stored dtype.

        Raises:
          ModelLoadError: A file can't be read or has become shorter.
        """
        return self._arrays[name].read(region)


def is_converted(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).exists()
