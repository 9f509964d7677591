"""Compiling a small kernel for GPUs that aren't there, and reading its figures."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.aot.gpu import TARGETS, compile_for_gpu
from pallas_kernels.aot.sass import Line, count_main_loop, parse

pytest.importorskip("triton")


def _matmul(rows, columns, num_steps):
    """[64, 512] x [512, 64] in up to sixteen products, on one program."""

    def kernel(rows_ref, columns_ref, num_steps_ref, out_ref):
        def step(index, total):
            part = pl.ds(index * 32, 32)
            return total + jnp.dot(rows_ref[:, part], columns_ref[part, :], preferred_element_type=jnp.float32)

        out_ref[...] = jax.lax.fori_loop(0, num_steps_ref[0], step, jnp.zeros((64, 64), jnp.float32))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
    )(rows, columns, num_steps)


def _specs(dtype):
    shapes = [((64, 512), dtype), ((512, 64), dtype), ((1,), jnp.int32)]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.parametrize("target", TARGETS)
def test_kernel_becomes_machine_code_with_figures(target):
    result = compile_for_gpu(_matmul, _specs(jnp.bfloat16), target)
    assert result.is_compiled, result.reason
    (kernel,) = result.kernels
    assert (kernel.name, kernel.grid, kernel.num_warps, kernel.num_stages) == ("kernel", (1, 1, 1), 4, 3)
    assert 32 < kernel.sass.registers <= 255
    assert kernel.sass.spill_bytes == 0
    assert kernel.shared_bytes >= 2 * (64 * 32 + 32 * 64) * 2  # two of the three stages at least, bf16
    assert kernel.sass.loop is not None
    assert kernel.sass.loop.matrix > 0
    assert kernel.sass.loop.spills == 0


def test_what_cannot_be_lowered_becomes_a_reason():
    result = compile_for_gpu(_matmul, _specs(jnp.uint8), "sm_90")
    assert not result.is_compiled
    assert result.kernels == ()
    assert "Unsigned integer dtype" in result.reason


def test_program_without_kernels_compiles_to_none():
    result = compile_for_gpu(jnp.sin, [jax.ShapeDtypeStruct((4,), jnp.float32)], "sm_80")
    assert result.is_compiled
    assert result.kernels == ()


def test_unknown_target_is_refused():
    with pytest.raises(ValueError, match="sm_80, sm_90, sm_100, got 'sm_75'"):
        compile_for_gpu(jnp.sin, [], "sm_75")


# A spin loop, then the loop proper with a spill in it, then a wait out of line that jumps back into it.
_LISTING = """
.L_x_0:
        /*0000*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R83], [R88.64] ;
        /*0020*/                   STL.64 [R1], R4 ;
        /*0030*/                   LDSM.16.M88.4 R12, [R80] ;
.L_x_3:
        /*0040*/                   HMMA.16816.F32.BF16 R8, R12.reuse, R40, RZ ;
        /*0050*/                   MUFU.EX2 R8, R8 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/              @!P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   HMMA.16816.F32.BF16 R8, R12.reuse, R40, RZ ;
        /*00a0*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_4);
"""


def test_main_loop_is_the_one_with_the_products():
    lines, labels = parse(_LISTING)
    assert lines[1] == Line("LDGSTS.E.BYPASS.128", " [R83], [R88.64] ;")
    loop = count_main_loop(lines, labels)
    assert loop._asdict() == {
        "instructions": 7,
        "matrix": 1,
        "loads": 1,
        "shared": 1,
        "barriers": 1,
        "exponentials": 1,
        "spills": 1,
    }


def test_code_without_a_loop_has_none():
    assert count_main_loop(*parse("        /*0000*/                   EXIT ;")) is None
