"""Turning a declared model into one whose weights are numbers and scales.

Families know nothing of it: they declare floats, and this declares some of them anew before anything is loaded.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jaxllm.layers.attention import Attention
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.latent_attention import LatentAttention
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.quantization import Scheme

Quantizable = Linear | Embedding | Experts


def declare_quantized(model: nnx.Module, scheme_of: Callable[[str, int], Scheme | None]) -> None:
    """Declares weights as numbers and scales. Call it under nnx.eval_shape.

    Args:
      model: As the family declared it.
      scheme_of: (path of a parameter, its inputs) -> how it is stored; None: as floats. Not asked about routers, whose
        choices a rounding could change.
    """
    modules = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Quantizable)]
    for path, module in modules:
        if _is_router(module):
            continue
        schemes = {
            scheme_of(".".join(map(str, (*path, name))), weight.get_value().shape[1])
            for name, weight in _weights(module).items()
        }
        scheme = schemes.pop()
        if scheme is not None and not schemes:  # a module has one
            module.quantize(scheme)


def _weights(module: Quantizable) -> "dict[str, nnx.Param[jax.Array]]":
    if isinstance(module, Experts):
        return {"gate_up": module.gate_up, "down": module.down}
    return {"weight": module.weight}


def declare_cache_scales(model: nnx.Module) -> None:
    """Declares each layer's scales of a KV cache of int8. Call it under nnx.eval_shape."""
    for _, module in list(nnx.iter_graph(model)):
        if isinstance(module, Attention | LatentAttention):
            module.scale_cache()


def _is_router(module: Quantizable) -> bool:
    return isinstance(module, Linear) and module.weight.get_metadata("logical_axes")[0] == "router"
