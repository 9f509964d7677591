"""Detokenizer: whatever the token edges, the pieces add up, and none holds half a character."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxllm.engine.detokenizer import Detokenizer
from tests.fakes.byte_tokenizer import ByteTokenizer, PieceTokenizer


def cut_into_tokens(data: bytes, cuts: list[int]) -> tuple[PieceTokenizer, list[int]]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    return PieceTokenizer(pieces), list(range(len(pieces)))


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.flush()]


TEXTS = st.text(
    st.one_of(st.sampled_from("ab é€你😀👨‍👩‍👧🏽\u0301"), st.characters(codec="utf-8", exclude_characters="\ufffd"))
)
CUTS = st.lists(st.integers(0, 400))


@given(TEXTS, CUTS)
def test_valid_text_never_shows_a_broken_character(text: str, cuts: list[int]) -> None:
    tokenizer, token_ids = cut_into_tokens(text.encode(), cuts)
    pieces = pieces_of(Detokenizer(tokenizer, []), token_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=120), CUTS)
@example(b"\x80" * 40 + "😀".encode(), list(range(50)))
@example("\ufffd".encode() * 30 + "é".encode(), list(range(100)))
@example(b"\xf0\x9f\x98" * 20 + "😀".encode(), list(range(70)))
def test_any_bytes_add_up_to_the_full_decode(data: bytes, cuts: list[int]) -> None:
    tokenizer, token_ids = cut_into_tokens(data, cuts)
    assert "".join(pieces_of(Detokenizer(tokenizer, []), token_ids)) == tokenizer.decode(token_ids)


def test_a_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [])
    assert [detokenizer.append(byte) for byte in "é😀a".encode()] == ["", "é", "", "", "", "😀", "a"]


def test_a_sequence_that_ends_inside_a_character_shows_one_replacement_once() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [])
    assert [detokenizer.append(byte) for byte in b"a\xf0\x9f\x98"] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("token_id", [257, 258, 10**6, 2**40, -1])
def test_special_and_unknown_tokens_are_silent(token_id: int) -> None:
    pieces = pieces_of(Detokenizer(ByteTokenizer(), []), [0xC3, token_id, 0xA9, token_id])
    assert pieces == ["", "", "é", "", ""]


def test_special_tokens_show_when_asked_for() -> None:
    assert pieces_of(Detokenizer(ByteTokenizer(), [], skip_special_tokens=False), [97, 257]) == [
        "a",
        "</s>",
        "",
    ]


def test_the_prompt_keeps_a_leading_space_that_the_tokenizer_would_drop() -> None:
    tokenizer = PieceTokenizer([b"Hi", b" Paris", b"!"], strips_leading_space=True)
    assert pieces_of(Detokenizer(tokenizer, [0]), [1, 1, 2]) == [" Paris", " Paris", "!", ""]


def test_a_prompt_that_ends_inside_a_character_hides_no_text() -> None:
    assert pieces_of(Detokenizer(ByteTokenizer(), [97, 0xC3]), [0xA9, 98]) == ["", "\ufffdb", ""]


def test_each_token_decodes_a_few_tokens_only() -> None:
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Counting(), list(b"a long prompt" * 100))
    for token_id in [*b"text" * 500, *[257] * 500, *[0x80] * 500, *"😀".encode() * 100]:
        detokenizer.append(token_id)
    assert longest <= 40
