"""De-quantises GGUF tensors with the gguf package, in pieces that stay in the processor's cache and on several threads.

The package takes a tensor 16 rows at a time, and then holds it twice. Blocks know nothing of rows, so here a piece is
as many of them as make its few numpy calls worth their while, written to where the result is to stand.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.model_loader.aligned import aligned_empty

_PIECE_ELEMENTS = 1 << 17
_MAX_THREADS = 8


def dequantized(data: np.ndarray, tensor_type: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor as float32, `[*shape]`.

    Args:
      data: Its bytes, [N] uint8: whole blocks, one after the other.
      tensor_type: What they are.
      shape: As many elements as the blocks hold.
    """
    values = aligned_empty(shape, np.dtype(np.float32))
    flat = values.reshape(-1)
    block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    num_blocks = max(_PIECE_ELEMENTS // block_size, 1)

    def fill(first: int) -> None:
        piece = data[first * block_bytes : (first + num_blocks) * block_bytes]
        flat[first * block_size : (first + num_blocks) * block_size] = dequantize(piece[None], tensor_type)[0]

    pieces = range(0, len(data) // block_bytes, num_blocks)
    num_threads = min(len(pieces), os.cpu_count() or 1, _MAX_THREADS)
    if num_threads < 2:
        for first in pieces:
            fill(first)
        return values
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(fill, pieces))  # raises what a thread has raised
    return values
