"""Which number formats a chip multiplies, what that means for the schemes that were asked for, and what can't be.

chip                                int8    fp8
CPU                                 yes     no, emulated
TPU v4                              no      no
TPU v5e, v5p                        yes     no
TPU v6e                             yes     yes
TPU7x                               no      yes
NVIDIA, compute capability from     7.5     8.9
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax.numpy as jnp

from jaxllm.exceptions import ConfigError
from jaxllm.quantization import Scheme


class Device(Protocol):
    """What is asked of a jax.Device; compute_capability of GPUs alone."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def compute_capability(self) -> str: ...


class _Products(NamedTuple):
    """Which formats a chip's matrix unit multiplies."""

    int8: bool
    fp8: bool


# The beginning of device_kind, the more special one first.
_TPUS = {
    "TPU v4": _Products(False, False),
    "TPU v5": _Products(True, False),  # v5e is "TPU v5 lite"
    "TPU v6": _Products(True, True),
    "TPU7": _Products(False, True),
    "TPU v7": _Products(False, True),
}


def describe_formats(scheme: Scheme | None, cache_dtype: jnp.dtype, device: Device) -> Iterator[str]:
    """Yields a line for the log on each choice that isn't the model's own dtype.

    Raises:
      ConfigError: The chip can't do it.
    """
    products = _products(device)
    if scheme is not None:
        yield f"quantization {scheme.name}: {_stored(scheme)}, {_multiplied(scheme, products, device)}"
    if cache_dtype == jnp.int8:
        yield "KV cache of int8: a scale for each dimension of each head, measured now on a text"
    elif cache_dtype.itemsize == 1:
        yield f"KV cache of {cache_dtype.name}: not scaled, kept within +-{float(jnp.finfo(cache_dtype).max):.0f}"


def _stored(scheme: Scheme) -> str:
    every = "output" if scheme.group_size is None else f"{scheme.group_size} inputs of each output"
    return f"weights of {scheme.dtype_name} with a scale every {every}"


def _multiplied(scheme: Scheme, products: _Products, device: Device) -> str:
    """Says how products are made."""
    kind = device.device_kind
    if not scheme.quantizes_activations:
        return "widened on their way into products with unquantized activations"
    if scheme.dtype_name == "int8":
        if products.int8:
            return f"multiplied with int8 activations, a scale a token, as {kind} does natively"
        other = "fp8 would be faster" if products.fp8 else "int8_wo would be as fast and more exact"
        return f"multiplied with int8 activations in the compute dtype, as {kind} has no products of int8: {other}"
    if products.fp8:
        return f"multiplied with fp8 activations, a scale a token, as {kind} does natively"
    if device.platform == "cpu":
        return "multiplied with fp8 activations widened to float32: emulated, to try what fp8 loses; int8 is faster"
    raise ConfigError(
        f"quantization {scheme.name} needs a chip that multiplies fp8: TPU v6e or TPU7x, or NVIDIA of compute "
        f"capability 8.9; this is {kind}; set --quantization int8"
    )


def _products(device: Device) -> _Products:
    if device.platform == "cpu":
        return _Products(True, False)
    if device.platform == "tpu":
        known = [products for kind, products in _TPUS.items() if device.device_kind.startswith(kind)]
        return known[0] if known else _Products(False, False)
    capability = float(device.compute_capability)
    return _Products(capability >= 7.5, capability >= 8.9)
