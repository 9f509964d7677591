"""The device check on the CPU, with the reference in place of a chip's kernels."""

import dataclasses
import functools
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import baseline, check, shapes
from pallas_kernels.aot.attention import attention_options
from pallas_kernels.aot.check import find_target, largest_error, measure, run_program
from pallas_kernels.aot.program import Program, Work
from pallas_kernels.aot.shapes import AttentionShape, Batch, Heads
from pallas_kernels.aot.targets import TPU_TARGETS
from pallas_kernels.aot.trials import Trial, attention_trial
from pallas_kernels.paged_attention import paged_attention

SHAPE = AttentionShape(
    heads=Heads(model="tiny", num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=9),
    batch=Batch(name="b", query_lens=(5, 1, 1), seq_lens=(5, 30, 17)),
    block_size=256,
)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_CACHE_TOKENS", 4096)


def make_program(shape: AttentionShape, **changes: Any) -> Program:
    options = {**attention_options(shape), "backend": "reference", **changes}
    return Program(
        function=functools.partial(paged_attention, **options),
        arguments=(),
        work=Work(needed_bytes=1.64e6, needed_flops=0, moved_bytes=2e6),
        trips={},
    )


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_a_right_kernel_passes_and_is_timed(kv_dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, kv_dtype=kv_dtype)
    figures, reason = run_program(make_program(shape), attention_trial(shape, "reference"), TPU_TARGETS["v6e"])
    assert reason is None
    assert figures["measured_us"] > 0
    # 1.64 MB take 1 us on a v6e.
    assert figures["roofline_share"] == pytest.approx(1 / figures["measured_us"], abs=1e-3)


def test_a_wrong_kernel_is_named_with_its_error() -> None:
    program = make_program(SHAPE, sliding_window=10)
    figures, reason = run_program(program, attention_trial(SHAPE, "reference"), TPU_TARGETS["v6e"])
    assert figures["error"] > 1e-2
    assert reason is not None and reason.startswith("differs from the reference by ")


def test_a_program_that_overwrites_its_argument_runs_on_its_own_result() -> None:
    program = Program(
        function=lambda cache, row: cache.at[0].set(row),
        arguments=(),
        donated=(0,),
        work=Work(1, 0, 1),
        trips={},
    )
    expected = np.array([[7.0, 7.0], [0.0, 0.0]])
    trial = Trial(arguments=(jnp.zeros((2, 2)), jnp.full((2,), 7.0)), expected=lambda: expected, tolerance=0)
    assert run_program(program, trial, TPU_TARGETS["v6e"])[1] is None


def test_errors_are_relative_to_one_and_nan_is_the_worst() -> None:
    assert largest_error((np.array([1.5, 10.0]),), (np.array([1.0, 9.0]),)) == pytest.approx(0.25)
    assert largest_error(np.array([np.nan]), np.array([1.0])) == np.inf


def test_calls_of_a_batch_are_counted() -> None:
    calls = []

    def run(number: jax.Array) -> jax.Array:
        calls.append(float(number))
        return number + 1

    assert measure(run, (jnp.float32(0),), is_chained=True) > 0
    assert calls == [float(number) for number in range(len(calls))]


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "name", "bandwidth"),
    [
        ("tpu", "TPU v6 lite", "", "v6e", 1.64e12),
        ("tpu", "TPU7x", "", "tpu7x", 3.7e12),
        ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "sm_90", 3.35e12),
        ("gpu", "NVIDIA H200", "9.0", "sm_90", 4.8e12),
    ],
)
def test_devices_are_known(platform: str, kind: str, capability: str, name: str, bandwidth: float) -> None:
    target = find_target(platform, kind, capability)
    assert target is not None
    assert (target.name, target.hbm_bytes_per_s) == (name, bandwidth)


@pytest.mark.parametrize(
    ("platform", "kind", "capability"), [("cpu", "cpu", ""), ("gpu", "Tesla T4", "7.5"), ("tpu", "TPU v3", "")]
)
def test_devices_without_kernels_are_no_targets(platform: str, kind: str, capability: str) -> None:
    assert find_target(platform, kind, capability) is None


def test_without_an_accelerator_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["gpu"]) == 2
    assert capsys.readouterr().err == "gpu_check: JAX finds cpu, no GPU that the kernels are for\n"


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_the_scripts_say_so_before_they_install_anything(name: str) -> None:
    done = subprocess.run([f"scripts/{name}_check"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"scripts/{name}_check: there is no ") and done.stderr.count("\n") == 1


def test_the_in_tree_kernel_gets_the_same_numbers_in_its_layout() -> None:
    ours, theirs = attention_trial(SHAPE, "reference"), baseline.make_trial(SHAPE, "tpu")
    k, v = ours.arguments[1]
    pages = theirs.arguments[1]
    assert pages.shape == (16, 256, 4, 128)
    np.testing.assert_array_equal(pages[:, :, 0, :16], k[:, :, 0])
    np.testing.assert_array_equal(pages[:, :, 3, :16], v[:, :, 1])
    np.testing.assert_array_equal(theirs.expected()[:, :, :16], ours.expected())
    assert not np.any(np.asarray(theirs.arguments[0][:, :, 16:], np.float32))
