"""The real model against transformers in float32: token ids, log probabilities, greedy text, chat.

A greedy token must equal the reference's for as long as the reference was sure: once its own first and second logits
lie within MIN_GAP, rounding may decide, and what follows is another text.
"""

import json
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams

MIN_GAP = 0.02
GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct-q4_1.json").read_text(encoding="utf-8")
)
CASES = GOLDEN["cases"]
PROMPTS = [case["prompt"] for case in CASES]
NUM_TOKENS = 48


def num_sure_tokens(case: dict) -> int:
    """How many greedy tokens come before the reference was unsure."""
    gaps = case["greedy_top1_top2_logit_gap"]
    return next((i for i, gap in enumerate(gaps) if gap <= MIN_GAP), len(gaps))


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(model=str(smollm2_path), max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=10, prompt_logprobs=1)
    return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_prompt_token_ids_and_logprobs(outputs, index):
    case, output = CASES[index], outputs[index]
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert output.prompt_logprobs[0] is None
    ours = [
        position[token_id].logprob
        for position, token_id in zip(output.prompt_logprobs[1:], case["prompt_token_ids"][1:], strict=True)
    ]
    assert ours == pytest.approx(case["prompt_logprobs"][1:], abs=0.01)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_most_likely_next_tokens(outputs, index):
    case, first = CASES[index], outputs[index].outputs[0].logprobs[0]
    ours = [first[token_id].logprob for token_id in case["last_top10_ids"]]
    assert ours == pytest.approx(case["last_top10_logprobs"], abs=0.02)
    assert [first[token_id].rank for token_id in case["last_top10_ids"]] == list(range(1, 11))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_greedy_tokens(outputs, index):
    case, sequence = CASES[index], outputs[index].outputs[0]
    num_sure = num_sure_tokens(case)
    assert sequence.token_ids[:num_sure] == case["greedy_token_ids"][:num_sure]
    assert len(sequence.token_ids) == NUM_TOKENS
    assert sequence.finish_reason == "length"


def test_most_greedy_tokens_are_sure():
    """The rule above leaves enough to compare."""
    assert sum(map(num_sure_tokens, CASES)) > 0.5 * NUM_TOKENS * len(CASES)


def test_chat_example(llm):
    example = GOLDEN["chat_example"]
    (output,) = llm.chat(example["messages"], SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert output.prompt == example["rendered"]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == GOLDEN["eos_token_id"]
