"""Messages <-> engine types, and deltas whose sum is the whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.entrypoints.grpc_server import convert, descriptors
from jaxllm.entrypoints.grpc_server.deltas import Deltas
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams

_SamplingParams = descriptors.message_class("jaxllm.v1.SamplingParams")
_GenerateRequest = descriptors.message_class("jaxllm.v1.GenerateRequest")


def output_of(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("id", "p", [1, 2], None, list(completions), finished, RequestMetrics(0.0))


def test_zeros_and_absent_fields_mean_the_default() -> None:
    zeros = _SamplingParams(n=0, top_p=0, top_k=0, min_p=0, stop=[], stop_token_ids=[], ignore_eos=False, max_tokens=0)
    assert (
        convert.to_sampling_params(zeros, {}) == convert.to_sampling_params(_SamplingParams(), {}) == SamplingParams()
    )
    assert convert.to_sampling_params(zeros, {"max_tokens": None}).max_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 3),
        ("temperature", 0.0),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 40),
        ("min_p", 0.1),
        ("seed", 0),
        ("seed", -1),
        ("stop", ["a", "b"]),
        ("stop_token_ids", [7]),
        ("ignore_eos", True),
        ("max_tokens", 5),
        ("logprobs", 0),
        ("prompt_logprobs", 2),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("logit_bias", {0: 1.5, 7: -100.0}),
        ("min_tokens", 3),
        ("presence_penalty", -0.5),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1.25),
        ("allowed_token_ids", [0, 7]),
        ("bad_words", ["a", "b"]),
    ],
)
def test_each_field_arrives(field: str, value: Any) -> None:
    params = convert.to_sampling_params(_SamplingParams(**{field: value}), {})
    assert params == SamplingParams(**{field: value}) != SamplingParams()


def test_every_field_of_the_message_is_a_field_of_ours() -> None:
    assert set(_SamplingParams.DESCRIPTOR.fields_by_name) <= set(SamplingParams.__struct_fields__)


def test_prompts() -> None:
    assert convert.to_prompt(_GenerateRequest(text="a")) == {"prompt": "a"}
    assert convert.to_prompt(_GenerateRequest(token_ids={"ids": [1, 2]}, cache_salt="s")) == {
        "prompt_token_ids": [1, 2],
        "cache_salt": "s",
    }
    with pytest.raises(InvalidRequestError, match="needs a prompt"):
        convert.to_prompt(_GenerateRequest())


def test_logprobs_list_the_chosen_token_and_the_most_likely_ones() -> None:
    # Token 9 was drawn although it was the fourth; two were asked for.
    position = {9: Logprob(-3.0, 4, "nine"), 1: Logprob(-0.5, 1, "one"), 2: Logprob(-1.0, 2, "two")}
    message = convert.to_position_logprobs(9, position, 2)
    assert (message.chosen.token_id, message.chosen.token, message.chosen.logprob, message.chosen.rank) == (
        9,
        "nine",
        -3.0,
        4,
    )
    assert [(top.token_id, top.token) for top in message.top] == [(1, "one"), (2, "two")]
    assert not convert.to_position_logprobs(9, position, 0).top
    assert not convert.to_position_logprobs(9, None, 2).HasField("chosen")


@pytest.mark.parametrize(("stop_reason", "field"), [(None, None), ("x", "stop_string"), (0, "stop_token_id")])
def test_stop_reasons(stop_reason: int | str | None, field: str | None) -> None:
    completion = CompletionOutput(1, "t", [5], finish_reason="stop", stop_reason=stop_reason)
    for message in (convert.to_completion(completion, None), convert.to_choice(completion, None, True)):
        assert message.WhichOneof("stop_reason") == field
        assert field is None or getattr(message, field) == stop_reason


def test_usage_counts_the_prompt_once() -> None:
    usage = convert.to_usage(output_of(CompletionOutput(0, "", [1]), CompletionOutput(1, "", [2, 3])))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 3, 0)


PIECES = st.lists(st.text(max_size=2), min_size=1, max_size=4)


@given(st.lists(PIECES, min_size=1, max_size=3), st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=6))
def test_deltas_add_up_to_the_whole(wholes: list[list[str]], steps: list[list[int]]) -> None:
    deltas, shown = Deltas(), [0] * len(wholes)
    texts, tokens, ends = [""] * len(wholes), [[] for _ in wholes], [0] * len(wholes)
    seen: set[int] = set()
    for step in [*steps, [len(whole) for whole in wholes]]:  # the last one shows all
        for index, grows in enumerate(step[: len(wholes)]):
            shown[index] = min(shown[index] + grows, len(wholes[index]))
        completions = [_shown(index, whole, shown[index]) for index, whole in enumerate(wholes)]
        for part, is_first in deltas.take(output_of(*completions)):
            assert is_first == (part.index not in seen)
            assert part.text or part.token_ids or part.finished
            seen.add(part.index)
            texts[part.index] += part.text
            tokens[part.index] += part.token_ids
            ends[part.index] += part.finished
    assert texts == ["".join(whole) for whole in wholes]
    assert tokens == [list(range(len(whole))) for whole in wholes]
    assert ends == [1] * len(wholes)


def _shown(index: int, whole: list[str], count: int) -> CompletionOutput:
    finish_reason = "length" if count == len(whole) else None
    return CompletionOutput(index, "".join(whole[:count]), list(range(count)), finish_reason=finish_reason)
