"""One model's tokens don't depend on how many devices share it, nor on how: on eight virtual CPU devices."""

import pytest

from tests.fakes.sharded_models import run

# Family, model, and of some the formats of weights and KV cache; and how far scores may be from one device's. Sums in
# another order may round a number in the cache to its neighbour.
FAMILIES = {
    "llama/gqa": 2e-5,
    "gemma3/pattern//int8": 2e-3,
    "mixtral/top_3_of_5/int8_wo": 2e-5,
    "qwen3_moe/every_second_sparse": 2e-5,
    "deepseek_v3/yarn/int4_wo/int8": 2e-3,
    "gpt_oss/sinks_windows_yarn": 2e-5,
    "olmo2/joint_head_norms": 2e-5,
    "opt/norm_after_and_projections": 2e-5,
}


def test_tiny_models_of_many_families(tmp_path, monkeypatch):
    """On two devices, and on two stages of four each."""
    _check_alike(FAMILIES, "2x1,4x2", tmp_path, monkeypatch)


def test_activations_of_int8_and_a_kv_head_of_zeros(tmp_path, monkeypatch):
    """Three devices fill two KV heads up. Where they share inputs, each scales its activations, so scores differ."""
    _check_alike({"llama/gqa/int8/int8": 0.1}, "3x2", tmp_path, monkeypatch)


def _check_alike(cases, meshes, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    results = run("families", tmp_path, meshes, *cases)
    assert list(results) == list(cases)
    for case, by_mesh in results.items():
        assert len(by_mesh) == len(meshes.split(","))
        for mesh, result in zip(meshes.split(","), by_mesh, strict=True):
            assert result["shared"] == result["alone"], (case, mesh)
            assert result["difference"] < cases[case], (case, mesh)


@pytest.fixture(scope="module")
def alone(smollm2_path, tmp_path_factory):
    return run("smollm2", tmp_path_factory.mktemp("alone"), 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tensor", "num_stages"), [(3, 1), (2, 1), (1, 2), (2, 2)])
def test_smollm2_says_the_same(num_tensor, num_stages, alone, tmp_path):
    """9 query and 3 KV heads: three devices divide them, two need zero heads."""
    shared = run("smollm2", tmp_path, num_tensor, num_stages)
    assert shared == alone
    assert min(alone[f"num_{what}"] for what in ("cached_tokens", "swapped_out_blocks", "copied_blocks")) > 0
