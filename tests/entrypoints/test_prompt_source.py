"""Prompts from arguments, files and standard input."""

import io
from pathlib import Path

import pytest

from jaxllm.entrypoints.prompt_source import max_num_tokens, parse_line, read_prompts
from jaxllm.exceptions import InvalidRequestError


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ("plain text", "plain text"),
        (' indented "text" ', ' indented "text" '),
        ('"a JSON\\nstring"', "a JSON\nstring"),
        ("[1, 2]", [1, 2]),
        ('{"prompt": "a"}', {"prompt": "a"}),
        ('{"prompt_token_ids": [3]}', {"prompt_token_ids": [3]}),
        ("{broken", "{broken"),
        ("42", "42"),
        ("null", "null"),
        ("NaN", "NaN"),
        ("text\r", "text"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_line_is_json_or_text(line: str, prompt: object) -> None:
    assert parse_line(line) == prompt


def test_arguments_come_before_the_file_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffé\u2028x\r\n\n  \n[5]\nlast".encode())
    assert read_prompts(["first"], str(file)) == ["first", "é\u2028x", [5], "last"]


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n[1]\n"))
    assert read_prompts([], "-") == ["a", [1]]


def test_no_prompt_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    for prompts_file in (None, str(empty)):
        with pytest.raises(InvalidRequestError, match="no prompt: give one as an argument, or --prompts-file"):
            read_prompts([], prompts_file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot read prompts file .*missing: No such file"):
        read_prompts([], str(tmp_path / "missing"))
    with pytest.raises(InvalidRequestError, match="Is a directory"):
        read_prompts([], str(tmp_path))
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(InvalidRequestError, match="must be UTF-8 text, got a bad byte at offset 2"):
        read_prompts([], str(binary))


def test_a_bound_on_the_number_of_tokens() -> None:
    assert max_num_tokens("né") == 3
    assert max_num_tokens({"prompt": "ab"}) == 2
    assert max_num_tokens({"prompt_token_ids": [1, 2, 3], "prompt": "a long text"}) == 3
    assert max_num_tokens([1, 2]) == 2
    assert max_num_tokens({"prompt": 5}) == 0  # type: ignore[typeddict-item]
