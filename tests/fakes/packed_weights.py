"""Weights as other tools store them, written number by number from the formats' definitions; and what they mean.

Slow and plain on purpose: it is what packed_numbers.py is compared with. Shares nothing with jaxllm.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GROUP_SIZE = 16
_FP8 = ml_dtypes.float8_e4m3fn
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Packed(NamedTuple):
    """One weight, stored."""

    tensors: dict[str, np.ndarray]  # by the ending of their names
    floats: np.ndarray  # what they mean, float32 in the shape of the weight


class Way(NamedTuple):
    """One way to store a model's linear layers."""

    config: dict[str, Any]  # quantization_config
    pack: Callable[[np.ndarray], Packed]


def word(numbers: Sequence[int], bits: int) -> int:
    """Returns a signed word of 32 bits, the first number in its lowest bits."""
    whole = sum((int(number) & (1 << bits) - 1) << bits * place for place, number in enumerate(numbers))
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def pack_rows(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs each row of [R, C] into words [R, C * bits / 32], the last one filled up with zeros."""
    size = 32 // bits
    words = [[word(row[i : i + size], bits) for i in range(0, len(row), size)] for row in numbers.tolist()]
    return np.array(words, np.int32)


def _rounded(weight: np.ndarray, group_of: np.ndarray, bits: int, is_symmetric: bool) -> tuple[np.ndarray, ...]:
    """Returns numbers [O, I] from 0, zero points [O, G] and float16 scales [O, G]."""
    num_groups, top = int(group_of.max()) + 1, (1 << bits) - 1
    numbers = np.zeros(weight.shape, np.int64)
    zeros, scales = np.zeros((len(weight), num_groups), np.int64), np.zeros((len(weight), num_groups), np.float16)
    for row, group in np.ndindex(zeros.shape):
        members = weight[row, group_of == group]
        low, high = min(members.min(), 0.0), max(members.max(), 0.0)
        if is_symmetric:
            scale, zero = 2 * max(-low, high) / top, (top + 1) // 2
        else:
            scale = (high - low) / top
            zero = round(-low / scale)
        scales[row, group], zeros[row, group] = scale, zero
        numbers[row, group_of == group] = np.clip(np.rint(members / np.float32(scales[row, group])) + zero, 0, top)
    return numbers, zeros, scales


def _meaning(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    floats = np.zeros(numbers.shape, np.float32)
    for row, column in np.ndindex(numbers.shape):
        group = group_of[column]
        floats[row, column] = np.float32(numbers[row, column] - zeros[row, group]) * np.float32(scales[row, group])
    return floats


def _in_order(weight: np.ndarray) -> np.ndarray:
    return np.arange(weight.shape[1]) // GROUP_SIZE


def _awq(weight: np.ndarray) -> Packed:
    group_of = _in_order(weight)
    numbers, zeros, scales = _rounded(weight, group_of, 4, False)

    def packed(columns: np.ndarray) -> np.ndarray:  # [R, O] -> [R, O / 8]; a word's places hold 0 2 4 6 1 3 5 7
        order = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8] for i in range(columns.shape[1])]
        return pack_rows(columns[:, order], 4)

    tensors = {".qweight": packed(numbers.T), ".qzeros": packed(zeros.T), ".scales": np.ascontiguousarray(scales.T)}
    return Packed(tensors, _meaning(numbers, zeros, scales, group_of))


def _gptq(weight: np.ndarray, bits: int, is_symmetric: bool, zero_offset: int, is_shuffled: bool = False) -> Packed:
    group_of = _in_order(weight)
    if is_shuffled:
        group_of = np.random.default_rng(weight.shape[1]).permutation(group_of)
    numbers, zeros, scales = _rounded(weight, group_of, bits, is_symmetric)
    tensors = {
        ".qweight": np.ascontiguousarray(pack_rows(numbers, bits).T),
        ".qzeros": pack_rows((zeros - zero_offset).T, bits),
        ".scales": np.ascontiguousarray(scales.T),
        ".g_idx": group_of.astype(np.int32),
    }
    return Packed(tensors, _meaning(numbers, zeros, scales, group_of))


def _packed(weight: np.ndarray, bits: int, is_symmetric: bool, is_grouped: bool, is_shuffled: bool = False) -> Packed:
    group_of = _in_order(weight) if is_grouped else np.zeros(weight.shape[1], int)
    if is_shuffled:
        group_of = np.random.default_rng(weight.shape[1]).permutation(group_of)
    numbers, zeros, scales = _rounded(weight, group_of, bits, is_symmetric)
    tensors = {
        ".weight_packed": pack_rows(numbers, bits),
        ".weight_scale": scales.astype(ml_dtypes.bfloat16),
        ".weight_shape": np.array(weight.shape, np.int64),
    }
    if is_shuffled:
        tensors[".weight_g_idx"] = group_of.astype(np.int32)
    if not is_symmetric:
        tensors[".weight_zero_point"] = np.ascontiguousarray(pack_rows(zeros.T, bits).T)
    return Packed(tensors, _meaning(numbers, zeros, scales.astype(ml_dtypes.bfloat16), group_of))


def _int8(weight: np.ndarray, scale_shape: str) -> Packed:
    largest = np.abs(weight).max(axis=1, keepdims=True) if scale_shape == "channel" else np.abs(weight).max()
    scales = (largest / 127).astype(np.float32)
    numbers = np.rint(weight / scales).astype(np.int8)
    stored = scales if scale_shape == "channel" else scales.reshape(1)
    tensors = {".weight": numbers, ".weight_scale": stored, ".input_scale": np.ones(1, np.float32)}
    return Packed(tensors, numbers.astype(np.float32) * scales)


def _fp8(weight: np.ndarray, scale_shape: str) -> Packed:
    largest = np.abs(weight).max(axis=1, keepdims=True) if scale_shape == "channel" else np.abs(weight).max()
    scales = (largest / 448).astype(np.float32)
    numbers = (weight / scales).astype(_FP8)
    tensors = {".weight": numbers, ".weight_scale": scales, ".input_scale": np.float32(1)}
    return Packed(tensors, numbers.astype(np.float32) * scales)


def _fp8_blocks(weight: np.ndarray, name: str) -> Packed:
    """A scale each 24 outputs of 16 inputs."""
    shape = (-(-weight.shape[0] // 24), -(-weight.shape[1] // GROUP_SIZE))
    scales, numbers = np.zeros(shape, np.float32), np.zeros(weight.shape, _FP8)
    floats = np.zeros(weight.shape, np.float32)
    for i, j in np.ndindex(shape):
        part = (slice(24 * i, 24 * i + 24), slice(GROUP_SIZE * j, GROUP_SIZE * j + GROUP_SIZE))
        scales[i, j] = np.abs(weight[part]).max() / 448
        numbers[part] = (weight[part] / scales[i, j]).astype(_FP8)
        floats[part] = numbers[part].astype(np.float32) * scales[i, j]
    return Packed({".weight": numbers, name: scales}, floats)


def pack_mxfp4(experts: np.ndarray) -> Packed:
    """Packs [E, I, O], I a multiple of 32, to blocks [E, O, I / 32, 16] and scales [E, O, I / 32]."""
    num_experts, num_inputs, num_outputs = experts.shape
    blocks = np.zeros((num_experts, num_outputs, num_inputs // 32, 16), np.uint8)
    scales, floats = np.zeros(blocks.shape[:3], np.uint8), np.zeros(experts.shape, np.float32)
    for expert, output, group in np.ndindex(scales.shape):
        members = experts[expert, 32 * group : 32 * group + 32, output]
        exponent = int(np.ceil(np.log2(np.abs(members).max() / 6)))
        scales[expert, output, group] = exponent + 127
        codes = [min(range(16), key=lambda code: abs(_MXFP4_VALUES[code] - x / 2.0**exponent)) for x in members]
        blocks[expert, output, group] = [codes[i] + 16 * codes[i + 1] for i in range(0, 32, 2)]
        floats[expert, 32 * group : 32 * group + 32, output] = [_MXFP4_VALUES[code] * 2.0**exponent for code in codes]
    return Packed({"_blocks": blocks, "_scales": scales}, floats)


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_GROUPED = {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}
_TOKENS = {"num_bits": 8, "dynamic": True, "strategy": "token"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "desc_act": False, "sym": True}
WAYS = {
    "awq": Way({"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True}, _awq),
    "gptq": Way(_GPTQ, lambda weight: _gptq(weight, 4, True, 1)),
    "gptq v2": Way({**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, lambda weight: _gptq(weight, 4, False, 0)),
    "gptq act-order": Way({**_GPTQ, "desc_act": True}, lambda weight: _gptq(weight, 4, True, 1, is_shuffled=True)),
    "gptq of 8 bits": Way({**_GPTQ, "bits": 8}, lambda weight: _gptq(weight, 8, True, 1)),
    "gptq of 8 bits, asymmetric": Way({**_GPTQ, "bits": 8, "sym": False}, lambda weight: _gptq(weight, 8, False, 1)),
    "int4": Way(
        _compressed("pack-quantized", {**_GROUPED, "symmetric": True}),
        lambda weight: _packed(weight, 4, True, is_grouped=True),
    ),
    "int4, asymmetric": Way(
        _compressed("pack-quantized", {**_GROUPED, "symmetric": False}),
        lambda weight: _packed(weight, 4, False, is_grouped=True),
    ),
    "int4 act-order": Way(
        _compressed("pack-quantized", {**_GROUPED, "symmetric": True, "actorder": "group"}),
        lambda weight: _packed(weight, 4, True, is_grouped=True, is_shuffled=True),
    ),
    "int8 packed": Way(
        _compressed("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        lambda weight: _packed(weight, 8, True, is_grouped=False),
    ),
    "int8": Way(
        _compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}, _TOKENS),
        lambda weight: _int8(weight, "channel"),
    ),
    "int8, a scale each tensor": Way(
        _compressed("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": True}, _TOKENS),
        lambda weight: _int8(weight, "tensor"),
    ),
    "fp8": Way(
        _compressed("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}, _TOKENS),
        lambda weight: _fp8(weight, "channel"),
    ),
    "fp8, a scale each tensor": Way(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: _fp8(weight, "tensor")
    ),
    "fp8 blocks": Way(
        {"quant_method": "fp8", "weight_block_size": [24, GROUP_SIZE], "activation_scheme": "dynamic"},
        lambda weight: _fp8_blocks(weight, ".weight_scale_inv"),
    ),
    "fp8 blocks, compressed": Way(
        _compressed(
            "float-quantized",
            {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [24, GROUP_SIZE]},
            _TOKENS,
        ),
        lambda weight: _fp8_blocks(weight, ".weight_scale"),
    ),
}


def write_packed(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    way: Way,
    is_packed: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> tuple[Path, Path]:
    """Writes a model twice: with its linear layers stored that way, and with the floats that these mean."""
    packed, floats = {}, {}
    for name, values in tensors.items():
        packed[name] = floats[name] = values
        if is_packed(name):
            stored = way.pack(values)
            del packed[name]
            packed |= {name.removesuffix(".weight") + ending: tensor for ending, tensor in stored.tensors.items()}
            floats[name] = stored.floats
    folders = path / "packed", path / "floats"
    for folder, kind, own in zip(folders, (packed, floats), ({"quantization_config": way.config}, {}), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**config, **own}))
        save_file({name: np.ascontiguousarray(values) for name, values in kind.items()}, folder / "model.safetensors")
    return folders
