"""One model's tokens don't depend on how many devices share it, nor on how: on eight virtual CPU devices."""

import pytest

from tests.fakes.sharded_models import run

FAMILIES = [
    "llama/gqa",
    "gemma3/pattern",
    "mixtral/top_3_of_5",
    "qwen3_moe/every_second_sparse",
    "deepseek_v3/yarn",
    "gpt_oss/sinks_windows_yarn",
    "olmo2/joint_head_norms",
    "opt/norm_after_and_projections",
]


@pytest.mark.parametrize(("num_tensor", "num_stages"), [(2, 1), (4, 2)])
def test_tiny_models_of_many_families(num_tensor, num_stages, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    results = run("families", tmp_path, num_tensor, num_stages, *FAMILIES)
    assert list(results) == FAMILIES
    for case, result in results.items():
        assert result["shared"] == result["alone"], case
        assert result["difference"] < 2e-5, case


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
