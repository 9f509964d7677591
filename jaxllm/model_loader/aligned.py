"""Host memory that XLA:CPU uses in place: an array in it becomes a device array without another copy."""

import math

import numpy as np

_ALIGNMENT = 64  # bytes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of arbitrary values that begins at a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
