"""How weights become int8, int4 or fp8 numbers and scales: the schemes by name, and a pure function of numpy arrays.

A quantized parameter keeps its path and its shape, and holds numbers. Its scales stand beside it at the path with
`_scale` appended:

    attention.qkv.weight   [O, I]     numbers     attention.qkv.weight_scale   [G, O]     float32
    mlp.experts.gate_up    [E, I, O]  numbers     mlp.experts.gate_up_scale    [E, G, O]  float32
    frame.embed.weight     [V, M]     numbers     frame.embed.weight_scale     [1, V]     float32

G groups of inputs in their order have a scale each; number * scale is about the weight. Everything is symmetric: zero
stays zero. Norms, biases, routers, rotations and the matrices of latent attention's heads are never quantized.

Imports no jax. Doesn't know which hardware multiplies what: worker/quantization_choice.py does.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SCALE_SUFFIX = "_scale"
_GROUP_SIZE = 128
_MIN_GROUP_SIZE = 32
_CHUNK_ELEMENTS = 1 << 20  # widened to float32 at a time: stays in the processor's cache
_DTYPES: dict[str, "np.dtype[Any]"] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class Scheme:
    """One way to store a model's weights and to multiply with them.

    Attributes:
      name: As --quantization has it, or the checkpoint's own method.
      dtype_name: Of the numbers: "int8", "int4" or "float8_e4m3fn".
      group_size: Most inputs that share a scale; where it doesn't divide a weight's inputs, their greatest common
        divisor, or all of them if that is small. None: all.
      quantizes_activations: Whether each token becomes numbers too, so that products are of numbers.
    """

    name: str
    dtype_name: str
    group_size: int | None
    quantizes_activations: bool

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        return _DTYPES[self.dtype_name]

    def num_groups(self, num_inputs: int) -> int:
        """Returns G for a weight of so many inputs."""
        size = math.gcd(num_inputs, self.group_size or num_inputs)
        return num_inputs // size if size >= min(_MIN_GROUP_SIZE, self.group_size or num_inputs) else 1

    def of_table(self) -> "Scheme":
        """Returns how an embedding is stored: its rows are looked up, and four bits a number lose too much."""
        if self.dtype_name != "int4":
            return self
        return Scheme(self.name, "int8", None, self.quantizes_activations)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "int8", None, True),
        Scheme("int8_wo", "int8", None, False),
        Scheme("int4_wo", "int4", _GROUP_SIZE, False),
        Scheme("fp8", "float8_e4m3fn", None, True),
    )
}


class QuantizedWeight(NamedTuple):
    """Numbers and their scales."""

    values: np.ndarray  # [O, I] or [E, I, O] in the scheme's dtype
    scales: np.ndarray  # [G, O] or [E, G, O] float32


def quantize(weight: np.ndarray, scheme: Scheme) -> QuantizedWeight:
    """Quantizes one parameter, a part of it at a time.

    Args:
      weight: [O, I], or experts [E, I, O], in any float dtype.
      scheme: How.
    """
    num_inputs = weight.shape[1]
    num_groups = scheme.num_groups(num_inputs)
    values = np.empty(weight.shape, scheme.dtype)
    if weight.ndim == 3:
        grouped = (num_groups, num_inputs // num_groups, weight.shape[2])
        scales = np.empty((len(weight), num_groups, weight.shape[2]), np.float32)
        for expert, matrix in enumerate(weight):
            numbers, scale = _quantize(matrix.astype(np.float32).reshape(grouped), 1, scheme)
            values[expert], scales[expert] = numbers.reshape(matrix.shape), scale[:, 0]
        return QuantizedWeight(values, scales)
    scales = np.empty((num_groups, len(weight)), np.float32)
    for rows in _chunks(*weight.shape):
        part = weight[rows].astype(np.float32)
        numbers, scale = _quantize(part.reshape(len(part), num_groups, -1), 2, scheme)
        values[rows], scales[:, rows] = numbers.reshape(part.shape), scale[..., 0].T
    return QuantizedWeight(values, scales)


def dequantize(weight: QuantizedWeight) -> np.ndarray:
    """Returns float32 weights: [O, I] or [E, I, O]."""
    scales = weight.scales
    values: np.ndarray = weight.values.astype(np.float32)
    if values.ndim == 3:
        values *= np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    else:
        values *= np.repeat(scales.T, values.shape[1] // len(scales), axis=1)
    return values


def _quantize(x: np.ndarray, axis: int, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Maps the largest magnitude along `axis` to the largest number; zeros have scale 1. Changes x."""
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[scheme.dtype_name]))
    np.divide(x, scales, out=x)
    if scheme.dtype_name == "float8_e4m3fn":
        return x.astype(scheme.dtype), scales
    return np.rint(x, out=x).astype(np.int8).astype(scheme.dtype), scales


def _chunks(num_rows: int, num_inputs: int) -> Iterator[slice]:
    size = max(_CHUNK_ELEMENTS // num_inputs, 1)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))
