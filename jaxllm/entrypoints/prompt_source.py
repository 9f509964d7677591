"""Where the generate command's prompts come from: its arguments, a file, standard input."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from jaxllm.engine.input_processor import Prompt
from jaxllm.exceptions import InvalidRequestError


def read_prompts(arguments: Sequence[str], prompts_file: str | None) -> list[Prompt]:
    """Returns the prompts given as arguments, then those of the file ("-" is standard input).

    Raises:
      InvalidRequestError: There is none, or the file can't be read.
    """
    prompts: list[Prompt] = list(arguments)
    if prompts_file is not None:
        prompts += [parse_line(line) for line in _read_lines(prompts_file) if line.strip()]
    if not prompts:
        raise InvalidRequestError(
            "no prompt: give one as an argument, or --prompts-file FILE (- reads standard input)", "prompt"
        )
    return prompts


def parse_line(line: str) -> Prompt:
    """Returns one line's prompt: a JSON string, list or object, else the line itself as text.

    Examples: `Hello` and `"Hello"` are the same text; `[504, 314]` and `{"prompt_token_ids": [504, 314]}` are
    the same token ids; `42` and `null` are text.
    """
    text = line.rstrip("\r\n")
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # What a list or an object holds is InputProcessor's to check.
    return cast(Prompt, value) if isinstance(value, (str, list, dict)) else text


def _read_lines(path: str) -> Iterable[str]:
    try:
        if path == "-":
            return sys.stdin.read().split("\n")
        with open(path, encoding="utf-8-sig") as file:
            return file.read().split("\n")
    except OSError as error:
        raise InvalidRequestError(f"cannot read prompts file {path}: {error.strerror}", "prompts_file") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"prompts file {path} must be UTF-8 text, got a bad byte at offset {error.start}", "prompts_file"
        ) from None


def max_num_tokens(prompt: Prompt) -> int:
    """Returns a number that the prompt's tokens don't exceed, without a tokenizer: no token is less than a byte."""
    content: object = prompt
    if isinstance(prompt, dict):
        content = prompt.get("prompt_token_ids") or prompt.get("prompt")
    if isinstance(content, str):
        return len(content.encode("utf-8", errors="replace"))
    return len(content) if isinstance(content, list) else 0  # anything else will be refused
