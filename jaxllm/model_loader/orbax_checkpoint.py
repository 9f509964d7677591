"""A folder that `python -m jaxllm.convert` wrote, opened and checked. Imports no jax: orbax_weights.py restores."""

from pathlib import Path

from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.model_loader.model_folder import read_configs
from jaxllm.model_loader.orbax_files import check_weights
from jaxllm.model_loader.orbax_manifest import MANIFEST_NAME, VOCABULARY_NAME, WEIGHTS_NAME, read_manifest


class OrbaxCheckpoint:
    """A converted model: weights under their names in our model, laid out for a mesh, perhaps quantised.

    Attributes:
      path: The folder.
      config: config.json, with eos_token_id taken from generation_config.json where that has one.
      generation_config: generation_config.json, or empty.
      gguf: The metadata of the GGUF file that was converted, for its vocabulary; None where tokenizer files are there.
      manifest: What is stored. Each of its weights is there, with the stated shape, dtype and number of bytes.
      weights_path: The Orbax checkpoint in the folder.

    Raises:
      ModelLoadError: A file is missing or damaged, or there is one that doesn't belong there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.config, self.generation_config = read_configs(path)
        vocabulary = path / VOCABULARY_NAME
        self.gguf = GGUFFile(vocabulary) if vocabulary.exists() else None
        self.weights_path = path / WEIGHTS_NAME
        check_weights(self.weights_path, self.manifest)


def is_converted(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).exists()
