"""Weights in and out of an Orbax checkpoint: saved shard by shard, restored straight to the devices that hold them.

What is restored has been checked by orbax_files.py. Doesn't know models: weights are named arrays.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.model_loader.orbax_manifest import DTYPES
from jaxllm.progress import Progress

# Restored at a time: what is in flight is held twice.
_BATCH_BYTES = 1 << 28


def save_weights(path: Path, weights: Mapping[str, jax.Array]) -> None:
    """Writes an Orbax checkpoint of uncompressed arrays, a file for each shard.

    Args:
      path: Absolute; must not exist.
    """
    with _quiet():
        _checkpointer().save(path, args=ocp.args.PyTreeSave(dict(weights)))


def check_matches(checkpoint: OrbaxCheckpoint, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Checks that a converted model has the weights that its config asks for.

    Raises:
      ModelLoadError: One is missing, left over, or of another shape or kind of number.
    """
    stored = checkpoint.manifest.weights
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ModelLoadError(f"{checkpoint.path}: lacks the weight {missing[0]}; convert the model again")
    if left_over := sorted(stored.keys() - wanted.keys()):
        raise ModelLoadError(f"{checkpoint.path}: has a weight {left_over[0]}, which its config doesn't ask for")
    for name, weight in wanted.items():
        found = stored[name]
        if found.shape != weight.shape or not _can_become(DTYPES[found.dtype], weight.dtype):
            raise ModelLoadError(
                f"{checkpoint.path}: weight {name} must be {weight.dtype}{list(weight.shape)} by its config, got "
                f"{found.dtype}{list(found.shape)}; the folder is damaged or the config belongs to another model"
            )


def _can_become(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether numbers of one dtype may be restored as another: floats as other floats, integers as they are."""
    return stored == wanted or bool(jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating))


def restore_weights(
    path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], bar: Progress | None = None
) -> dict[str, jax.Array]:
    """Reads weights, each to the devices of its sharding and in its dtype, whatever those were when it was saved.

    Args:
      path: A checkpoint that check_weights has passed.
      wanted: Name -> shape, which must be the stored one, dtype and sharding. Some of the checkpoint's weights do.
      bar: Told the bytes that have arrived.

    Raises:
      ModelLoadError: Orbax can't read the checkpoint.
    """
    restored: dict[str, jax.Array] = {}
    with _quiet():
        for batch in _batches(wanted):
            restored |= _restore(path, batch)
            if bar is not None:
                bar.update(sum(restored[name].nbytes for name in batch))
    return restored


def _batches(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    num_bytes = 0
    for name, weight in wanted.items():
        batch[name] = weight
        num_bytes += weight.size * weight.dtype.itemsize
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
    if batch:
        yield batch


def _restore(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=weight.sharding, global_shape=weight.shape, dtype=weight.dtype)
        for name, weight in wanted.items()
    }
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    try:
        restored: dict[str, jax.Array] = _checkpointer().restore(path, args=args)
        return jax.block_until_ready(restored)
    except jax.errors.JaxRuntimeError:
        raise  # the device's fault
    except Exception as error:  # of Orbax, of TensorStore, of asyncio: they share no base
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelLoadError(f"{path}: Orbax can't restore it: {reason}; convert the model again") from error


def _checkpointer() -> ocp.Checkpointer:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
    return ocp.Checkpointer(handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's warnings about features that aren't used off the user's screen."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)
