import dataclasses

import pytest

from pallas_kernels.aot import matmul
from pallas_kernels.aot.check import run_program
from pallas_kernels.aot.program import Program
from pallas_kernels.aot.shapes import MatmulShape
from pallas_kernels.aot.targets import GPU_TARGETS, TPU_TARGETS

V6E, H100 = TPU_TARGETS["v6e"], GPU_TARGETS["sm_90"]


def make_shape(scheme: str) -> MatmulShape:
    return MatmulShape(weight="tiny", num_tokens=300, num_inputs=512, num_outputs=640, scheme=scheme)


def test_bytes_and_steps_on_a_tpu_by_hand() -> None:
    program = matmul.build(make_shape("w8"), V6E)
    # Two tiles of 256 tokens and one of all outputs and inputs: the weight is read twice, the activations once.
    assert program.trips["quantized_matmul"].bodies == (2,)
    x, weight, scales, out = 300 * 512 * 2, 512 * 640, 640 * 4, 300 * 640 * 2
    assert program.work.needed_bytes == x + weight + scales + out
    assert program.work.moved_bytes == x + 2 * (weight + scales) + out
    assert (program.work.needed_flops, program.work.needed_int8_ops) == (2 * 300 * 512 * 640, 0)


def test_bytes_and_steps_on_a_gpu_by_hand() -> None:
    program = matmul.build(make_shape("w8a8"), H100)
    # Tiles of 128 tokens and 128 outputs, 128 inputs a step: 3 x 5 tiles of 4 steps.
    assert program.trips["quantized_matmul"].bodies == (60,)
    assert program.work.moved_bytes == 300 * 512 * 5 + 3 * (512 * 640 + 640 * 4) + 300 * 640 * 2
    assert (program.work.needed_flops, program.work.needed_int8_ops) == (0, 2 * 300 * 512 * 640)


def test_an_int4_weight_takes_half_the_bytes_and_more_scales() -> None:
    shape = make_shape("w4")
    assert (shape.weight_bytes, shape.group_size) == (512 * 640 // 2, 128)
    assert matmul.build(shape, V6E).arguments[2].shape == (4, 640)


@pytest.mark.parametrize("scheme", ["w8a8", "w8", "w4"])
def test_the_trial_tells_right_from_wrong(scheme: str) -> None:
    shape = make_shape(scheme)
    program = matmul.build(shape, V6E)

    def with_function(function: object) -> Program:
        return dataclasses.replace(program, function=function)

    right = with_function(matmul._function(shape, "xla"))
    assert run_program(right, matmul.make_trial(shape, "xla"), V6E)[1] is None
    wrong = with_function(lambda x, weight, scales: matmul._function(shape, "xla")(x, weight, scales * 1.1))
    assert run_program(wrong, matmul.make_trial(shape, "xla"), V6E)[1] is not None
