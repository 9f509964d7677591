"""How the formats of quantized weights lay out their tensors, and plain numbers of them. Imports no jax, opens no file.

A weight is stored as several tensors: `module.qweight`, `module.scales`, ... All become Numbers, as definitions say:

    packed in words    word: int32 holds 32 / bits numbers, the first in its lowest bits
    awq                number c of a word's eight is at place 0 4 1 5 2 6 3 7 [c]; words along the outputs
    gptq               words along the inputs, those of zero points along the outputs; g_idx: the group of each input
    packed             words along the inputs, numbers have 2 ** (bits - 1) added; zero points: words along the outputs
    plain, blocks      int8 or fp8 as they are
    mxfp4              four-bit floats in pairs, the first in the lower half; scales are powers of 2
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.model_loader.stored_quantization import FP8, MXFP4_GROUP_SIZE, StoredFormat

Tensors = Mapping[str, np.ndarray]
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Twice the values of the eight positive codes.
_MXFP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_MXFP4_BIAS = 127


class Numbers(NamedTuple):
    """A weight before it is arranged for a model.

    Attributes:
      values: [O, I], or experts [E, I, O]; int8, int16 where they need it, or float8_e4m3fn.
      scales: [O, G], or experts [E, G, O] float32.
      group_of: [I], the group of each input.
    """

    values: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    def dequantized(self) -> np.ndarray:
        """Returns float32 weights in the shape of values."""
        widened: np.ndarray = self.values.astype(np.float32)
        widened *= np.take(self.scales, self.group_of, axis=1)
        return widened


class Layout(NamedTuple):
    """The tensors of one format.

    Attributes:
      scales: Ends the name of the scales; what comes before it names the module.
      needed: End the names of what else there must be.
      others: End the names of what there may be.
      weight: Ends the name that the weight has where it isn't quantized.
      read: (tensors by ending, format) -> the numbers. Raises ValueError where they don't fit together.
    """

    scales: str
    needed: tuple[str, ...]
    others: tuple[str, ...]
    weight: str
    read: Callable[[Tensors, StoredFormat], Numbers]


def unpacked(words: np.ndarray, num_bits: int) -> np.ndarray:
    """Returns the numbers, uint8 [..., n * 32 / num_bits], of words [..., n] of 32 bits; num_bits is 4 or 8.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    parts = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if num_bits == 8:
        return parts
    numbers = np.empty((*parts.shape, 2), np.uint8)
    np.bitwise_and(parts, 15, out=numbers[..., 0])
    np.right_shift(parts, 4, out=numbers[..., 1])
    return numbers.reshape(*parts.shape[:-1], -1)


def _awq(tensors: Tensors, form: StoredFormat) -> Numbers:
    numbers = _in_awq_order(unpacked(_words(tensors, ".qweight"), form.num_bits)).T  # [O, I]
    zeros = _in_awq_order(unpacked(_words(tensors, ".qzeros"), form.num_bits)).T  # [O, G]
    scales = _floats(tensors[".scales"]).T  # [O, G]
    group_of = _groups(numbers.shape[1], scales.shape[1], form)
    return Numbers(_centred(numbers, _same_shape(zeros, scales), group_of, form), scales, group_of)


def _in_awq_order(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(len(numbers), -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape)


def _gptq(tensors: Tensors, form: StoredFormat) -> Numbers:
    numbers = unpacked(_words(tensors, ".qweight").T, form.num_bits)  # [O, I]
    zeros = unpacked(_words(tensors, ".qzeros"), form.num_bits).T + np.int16(form.zero_offset)  # [O, G]
    scales = _floats(tensors[".scales"]).T  # [O, G]
    group_of = _groups(numbers.shape[1], scales.shape[1], form, tensors.get(".g_idx"))
    return Numbers(_centred(numbers, _same_shape(zeros, scales), group_of, form), scales, group_of)


def _packed(tensors: Tensors, form: StoredFormat) -> Numbers:
    words = _words(tensors, ".weight_packed")
    num_outputs, num_inputs = _shape(tensors[".weight_shape"])
    if words.shape != (num_outputs, -(-num_inputs * form.num_bits // 32)):
        raise ValueError(f"words {list(words.shape)} can't hold {num_outputs} x {num_inputs} numbers")
    numbers = unpacked(words, form.num_bits)[:, :num_inputs]
    scales = _by_output(tensors[".weight_scale"], num_outputs, form)
    group_of = _groups(num_inputs, scales.shape[1], form, tensors.get(".weight_g_idx"))
    if ".weight_zero_point" in tensors:
        zeros = unpacked(_words(tensors, ".weight_zero_point").T, form.num_bits).T[:num_outputs]
    else:
        zeros = np.full(scales.shape, 1 << form.num_bits - 1, np.uint8)
    return Numbers(_centred(numbers, _same_shape(zeros, scales), group_of, form), scales, group_of)


def _plain(tensors: Tensors, form: StoredFormat) -> Numbers:
    values = tensors[".weight"]
    if values.dtype.name not in ("int8", FP8) or values.ndim != 2:
        raise ValueError(f"numbers must be int8 or {FP8} of two dimensions, got {values.dtype}{list(values.shape)}")
    scales = _by_output(tensors[".weight_scale"], len(values), form)
    group_of = _groups(values.shape[1], scales.shape[1], form, tensors.get(".weight_g_idx"))
    zeros = tensors.get(".weight_zero_point")
    if zeros is not None and zeros.any():
        by_group = _rows(zeros, len(values), form).astype(np.int16)
        values = values.astype(np.int16) - np.take(by_group, group_of, axis=1)
    return Numbers(values, scales, group_of)


def _blocks(tensors: Tensors, form: StoredFormat) -> Numbers:
    return _plain({".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}, form)


def _mxfp4(tensors: Tensors, form: StoredFormat) -> Numbers:
    pairs, exponents = tensors["_blocks"], tensors["_scales"]  # [E, O, G, 16], [E, O, G]
    is_whole = pairs.ndim == 4 and pairs.shape == (*exponents.shape, MXFP4_GROUP_SIZE // 2)
    if not is_whole or pairs.dtype != np.uint8 or exponents.dtype != np.uint8:
        raise ValueError(f"blocks must be bytes by 16 for each scale, got {pairs.shape} for {exponents.shape}")
    codes = np.empty((*pairs.shape, 2), np.uint8)
    np.bitwise_and(pairs, 15, out=codes[..., 0])
    np.right_shift(pairs, 4, out=codes[..., 1])
    values = _MXFP4_DOUBLED[codes.reshape(*pairs.shape[:2], -1)]  # [E, O, I]
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - (_MXFP4_BIAS + 1))  # of the doubled values
    group_of = np.arange(values.shape[2]) // MXFP4_GROUP_SIZE
    return Numbers(values.transpose(0, 2, 1), scales.transpose(0, 2, 1), group_of)


def _words(tensors: Tensors, name: str) -> np.ndarray:
    words = tensors[name]
    if words.dtype != np.int32 or words.ndim != 2:
        raise ValueError(f"{name} must be int32 of two dimensions, got {words.dtype}{list(words.shape)}")
    return words


def _shape(stored: np.ndarray) -> tuple[int, int]:
    if stored.shape != (2,):
        raise ValueError(f"weight_shape must hold two sizes, got {stored.size}")
    return int(stored[0]), int(stored[1])


def _floats(scales: np.ndarray) -> np.ndarray:
    if scales.dtype.name not in _FLOATS:
        raise ValueError(f"scales must be floats, got {scales.dtype}")
    return scales.astype(np.float32)


def _by_output(scales: np.ndarray, num_outputs: int, form: StoredFormat) -> np.ndarray:
    return _rows(_floats(scales), num_outputs, form)


def _rows(values: np.ndarray, num_outputs: int, form: StoredFormat) -> np.ndarray:
    """Returns what is stored for the whole weight, or for each of its rows or blocks, as [O, G]."""
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (num_outputs, 1))
    rows = values.reshape(len(values), -1)
    if len(rows) != -(-num_outputs // form.num_rows):
        raise ValueError(f"{num_outputs} outputs in blocks of {form.num_rows} can't have {len(rows)} scales")
    return rows[np.arange(num_outputs) // form.num_rows]


def _groups(num_inputs: int, num_groups: int, form: StoredFormat, stored: np.ndarray | None = None) -> np.ndarray:
    """Returns the group of each input: [I]."""
    if stored is not None and stored.size and (stored >= 0).any():
        if stored.shape != (num_inputs,) or stored.min() < 0 or stored.max() >= num_groups:
            raise ValueError(f"groups of inputs must be in [0, {num_groups}) for each of {num_inputs} inputs")
        return stored.astype(np.int64)
    size = num_inputs if num_groups == 1 else form.group_size or num_inputs
    if -(-num_inputs // size) != num_groups:
        raise ValueError(f"{num_inputs} inputs in groups of {size} can't have {num_groups} scales")
    return np.arange(num_inputs) // size


def _same_shape(zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    if zeros.shape != scales.shape:
        raise ValueError(f"there must be a zero point for each scale, got {list(zeros.shape)} and {list(scales.shape)}")
    return zeros


def _centred(numbers: np.ndarray, zeros: np.ndarray, group_of: np.ndarray, form: StoredFormat) -> np.ndarray:
    """Returns numbers: [O, I] uint8 less their groups' zero points: [O, G], from 0 to 2 ** num_bits."""
    middle = 1 << form.num_bits - 1
    if (zeros == middle).all():  # what wraps around below zero is read as negative
        return np.subtract(numbers, np.uint8(middle)).view(np.int8)
    if form.num_bits == 4:
        return np.subtract(numbers, np.take(zeros.astype(np.uint8), group_of, axis=1)).view(np.int8)
    by_input: np.ndarray = np.take(zeros.astype(np.int16), group_of, axis=1)
    return numbers.astype(np.int16) - by_input


LAYOUTS = {
    "awq": Layout(".scales", (".qweight", ".qzeros"), (), ".weight", _awq),
    "gptq": Layout(".scales", (".qweight", ".qzeros"), (".g_idx",), ".weight", _gptq),
    "packed": Layout(
        ".weight_scale",
        (".weight_packed", ".weight_shape"),
        (".weight_zero_point", ".weight_g_idx"),
        ".weight",
        _packed,
    ),
    "plain": Layout(".weight_scale", (".weight",), (".weight_zero_point", ".weight_g_idx"), ".weight", _plain),
    "blocks": Layout(".weight_scale_inv", (".weight",), (), ".weight", _blocks),
    "mxfp4": Layout("_scales", ("_blocks",), (), "", _mxfp4),
}
