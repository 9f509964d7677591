"""Weights that anybody can make again from their names: no golden file needs to hold them.

Uses numpy's raw Philox bits, whose stream never changes, and exact arithmetic, so that the same name gives the
same float32 bits with every numpy. Knows no model.
"""

import math
import zlib

import numpy as np


def seeded_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a float32 tensor made from its name: matrices keep activations near 1, norms lie around 1.

    One-dimensional tensors called weight are norms; other one-dimensional ones are biases.
    """
    raw = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    uniform = ((raw >> 40).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)  # in [-1, 1)
    if len(shape) > 1:
        return uniform * np.float32(math.sqrt(3 / shape[-1]))
    half = uniform * np.float32(0.5)
    return half + np.float32(1) if name.endswith("weight") else half
