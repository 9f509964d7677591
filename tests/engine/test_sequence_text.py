"""Stop strings: cut at the one that is complete first, and none of it ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.sequence_text import SequenceText, StopMatch, find_stop
from tests.fakes.byte_tokenizer import PieceTokenizer


def slow_reference(text: str, stops: list[str], keeps_stop: bool) -> tuple[str, str | None]:
    """Grows the text character by character until it ends in a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keeps_stop else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], keeps_stop: bool = False) -> tuple[list[str], str | None]:
    """Returns the text shown after each token and at the end, and the stop string found."""
    detokenizer = Detokenizer(PieceTokenizer([piece.encode() for piece in pieces]), [])
    text = SequenceText(detokenizer, stops, keeps_stop)
    shown = []
    for token_id in range(len(pieces)):
        stop = text.append(token_id)
        shown.append(text.visible)
        if stop is not None:
            return shown, stop
    stop = text.finish()
    return [*shown, text.visible], stop


def test_the_text_of_the_first_tokens_is_not_searched() -> None:
    detokenizer = Detokenizer(PieceTokenizer([b"ab", b"a", b"b", b"c", b"ab"]), [])
    text = SequenceText(detokenizer, ["ab", "bc"], False, min_tokens=3)
    assert [text.append(token_id) for token_id in range(3)] == [None] * 3  # "ab" twice
    assert text.append(3) == "bc"  # it may have begun before
    assert text.visible == "aba"


PIECES = st.lists(st.text("abc", min_size=1, max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(PIECES, STOPS, st.booleans())
def test_equals_the_slow_reference_and_streams_the_same_text(
    pieces: list[str], stops: list[str], keeps_stop: bool
) -> None:
    shown, stop = run(pieces, stops, keeps_stop)
    final, expected_stop = slow_reference("".join(pieces), stops, keeps_stop)
    assert (shown[-1] if shown else "", stop) == (final, expected_stop)
    assert all(final.startswith(partial) for partial in shown)  # nothing shown is ever taken back
    assert all(later.startswith(partial) for partial, later in zip(shown, shown[1:], strict=False))


def test_b1_no_part_of_a_stop_string_is_shown() -> None:
    shown, stop = run(["ABC", " D", "EF", "GH", "IJ", "K"], ["DEFGHIJ"])
    assert shown == ["", "", "A", "ABC", "ABC "]
    assert stop == "DEFGHIJ"


def test_b2_a_stop_string_inside_one_token_is_found() -> None:
    assert run(["ABC ", "DEF"], ["DE"]) == (["ABC", "ABC "], "DE")


def test_b3_a_long_stop_string_is_cut_whole() -> None:
    stop = "a stop string of more than twenty characters"
    assert run(["text ", *stop, "!"], [stop])[0][-1] == "text "


def test_b4_a_stop_string_that_begins_in_the_token_before_is_found() -> None:
    assert run(["xxa", "by"], ["ab"]) == (["xx", "xx"], "ab")


def test_b9_held_characters_are_released_at_the_end() -> None:
    assert run(["ab", "cd"], ["xyz"]) == (["", "ab", "abcd"], None)


def test_the_stop_string_stays_if_asked_for_and_nothing_is_held() -> None:
    assert run(["ab", "cde", "f"], ["cd"], keeps_stop=True) == (["ab", "abcd"], "cd")


def test_list_order_does_not_decide() -> None:
    assert run(["abcd"], ["bcd", "bc"]) == (["a"], "bc")


def test_a_stop_string_in_text_released_last_counts() -> None:
    detokenizer = Detokenizer(PieceTokenizer([b"ab\xc3"]), [])
    text = SequenceText(detokenizer, ["b"], include_stop_str_in_output=False)
    assert text.append(0) is None
    assert text.finish() == "b"
    assert text.visible == "a"


@pytest.mark.parametrize(
    ("text", "num_new", "stops", "match"),
    [
        ("xabcd", 2, ["abcd", "bc"], StopMatch("bc", 2, 4)),
        ("xab", 1, ["b", "ab"], StopMatch("ab", 1, 3)),
        ("abxx", 1, ["ab"], None),  # it was complete before the new text
        ("aXbX", 4, ["X"], StopMatch("X", 1, 2)),
        ("", 0, ["a"], None),
    ],
)
def test_find_stop(text: str, num_new: int, stops: list[str], match: StopMatch | None) -> None:
    assert find_stop(text, num_new, stops) == match
