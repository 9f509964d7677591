"""LLMEngine on the real scheduler, with a model that is a function: both ends of a request together."""

from collections.abc import Callable, Sequence

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.engine_core_client import InprocClient
from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.entrypoints.offline_runner import OfflineRunner
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.engines import engine_config
from tests.fakes.fake_executor import FakeExecutor

TEXT = b"the quick brown fox jumps"


def next_byte(token_ids: Sequence[int]) -> int:
    """Goes on in TEXT after the prompt's last byte, then ends."""
    position = TEXT.find(bytes([token_ids[0]])) + len(token_ids)
    return TEXT[position] if position < len(TEXT) else 257


def draw_letter(token_ids: Sequence[int], seed: int) -> int:
    return ord("a") + (seed + len(token_ids)) % 26


def make(num_blocks: int = 64, draw: Callable[[Sequence[int], int], int] | None = None) -> tuple[LLMEngine, EngineCore]:
    config: EngineConfig = engine_config()
    executor = FakeExecutor(next_byte, draw=draw, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16)
    core = EngineCore(config, executor)
    return LLMEngine(config, ByteTokenizer(), InprocClient(core), eos_token_ids=[257]), core


def generate(engine: LLMEngine, prompts: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
    return OfflineRunner(engine).run(prompts, [params] * len(prompts), lambda outputs: None)


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_batch_ends_with_every_block_free(num_blocks: int) -> None:
    engine, core = make(num_blocks)
    outputs = generate(engine, ["the", "quick", "fox", "brown"], SamplingParams(temperature=0, max_tokens=30))
    assert [output.outputs[0].text for output in outputs] == [
        " quick brown fox jumps",
        " brown fox jumps",
        " jumps",
        " fox jumps",
    ]
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()
    assert engine.stats is not None and engine.stats.num_free_blocks == num_blocks - 1


def test_a_stop_string_frees_the_sequence() -> None:
    engine, core = make()
    (output,) = generate(engine, ["the"], SamplingParams(temperature=0, max_tokens=30, stop="fo"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (" quick brown ", "fo")
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()


def test_n_sequences_draw_from_their_own_seeds_and_stop_alone() -> None:
    engine, core = make(draw=draw_letter)
    params = SamplingParams(n=3, seed=0, max_tokens=4, stop="ef", logprobs=0)
    (output,) = generate(engine, ["xyz"], params)
    assert [(one.text, one.finish_reason) for one in output.outputs] == [
        ("d", "stop"),
        ("", "stop"),
        ("fghi", "length"),
    ]
    assert [one.cumulative_logprob for one in output.outputs] == [-3.0, -2.0, -4.0]
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()


def test_prompt_logprobs_of_a_prompt_in_chunks() -> None:
    engine, _ = make()
    prompt = "the quick brown fox jum"
    (output,) = generate(engine, [prompt], SamplingParams(temperature=0, prompt_logprobs=1))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    positions = [position for position in output.prompt_logprobs[1:] if position is not None]
    assert "".join(entry.decoded_token for position in positions for entry in position.values()) == prompt[1:]
    assert [entry.logprob for position in positions for entry in position.values()] == [
        -float(position) for position in range(1, 23)
    ]


def test_b40_a_prompt_too_large_for_the_pool_is_refused_alone() -> None:
    engine, core = make(num_blocks=4)
    with pytest.raises(InvalidRequestError):
        engine.add_request("big", "x" * 40, SamplingParams(max_tokens=1))
    assert not engine.has_unfinished_requests()
    (output,) = generate(engine, ["fox"], SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].text == " jumps"
    assert not core.has_unfinished_requests()


def test_abort_frees_every_block() -> None:
    engine, core = make()
    engine.add_request("r", "the", SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    engine.abort_request("r")
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()


def test_b76_different_salts_share_nothing() -> None:
    engine, _ = make()
    text = "the quick brown"
    salts: list[Prompt] = [text, {"prompt": text, "cache_salt": "a"}, {"prompt": text, "cache_salt": "b"}]
    params = SamplingParams(temperature=0, max_tokens=1)
    assert [generate(engine, [prompt], params)[0].num_cached_tokens for prompt in salts] == [0, 0, 0]
    assert engine.stats is not None
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (45, 0)
    assert [generate(engine, [prompt], params)[0].num_cached_tokens for prompt in salts] == [12, 12, 12]
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (90, 36)


def test_b80_the_prefix_cache_is_not_reset_while_a_request_runs() -> None:
    engine, core = make()
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("r", "the quick", params)
    engine.step()
    assert engine.reset_prefix_cache() is False
    while engine.has_unfinished_requests():
        engine.step()
        core.scheduler.check_integrity()
    assert generate(engine, ["the quick"], params)[0].num_cached_tokens == 8  # nothing was lost by the attempt
    assert engine.reset_prefix_cache() is True
    core.scheduler.check_integrity()
    assert generate(engine, ["the quick"], params)[0].num_cached_tokens == 0


def test_a_reset_leaves_waiting_requests_alone() -> None:
    engine, _ = make()
    params = SamplingParams(temperature=0, max_tokens=4)
    generate(engine, ["the quick"], params)
    engine.add_request("r", "the quick", params)  # waits for the next step, holding no block
    assert engine.reset_prefix_cache() is True
    outputs = [output for _ in range(4) for output in engine.step()]
    assert (outputs[-1].num_cached_tokens, outputs[-1].outputs[0].text) == (0, " bro")
