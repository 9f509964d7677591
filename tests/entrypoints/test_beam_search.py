"""Beam search from LLM to the real scheduler and back, on a model that is a table of bytes."""

import math
from collections.abc import Sequence

import pytest

from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.engine_core_client import InprocClient
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.entrypoints.llm import LLM
from jaxllm.exceptions import InvalidRequestError
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.engines import engine_config
from tests.fakes.fake_executor import FakeExecutor

EOS = 257
# After "go": greedy says "east"; "west", then the end, is likelier as a whole.
TABLE = {"go": {"e": 0.6, "w": 0.4}, "goe": {"a": 0.5, "b": 0.5}, "gow": {"e": 0.9, "x": 0.1}, "gowe": {EOS: 1.0}}


def _candidates(token_ids: Sequence[int]) -> dict[int, float]:
    probs = TABLE.get(bytes(token_ids).decode(), {EOS: 0.99, "z": 0.01})
    return {ord(key) if isinstance(key, str) else key: math.log(prob) for key, prob in probs.items()}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    config = engine_config()
    core = EngineCore(config, FakeExecutor(candidates=_candidates))
    engine = LLMEngine(config, ByteTokenizer(), InprocClient(core), eos_token_ids=[EOS])
    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda args, engine_process: engine)
    return LLM()


def test_the_best_sequences_come_as_whole_texts(llm: LLM) -> None:
    (output,) = llm.beam_search("go", BeamSearchParams(beam_width=2, max_tokens=5))
    best, second = output.sequences
    assert (best.text, best.tokens, best.finish_reason) == ("gowe", list(b"gowe"), "stop")
    assert best.cum_logprob == pytest.approx(math.log(0.36))
    assert second.text in ("goea", "goeb") and second.cum_logprob == pytest.approx(math.log(0.3 * 0.99))


def test_ranks_texts_logprobs_and_sums_of_generate(llm: LLM) -> None:
    params = SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=5, logprobs=1)
    (output,) = llm.generate("go", params, use_tqdm=False)
    assert [(one.index, one.text[0], one.finish_reason) for one in output.outputs] == [
        (0, "w", "stop"),
        (1, "e", "stop"),
    ]
    best = output.outputs[0]
    assert best.token_ids == [*b"we", EOS]
    assert best.cumulative_logprob == pytest.approx(math.log(0.36))
    assert [position[token_id].rank for position, token_id in zip(best.logprobs, best.token_ids, strict=True)] == [
        2,
        1,
        1,
    ]
    assert set(best.logprobs[0]) == {ord("w"), ord("e")}


def test_sums_come_without_logprobs_too(llm: LLM) -> None:
    params = SamplingParams(n=1, best_of=2, use_beam_search=True, temperature=0.0, max_tokens=5)
    (output,) = llm.generate("go", params, use_tqdm=False)
    (best,) = output.outputs
    assert best.text == "we" and best.logprobs is None and best.cumulative_logprob == pytest.approx(math.log(0.36))


def test_nothing_is_said_before_the_end(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", "go", BeamSearchParams(beam_width=2, max_tokens=5).to_sampling_params())
    steps = []
    while engine.has_unfinished_requests():
        steps.append(engine.step())
    assert [len(outputs) for outputs in steps] == [0] * (len(steps) - 1) + [1]


def test_prompts_are_answered_in_order_beside_others(llm: LLM) -> None:
    outputs = llm.beam_search(["go", "goe"], BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=0.0))
    assert [output.sequences[0].text[:3] for output in outputs] == ["gow", "goe"]


def test_a_wrong_width_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"beam_width must be in \[1, 16\], got 17"):
        llm.beam_search("go", BeamSearchParams(beam_width=17, max_tokens=5))
