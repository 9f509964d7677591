"""Writes weights as an Orbax checkpoint. What reads it is zarr_array.py, or Orbax itself."""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp


def save_weights(path: Path, weights: Mapping[str, jax.Array]) -> None:
    """Writes a checkpoint of uncompressed zarr arrays, in folders of the weights' names, with a file for each shard.

    Args:
      path: Absolute; must not exist.
      weights: By names that can be names of folders.
    """
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # Orbax warns that a feature isn't used which these arrays don't need
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
        ocp.Checkpointer(handler).save(path, args=ocp.args.PyTreeSave(dict(weights)))
    finally:
        absl.setLevel(level)
