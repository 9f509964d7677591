"""How weights become int8, int4 or fp8 numbers and scales: the schemes by name, and a pure function of numpy arrays.

A quantized parameter keeps its path and its shape, and holds numbers. Its scales stand beside it at the path with
`_scale` appended:

    attention.qkv.weight   [O, I]     numbers     attention.qkv.weight_scale   [G, O]     float32
    mlp.experts.gate_up    [E, I, O]  numbers     mlp.experts.gate_up_scale    [E, G, O]  float32
    frame.embed.weight     [V, M]     numbers     frame.embed.weight_scale     [1, V]     float32

G groups of inputs in their order have a scale each; number * scale is about the weight. Everything is symmetric: zero
stays zero. Norms, biases, routers, rotations and the matrices of latent attention's heads are never quantized.

A scheme that rotates multiplies the weight's inputs with a block-diagonal matrix of Hadamard's before it rounds, and so
are activations before theirs. The product stays what it was; the few large activations that would set a token's scale
are spread over their blocks. On SmolLM2 it makes int8's divergence from float32 eight times smaller.

Imports no jax. Doesn't know which hardware multiplies what: worker/number_formats.py does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxllm.model_loader.aligned import aligned_empty

SCALE_SUFFIX = "_scale"
_GROUP_SIZE = 128
_MIN_GROUP_SIZE = 32
_MAX_ROTATED = 64
_CHUNK_ELEMENTS = 1 << 20  # widened to float32 at a time: stays in the processor's cache
_DTYPES = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_MOST = {"int8": 127, "int4": 7}
_LARGEST = {"int8": 127.0, "int4": -8.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class Scheme:
    """One way to store a model's weights and to multiply with them.

    Attributes:
      name: As --quantization has it, or the checkpoint's own method.
      dtype_name: Of the numbers: "int8", "int4" or "float8_e4m3fn".
      group_size: Most inputs that share a scale; where it doesn't divide a weight's inputs, their greatest common
        divisor, or all of them if that is small. None: all.
      quantizes_activations: Whether each token becomes numbers too, so that products are of numbers.
      rotated: Most inputs that are rotated together, a power of two; 1: none.
    """

    name: str
    dtype_name: str
    group_size: int | None
    quantizes_activations: bool
    rotated: int = 1

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        dtype: np.dtype = _DTYPES[self.dtype_name]
        return dtype

    def num_groups(self, num_inputs: int) -> int:
        """Returns G for a weight of so many inputs."""
        size = math.gcd(num_inputs, self.group_size or num_inputs)
        return num_inputs // size if size >= min(_MIN_GROUP_SIZE, self.group_size or num_inputs) else 1

    def of_table(self) -> "Scheme":
        """Returns how an embedding is stored: its rows are looked up, and four bits a number lose too much."""
        if self.dtype_name != "int4":
            return self
        return Scheme(self.name, "int8", None, self.quantizes_activations)

    def of_experts(self) -> "Scheme":
        """Returns how experts are stored, whose products are with widened numbers."""
        return replace(self, quantizes_activations=False, rotated=1)

    def within(self, num_inputs: int) -> "Scheme":
        """Returns the same where no more inputs are rotated together than divides these."""
        return replace(self, rotated=math.gcd(num_inputs, self.rotated))

    def rotation(self, num_inputs: int) -> np.ndarray | None:
        """Returns the block [b, b] that rotates so many inputs, its own inverse; None where they aren't rotated."""
        size = math.gcd(num_inputs, self.rotated)
        return _hadamard(size) if size > 1 else None


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "int8", None, True, rotated=_MAX_ROTATED),
        Scheme("int8_wo", "int8", None, False),
        Scheme("int4_wo", "int4", _GROUP_SIZE, False),
        Scheme("fp8", "float8_e4m3fn", None, True),
    )
}


class Rows(Protocol):
    """A matrix that may be read a few rows at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[O, I]."""
        ...

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Returns those rows as floats."""
        ...


class QuantizedWeight(NamedTuple):
    """Numbers and their scales."""

    values: np.ndarray  # [O, I] or [E, I, O] in the scheme's dtype
    scales: np.ndarray  # [G, O] or [E, G, O] float32


def quantize(weight: np.ndarray, scheme: Scheme) -> QuantizedWeight:
    """Quantizes one parameter, a part of it at a time.

    Args:
      weight: [O, I], or experts [E, I, O], in any float dtype.
      scheme: How; of_experts() for experts.
    """
    if weight.ndim == 2:
        return quantize_joined([weight], scheme)
    num_inputs = weight.shape[1]
    num_groups = scheme.num_groups(num_inputs)
    values = np.empty(weight.shape, scheme.dtype)
    grouped = (num_groups, num_inputs // num_groups, weight.shape[2])
    scales = np.empty((len(weight), num_groups, weight.shape[2]), np.float32)
    for expert, matrix in enumerate(weight):
        numbers, scale = _quantize(matrix.astype(np.float32).reshape(grouped), 1, scheme)
        values[expert], scales[expert] = numbers.reshape(matrix.shape), scale[:, 0]
    return QuantizedWeight(values, scales)


def quantize_joined(parts: Sequence[Rows], scheme: Scheme) -> QuantizedWeight:
    """Quantizes the matrix [O, I] whose rows those of the parts are, a few at a time: never are all of them floats.

    Args:
      parts: [O', I] each.
      scheme: How.
    """
    num_rows, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    num_groups, rotation = scheme.num_groups(num_inputs), scheme.rotation(num_inputs)
    values = aligned_empty((num_rows, num_inputs), scheme.dtype)
    scales = np.empty((num_groups, num_rows), np.float32)
    first = 0
    for part in parts:
        for rows in _chunks(*part.shape):
            floats = _rotated(part[rows].astype(np.float32), rotation)
            numbers, scale = _quantize(floats.reshape(len(floats), num_groups, -1), 2, scheme)
            there = slice(first + rows.start, first + rows.stop)
            values[there], scales[:, there] = numbers.reshape(floats.shape), scale[..., 0].T
        first += part.shape[0]
    return QuantizedWeight(values, scales)


def dequantize(weight: QuantizedWeight, scheme: Scheme) -> np.ndarray:
    """Returns float32 weights: [O, I] or [E, I, O]."""
    values: np.ndarray = weight.values.astype(np.float32)
    scales = weight.scales
    if values.ndim == 3:
        values *= np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
        return values
    widened: np.ndarray = values * np.repeat(scales.T, values.shape[1] // len(scales), axis=1)
    return _rotated(widened, scheme.rotation(values.shape[1]))


def _hadamard(size: int) -> np.ndarray:
    """Returns [size, size] float32, symmetric and orthogonal; size is a power of two."""
    matrix: np.ndarray = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(math.sqrt(2))
    return matrix


def _rotated(x: np.ndarray, rotation: np.ndarray | None) -> np.ndarray:
    return x if rotation is None else (x.reshape(-1, len(rotation)) @ rotation).reshape(x.shape)


def _quantize(x: np.ndarray, axis: int, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Maps the largest magnitude along `axis` to the largest number; zeros have scale 1. Changes x.

    Four bits go from -8 to 7, and all sixteen numbers count: the largest weight becomes -8, its scale has the sign for
    that, and one of the other sign that would become 8 is 7.
    """
    largest = np.abs(x).max(axis=axis, keepdims=True)
    if scheme.dtype_name == "int4":
        largest = np.take_along_axis(x, np.abs(x).argmax(axis=axis, keepdims=True), axis)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[scheme.dtype_name]))
    np.divide(x, scales, out=x)
    if scheme.dtype_name == "float8_e4m3fn":
        return x.astype(scheme.dtype), scales
    return np.rint(x, out=x).clip(max=_MOST[scheme.dtype_name]).astype(np.int8).astype(scheme.dtype), scales


def _chunks(num_rows: int, num_inputs: int) -> Iterator[slice]:
    size = max(_CHUNK_ELEMENTS // num_inputs, 1)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))
