"""LogprobsBuilder: who is in the dict, in which order, with which text."""

import math

import pytest

from jaxllm.engine.logprobs import LogprobsBuilder
from jaxllm.messages import TokenLogprobs
from jaxllm.outputs import Logprob
from tests.fakes.byte_tokenizer import ByteTokenizer


def build(token_id: int, entry: TokenLogprobs, context: list[int]) -> dict[int, Logprob]:
    return LogprobsBuilder(ByteTokenizer()).build(token_id, entry, context)


def test_the_token_comes_first_and_keeps_its_rank() -> None:
    position = build(99, TokenLogprobs(-3.0, 7, [97, 98], [-0.5, -1.0]), [])
    assert list(position.items()) == [
        (99, Logprob(-3.0, 7, "c")),
        (97, Logprob(-0.5, 1, "a")),
        (98, Logprob(-1.0, 2, "b")),
    ]


def test_a_token_among_the_likeliest_is_listed_once() -> None:
    assert build(98, TokenLogprobs(-1.0, 2, [97, 98], [-0.5, -1.0]), []) == {
        98: Logprob(-1.0, 2, "b"),
        97: Logprob(-0.5, 1, "a"),
    }


def test_zero_logprobs_is_the_token_alone() -> None:
    assert build(98, TokenLogprobs(-1.0, 2, [], []), []) == {98: Logprob(-1.0, 2, "b")}


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_values_that_json_cannot_hold_become_the_lowest(value: float) -> None:
    position = build(98, TokenLogprobs(value, 2, [97], [value]), [])
    assert [entry.logprob for entry in position.values()] == [-9999.0, -9999.0]


@pytest.mark.parametrize(
    ("context", "token_id", "text"),
    [
        ([97, 0xC3], 0xA9, "é"),
        ([0xF0, 0x9F, 0x98], 0x80, "😀"),
        ([0xF0, 0x9F], 0x98, ""),  # the character isn't complete
        ([97], 0xA9, ""),  # nothing to complete
        ([], 0xC3, ""),
        ([97], 257, "</s>"),
        ([97], 259, ""),  # beyond the tokenizer's vocabulary
    ],
)
def test_a_part_of_a_character_is_read_in_context(context: list[int], token_id: int, text: str) -> None:
    assert build(token_id, TokenLogprobs(-1.0, 1, [], []), context)[token_id].decoded_token == text
