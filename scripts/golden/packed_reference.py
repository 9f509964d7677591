"""Makes tests/golden/packed_weights.npz: weights as the tools that define the formats store them, and read them again.

compressed-tensors for its own formats, AutoAWQ and AutoGPTQ for theirs, transformers for fp8 of blocks and MXFP4. Uses
nothing of jaxllm. Run by scripts/make_golden, in an environment that has these; of AutoAWQ and AutoGPTQ, whose packages
want a GPU and old versions, two modules are enough.
"""

import argparse
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

Tensors = dict[str, torch.Tensor]
_GROUP_SIZE = 32
_OUTPUTS, _INPUTS = 32, 96


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the golden file of packed weights.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    args = parser.parse_args()
    torch.manual_seed(0)
    made = _compressed() | {"awq": _awq()} | _gptq() | {"blocks": _blocks(), "mxfp4": _mxfp4()}
    arrays = {
        f"{way}/{name}": tensor.view(torch.uint8).numpy() if tensor.dtype == torch.float8_e4m3fn else tensor.numpy()
        for way, tensors in made.items()
        for name, tensor in tensors.items()
    }
    stored = np.load(args.file) if args.file.exists() else {}
    for name, values in arrays.items():
        is_same = name in stored and np.array_equal(stored[name], values)
        print(f"{name}: {values.dtype}{list(values.shape)}, {'the same' if is_same else 'new'}")
    if args.write:
        np.savez_compressed(args.file, **arrays)


def _weight(num_inputs: int = _INPUTS) -> torch.Tensor:
    return torch.randn(_OUTPUTS, num_inputs) + 0.3


def _compressed() -> dict[str, Tensors]:
    grouped = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP_SIZE}
    ways = {
        "packed int4": ("pack-quantized", {**grouped, "symmetric": True}, _INPUTS),
        "packed int4 asymmetric": ("pack-quantized", {**grouped, "symmetric": False}, _INPUTS),
        "packed int4 channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, 37),
        "packed int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _INPUTS),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _INPUTS),
        "int8 asymmetric": (
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
            _INPUTS,
        ),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _INPUTS),
    }
    return {
        way: _compress(form, QuantizationArgs(**args), _weight(inputs)) for way, (form, args, inputs) in ways.items()
    }


def _compress(form: str, args: QuantizationArgs, weight: torch.Tensor) -> Tensors:
    groups = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = compressor.compress({"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, scheme)
    meant = compressor.decompress(dict(stored), scheme)["weight"]
    return {**{f".{name}": tensor for name, tensor in stored.items()}, "meant": meant.float()}


def _awq() -> Tensors:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):  # without what they import at the top
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(_site("compressed_tensors") / name.replace(".", "/"))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(_INPUTS, _OUTPUTS, bias=False)
    scales, zeros = _asymmetric(linear.weight.data)
    module = WQLinear_GEMM.from_linear(linear, 4, _GROUP_SIZE, False, scales.T.contiguous(), zeros.T.contiguous())
    stored = {".qweight": module.qweight, ".qzeros": module.qzeros, ".scales": module.scales}
    meant = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, _GROUP_SIZE)
    return {**stored, "meant": meant.T.contiguous()}


def _gptq() -> dict[str, Tensors]:
    sys.modules["auto_gptq"] = types.ModuleType("auto_gptq")
    sys.modules["auto_gptq"].__path__ = [str(_site("compressed_tensors") / "auto_gptq")]
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    made = {}
    in_order = torch.arange(_INPUTS) // _GROUP_SIZE
    for way, bits, is_symmetric, group_of in (
        ("gptq", 4, True, in_order),
        ("gptq asymmetric", 4, False, in_order),
        ("gptq act-order", 4, False, in_order[torch.randperm(_INPUTS)]),
        ("gptq 8 bits", 8, True, in_order),
        ("gptq 8 bits asymmetric", 8, False, in_order),
    ):
        linear = torch.nn.Linear(_INPUTS, _OUTPUTS, bias=False)
        scales, zeros = _asymmetric(linear.weight.data, bits, group_of)
        if is_symmetric:
            scales, zeros = scales * 1.5, torch.full_like(zeros, 1 << bits - 1)
        module = QuantLinear(bits, _GROUP_SIZE, _INPUTS, _OUTPUTS, False, weight_dtype=torch.float32)
        module.pack(linear, scales.half().float(), zeros.clone(), group_of.int())
        meant = module(torch.eye(_INPUTS)).detach().T.contiguous()
        stored = {".qweight": module.qweight, ".qzeros": module.qzeros, ".g_idx": module.g_idx}
        made[way] = {**stored, ".scales": module.scales.half(), "meant": meant}
    return made


def _asymmetric(
    weight: torch.Tensor, bits: int = 4, group_of: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zero points [O, G] that span each group; no zero point is 0, which GPTQ's files can't say."""
    group_of = torch.arange(_INPUTS) // _GROUP_SIZE if group_of is None else group_of
    groups = torch.stack([weight[:, group_of == group] for group in range(int(group_of.max()) + 1)], dim=1)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, torch.round(-low / scales).clamp(1, 2**bits - 1)


def _blocks() -> Tensors:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = torch.rand(_OUTPUTS // 16, _INPUTS // _GROUP_SIZE) / 100 + 0.001
    numbers = (_weight() / scales.repeat_interleave(16, 0).repeat_interleave(_GROUP_SIZE, 1)).clamp(-448, 448)
    numbers = numbers.to(torch.float8_e4m3fn)
    meant = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)
    return {".weight": numbers, ".weight_scale_inv": scales, "meant": meant}


def _mxfp4() -> Tensors:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, _OUTPUTS, _INPUTS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)
    meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, I, O]
    return {"_blocks": blocks, "_scales": scales, "meant": meant.contiguous()}


def _site(package: str) -> Path:
    """Returns where packages are installed."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


if __name__ == "__main__":
    main()
