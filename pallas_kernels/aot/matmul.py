"""The quantized product as rows of the table."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.aot.program import Program, Trips, Work
from pallas_kernels.aot.shapes import MatmulShape
from pallas_kernels.aot.targets import GpuTarget, TpuTarget
from pallas_kernels.aot.trials import Trial
from pallas_kernels.quantized_matmul import quantize_weight, quantized_matmul
from pallas_kernels.quantized_matmul.tpu import choose_tile
from pallas_kernels.quantized_matmul.triton import choose_tiling


def build(shape: MatmulShape, target: TpuTarget | GpuTarget) -> Program:
    """Makes the call of the public wrapper with the target's backend."""
    backend = "tpu" if isinstance(target, TpuTarget) else "triton"
    dtype = _weight_dtype(shape)
    num_groups = shape.num_inputs // shape.group_size
    arguments = (
        jax.ShapeDtypeStruct((shape.num_tokens, shape.num_inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.num_outputs, shape.num_inputs), dtype),
        jax.ShapeDtypeStruct((num_groups, shape.num_outputs), jnp.float32),
    )
    runs, reads_of_weight, reads_of_x = _tpu_plan(shape) if backend == "tpu" else _gpu_plan(shape)
    return Program(
        function=_function(shape, backend),
        arguments=arguments,
        work=_work(shape, reads_of_weight, reads_of_x),
        trips={"quantized_matmul": Trips((runs,))},
    )


def make_trial(shape: MatmulShape, backend: str) -> Trial:
    """Random activations times a random weight, quantized."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (shape.num_tokens, shape.num_inputs), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (shape.num_outputs, shape.num_inputs)) * shape.num_inputs**-0.5
    quantized = quantize_weight(weight, _weight_dtype(shape), shape.group_size)

    def expected() -> jax.Array:
        return jax.jit(_function(shape, "reference"))(x, *quantized)

    return Trial(arguments=(x, *quantized), expected=expected, tolerance=1e-2)


def _function(shape: MatmulShape, backend: str) -> functools.partial[jax.Array]:
    return functools.partial(quantized_matmul, quantize_activations=shape.scheme == "w8a8", backend=backend)


def _weight_dtype(shape: MatmulShape) -> jnp.dtype:
    return jnp.dtype(jnp.int4 if shape.scheme == "w4" else jnp.int8)


def _work(shape: MatmulShape, reads_of_weight: int, reads_of_x: int) -> Work:
    """Activations come as bfloat16 and results go so; with w8a8 they are read as int8."""
    x_bytes = shape.num_tokens * shape.num_inputs * 2
    out_bytes = shape.num_tokens * shape.num_outputs * 2
    scale_bytes = shape.num_inputs // shape.group_size * shape.num_outputs * 4
    operations = 2 * shape.num_tokens * shape.num_inputs * shape.num_outputs
    is_int8 = shape.scheme == "w8a8"
    moved_x = x_bytes // 2 if is_int8 else x_bytes
    return Work(
        needed_bytes=x_bytes + shape.weight_bytes + scale_bytes + out_bytes,
        needed_flops=0 if is_int8 else operations,
        needed_int8_ops=operations if is_int8 else 0,
        moved_bytes=moved_x * reads_of_x + (shape.weight_bytes + scale_bytes) * reads_of_weight + out_bytes,
    )


def _tpu_plan(shape: MatmulShape) -> tuple[int, int, int]:
    """Returns the steps of the grid, and how often the weight and the activations are read."""
    tile = choose_tile(shape.num_tokens, shape.num_outputs, shape.num_inputs, shape.group_size, _weight_dtype(shape))
    token_tiles, output_tiles = -(-shape.num_tokens // tile.tokens), -(-shape.num_outputs // tile.outputs)
    return token_tiles * output_tiles * (shape.num_inputs // tile.inputs), token_tiles, output_tiles


def _gpu_plan(shape: MatmulShape) -> tuple[int, int, int]:
    """The same, with the steps of all programs' loops."""
    tiling = choose_tiling(shape.num_tokens, shape.num_outputs, shape.num_inputs, shape.group_size)
    token_tiles, output_tiles = -(-shape.num_tokens // tiling.tokens), -(-shape.num_outputs // tiling.outputs)
    return token_tiles * output_tiles * (shape.num_inputs // tiling.inputs), token_tiles, output_tiles
