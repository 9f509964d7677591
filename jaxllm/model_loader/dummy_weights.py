"""Weights made up at random, for measuring speed without a checkpoint. Imports no jax."""

import numpy as np

_LIMIT = 1e-3  # vLLM's
_BLOCK = np.random.default_rng(0).uniform(-_LIMIT, _LIMIT, 1 << 16).astype(np.float32)


def dummy_weight(shape: tuple[int, ...]) -> np.ndarray:
    """Returns a float32 array of small numbers; every call returns the same ones."""
    return np.resize(_BLOCK, shape)
