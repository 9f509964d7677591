"""InputProcessor: what may enter the engine, and what is filled in."""

from typing import Any

import numpy as np
import pytest

from jaxllm.engine.input_processor import InputProcessor
from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import EngineCoreRequest, KVCacheInfo
from jaxllm.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.engines import engine_config


def make(max_model_len: int = 64, seed: int | None = 0, num_device_blocks: int = 65) -> InputProcessor:
    config = engine_config(max_model_len, seed=seed)
    kv_cache_infos = [KVCacheInfo(num_device_blocks, 4, 256, 2048)]
    return InputProcessor(config, ByteTokenizer(), eos_token_ids=[257, 259], kv_cache_infos=kv_cache_infos)


def core_request(prompt: Any, processor: InputProcessor | None = None, **params: Any) -> EngineCoreRequest:
    return (processor or make()).process("r", prompt, SamplingParams(**params), 1.5).core_request


def refusal(prompt: Any, **params: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        core_request(prompt, **params)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("hé", "hé", [104, 195, 169]),
        ({"prompt": "hi"}, "hi", [104, 105]),
        ([1, 2], None, [1, 2]),
        ((1, 2), None, [1, 2]),
        ({"prompt_token_ids": [0, 259]}, None, [0, 259]),
        ({"prompt_token_ids": [7], "prompt": "shown"}, "shown", [7]),
        ([np.int32(5)], None, [5]),
    ],
)
def test_every_prompt_form(prompt: Any, text: str | None, token_ids: list[int]) -> None:
    processed = make().process("r", prompt, SamplingParams(), 1.5, priority=3)
    assert processed.prompt == text
    request = processed.core_request
    assert request.prompt_token_ids == token_ids
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    assert (request.request_id, request.arrival_time_s, request.priority) == ("r-0", 1.5, 3)
    assert request.eos_token_ids == [257, 259]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "must not be empty"),
        ([], "must not be empty"),
        ({"prompt": ""}, "must not be empty"),
        ({"prompt_token_ids": []}, "must not be empty"),
        ([-1], "must be in [0, 260), got -1"),
        ([260], "must be in [0, 260), got 260"),
        ([2**40], "must be in [0, 260)"),
        ([1.0], "must hold integers, got 1.0"),
        ([True], "must hold integers, got True"),
        (["a"], "must hold integers, got 'a'"),
        ([None], "must hold integers"),
        ([[1]], "must hold integers"),
        ({"prompt_token_ids": "ab"}, "must be a list of token ids, got str"),
        ({"prompt": 3}, "must be a string, got int"),
        ({}, "needs 'prompt' or 'prompt_token_ids', got no key"),
        ({"text": "a"}, "got 'text'"),
        ({"prompt": "a", "pad": 1}, "got 'prompt', 'pad'"),
        (None, "got NoneType"),
        (7, "got int"),
        (b"a", "got bytes"),
        ("a\ud800", "lone surrogate at character 1"),
        ({"prompt_token_ids": [1], "prompt": "\udfff"}, "lone surrogate at character 0"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must not be empty"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt must be a string, got int"),
        ({"prompt_token_ids": [1], "cache_salt": "x\ud800"}, "cache_salt must be valid Unicode"),
        ({"cache_salt": "x"}, "needs 'prompt' or 'prompt_token_ids', got 'cache_salt'"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, says: str) -> None:
    assert says in str(refusal(prompt))


@pytest.mark.parametrize(
    ("prompt", "salt"),
    [
        ({"prompt": "hi", "cache_salt": "tenant é"}, "tenant é"),
        ({"prompt_token_ids": [1], "cache_salt": "x"}, "x"),
        ({"prompt": "hi", "cache_salt": None}, None),
        ("hi", None),
    ],
)
def test_a_cache_salt_reaches_the_core(prompt: Any, salt: str | None) -> None:
    assert core_request(prompt).cache_salt == salt


def test_a_bad_cache_salt_names_its_field() -> None:
    assert refusal({"prompt": "a", "cache_salt": ""}).param == "cache_salt"


def test_bad_words_are_tokenized_at_the_beginning_and_after_a_space() -> None:
    request = core_request("hi", bad_words=["ab", " ab", " c"])
    assert request.bad_words_token_ids == [[97, 98], [32, 97, 98], [99], [32, 99]]
    assert core_request("hi").bad_words_token_ids == []


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"allowed_token_ids": [5, 260]}, "allowed_token_ids must hold token ids in [0, 260), got 260"),
        ({"allowed_token_ids": [257, 5], "stop_token_ids": [5], "min_tokens": 1}, "a token that ends nothing"),
        ({"bad_words": ["\ud800"]}, "bad_words must be valid Unicode"),
    ],
)
def test_what_the_vocabulary_says_of_allowed_and_bad(params: dict[str, Any], says: str) -> None:
    assert says in str(refusal("hi", **params))


def test_a_prompt_one_token_short_of_the_limit_leaves_room_for_one() -> None:
    assert core_request([1] * 63, max_tokens=16).max_tokens == 1


@pytest.mark.parametrize("max_tokens", [None, 16])
@pytest.mark.parametrize("num_tokens", [64, 65, 1000])
def test_a_prompt_too_long_says_both_numbers_and_the_way_out(num_tokens: int, max_tokens: int | None) -> None:
    message = str(refusal("a" * num_tokens, max_tokens=max_tokens))
    assert "max_model_len=64" in message and f"got {num_tokens} tokens" in message
    assert "raise --max-model-len (this model allows 128)" in message


def test_no_flag_is_offered_where_the_model_itself_ends() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        core_request([1] * 128, make(max_model_len=128))
    assert str(caught.value).endswith("got 128 tokens; shorten the prompt")


@pytest.mark.parametrize(("max_tokens", "clipped"), [(None, 60), (60, 60), (61, 60), (2**31 - 1, 60), (1, 1)])
def test_max_tokens_is_clipped_to_the_room_left(max_tokens: int | None, clipped: int) -> None:
    assert core_request([1, 2, 3, 4], max_tokens=max_tokens).max_tokens == clipped


@pytest.mark.parametrize("seed", [0, 7, -5, 2**63 - 1])
def test_a_given_seed_is_kept(seed: int) -> None:
    assert core_request("a", seed=seed).seed == seed


@pytest.mark.parametrize("seed", [None, -1])
def test_other_seeds_come_from_the_engine_seed(seed: int | None) -> None:
    def draw(engine_seed: int | None) -> list[int]:
        processor = make(seed=engine_seed)
        return [core_request("a", processor, seed=seed).seed for _ in range(3)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert draw(None) != draw(None)
    assert len(set(draw(0))) == 3


def test_stop_token_ids_must_be_in_the_vocabulary() -> None:
    assert core_request("a", stop_token_ids=[259]).sampling_params.stop_token_ids == [259]
    assert refusal("a", stop_token_ids=[260]).param == "stop_token_ids"


def test_parameters_changed_after_construction_are_checked_again() -> None:
    params = SamplingParams()
    params.top_p = float("nan")
    with pytest.raises(InvalidRequestError, match="top_p"):
        make().process("r", "a", params, 0.0)


def test_parameters_changed_later_do_not_reach_the_request() -> None:
    params = SamplingParams(top_k=3)
    request = make().process("r", "a", params, 0.0).core_request
    params.top_k = 99
    assert request.sampling_params.top_k == 3


def test_other_objects_are_no_sampling_params() -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        make().process("r", "a", {"top_p": 1.0}, 0.0)  # type: ignore[arg-type]


def test_max_tokens_none_fills_the_model_or_the_kv_cache_whichever_is_smaller() -> None:
    assert core_request([1] * 10, make(), max_tokens=None).max_tokens == 54
    # 5 blocks of 4 tokens, one of them the null block: 16 tokens with keys and values, and a last one without.
    small = make(num_device_blocks=5)
    assert core_request([1] * 10, small, max_tokens=None).max_tokens == 7


def test_b40_what_the_kv_cache_can_never_hold_is_refused_with_numbers() -> None:
    small = make(num_device_blocks=5)
    assert core_request([1] * 10, small, max_tokens=7).max_tokens == 7
    with pytest.raises(InvalidRequestError, match="must fit the KV cache of 4 blocks of 4 tokens, got 5 blocks"):
        core_request([1] * 10, small, max_tokens=8)
    with pytest.raises(InvalidRequestError, match=r"the prompt \(30 tokens\) must fit 4 of the KV cache's 4 blocks"):
        core_request([1] * 30, small, max_tokens=None)


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, True, None])
def test_a_priority_is_an_integer_of_32_bits(priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority must be an integer of 32 bits"):
        make().process("r", "a", SamplingParams(), 0.0, priority)


@pytest.mark.parametrize("field", ["request_id", "prompt", "stop"])
def test_f27_half_a_surrogate_pair_is_refused_in_every_text(field: str) -> None:
    texts = {"request_id": "r", "prompt": "a", "stop": "b", field: "\ud800"}
    with pytest.raises(InvalidRequestError, match=f"{field} must be valid Unicode, got a lone surrogate"):
        make().process(texts["request_id"], texts["prompt"], SamplingParams(stop=texts["stop"]), 0.0)


def test_no_two_requests_have_one_core_id() -> None:
    processor = make()
    ids = [core_request([1], processor).request_id for _ in range(3)]
    assert ids == ["r-0", "r-1", "r-2"]
