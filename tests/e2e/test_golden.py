"""The real models against transformers in float32: token ids, log probabilities, greedy text, chat.

A greedy token must equal the reference's for as long as the reference was sure: once its own first and second logits
lie within MIN_GAP, rounding may decide, and what follows is another text.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.model_loader import demo_models

pytestmark = pytest.mark.slow
MIN_GAP = 0.02
NUM_CASES = 12
NUM_TOKENS = {"smollm2": 48, "gemma3-270m": 24}
GOLDEN_FILES = {"smollm2": "smollm2-135m-instruct-q4_1.json", "gemma3-270m": "gemma-3-270m-q4_k_m.json"}


class _Run(NamedTuple):
    """A model that has answered its golden prompts."""

    llm: LLM
    golden: dict[str, Any]
    outputs: list[RequestOutput]
    num_tokens: int


def num_sure_tokens(case: dict) -> int:
    """How many greedy tokens come before the reference was unsure."""
    gaps = case["greedy_top1_top2_logit_gap"]
    return next((i for i, gap in enumerate(gaps) if gap <= MIN_GAP), len(gaps))


@pytest.fixture(scope="module", params=GOLDEN_FILES)
def run(request):
    name = request.param
    golden = json.loads((Path(__file__).parents[1] / "golden" / GOLDEN_FILES[name]).read_text(encoding="utf-8"))
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS[name], ignore_eos=True, logprobs=10, prompt_logprobs=1
    )
    path = str(demo_models.fetch(name))
    with LLM(model=path, max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512) as llm:
        outputs = llm.generate([case["prompt"] for case in golden["cases"]], params, use_tqdm=False)
        yield _Run(llm, golden, outputs, NUM_TOKENS[name])


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_prompt_token_ids_and_logprobs(run, index):
    case, output = run.golden["cases"][index], run.outputs[index]
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert output.prompt_logprobs[0] is None
    ours = [
        position[token_id].logprob
        for position, token_id in zip(output.prompt_logprobs[1:], case["prompt_token_ids"][1:], strict=True)
    ]
    assert ours == pytest.approx(case["prompt_logprobs"][1:], abs=0.01)


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_most_likely_next_tokens(run, index):
    case, first = run.golden["cases"][index], run.outputs[index].outputs[0].logprobs[0]
    ours = [first[token_id].logprob for token_id in case["last_top10_ids"]]
    assert ours == pytest.approx(case["last_top10_logprobs"], abs=0.02)
    assert [first[token_id].rank for token_id in case["last_top10_ids"]] == list(range(1, 11))


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_greedy_tokens(run, index):
    case, sequence = run.golden["cases"][index], run.outputs[index].outputs[0]
    num_sure = min(num_sure_tokens(case), run.num_tokens)
    assert sequence.token_ids[:num_sure] == case["greedy_token_ids"][:num_sure]
    assert len(sequence.token_ids) == run.num_tokens
    assert sequence.finish_reason == "length"


def test_most_greedy_tokens_are_sure(run):
    """The rule above leaves enough to compare."""
    num_compared = sum(min(num_sure_tokens(case), run.num_tokens) for case in run.golden["cases"])
    assert num_compared > 0.5 * run.num_tokens * NUM_CASES


def test_chat_example(run):
    if "chat_example" not in run.golden:
        pytest.skip("this model has no chat template")
    example = run.golden["chat_example"]
    (output,) = run.llm.chat(example["messages"], SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert output.prompt == example["rendered"]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == run.golden["eos_token_id"]
