"""Beam search on the real model against transformers' in float32, and in a KV cache too small for the beams.

At each step the golden file says how far the worst candidate that the reference kept lay above the best one that it
dropped. Our sums of log probabilities differ from its by 0.0003 at most; with every gap above MIN_GAP rounding decides
nothing, so that the sequences must be equal.
"""

import json
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.sampling_params import BeamSearchParams

MIN_GAP = 0.002
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2-beam.json").read_text(encoding="utf-8"))
CASES = GOLDEN["cases"]
NUM_TOKENS = 24


def _params(case: dict) -> SamplingParams:
    return SamplingParams(
        n=case["width"],
        use_beam_search=True,
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )


def _generate(llm: LLM, cases: list[dict]) -> list:
    prompts = [case["prompt_token_ids"] for case in cases]
    return llm.generate(prompts, [_params(case) for case in cases], use_tqdm=False)


def _make_llm(path: Path, **args) -> LLM:
    return LLM(model=str(path), max_num_seqs=16, max_num_batched_tokens=32, max_model_len=128, block_size=16, **args)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with _make_llm(smollm2_path) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm):
    return _generate(llm, CASES)


def _ours(output) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.outputs]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_sequences_and_scores(outputs, index):
    case, sequences = CASES[index], outputs[index].outputs
    assert _ours(outputs[index]) == case["sequences"]
    for sequence, score in zip(sequences, case["scores"], strict=True):
        total = score * len(sequence.token_ids) ** case["length_penalty"]
        assert sequence.cumulative_logprob == pytest.approx(total, abs=0.005)  # scores are rounded, then multiplied
        is_ended = sequence.token_ids[-1] == GOLDEN["eos_token_id"]
        assert sequence.finish_reason == ("stop" if is_ended else "length")


def test_every_step_of_the_reference_was_sure():
    assert min(min(case["step_gaps"]) for case in CASES) > MIN_GAP


def test_the_golden_file_holds_searches_that_end_early_and_such_that_do_not():
    reasons = {token_ids[-1] == GOLDEN["eos_token_id"] for case in CASES for token_ids in case["sequences"]}
    assert reasons == {True, False}


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_small_pool_changes_nothing(smollm2_path, llm, outputs, preemption_mode):
    """11 blocks hold one or two of the searches, and not always all of their beams: they are preempted."""
    with _make_llm(smollm2_path, num_gpu_blocks_override=12, preemption_mode=preemption_mode) as small:
        assert [_ours(output) for output in _generate(small, CASES[::3])] == [_ours(output) for output in outputs[::3]]
        stats = small.llm_engine.stats
        assert stats.num_preemptions > 0
        assert stats.num_copied_blocks > 0
        assert (stats.num_swapped_in_blocks > 0) == (preemption_mode == "swap")
    assert llm.llm_engine.stats.num_preemptions == 0
    assert llm.llm_engine.stats.num_copied_blocks > 0


def test_llm_beam_search(llm):
    prompt = "The capital of France is"
    (output,) = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=8))
    best, second = output.sequences
    assert "Paris" in best.text and best.text.startswith(prompt)
    assert best.tokens[:5] == second.tokens[:5] == llm.get_tokenizer().encode(prompt)
    assert best.cum_logprob < 0 and best.tokens != second.tokens
