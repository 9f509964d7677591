"""The engine on another kernel backend says the same: the definition of correct against the default."""

from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams

_PROMPTS = ["The capital of France is", "One, two, three,", "def fibonacci(n):\n"]


def _generate(model: Path) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    # So few tokens a step that prompts are cut and mixed with decoding sequences.
    with LLM(model=str(model), max_num_seqs=2, max_num_batched_tokens=4, max_model_len=64) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(_PROMPTS, params, use_tqdm=False)]


@pytest.mark.slow
def test_the_reference_gives_the_default_backends_tokens(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _generate(smollm2_path)
    assert [len(token_ids) for token_ids in expected] == [12, 12, 12]
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    assert _generate(smollm2_path) == expected
