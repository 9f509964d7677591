"""Renders messages through a model's chat template: Jinja in the immutable sandbox, with limits.

A template is code from a model's folder. It reaches no file, no module and no private attribute, and each
rendering has a budget: loop turns, calls and every string or list that it builds are paid from it, so
neither an endless loop nor a doubling string gets far. The limits are those that one process can keep; a
process that can be killed would be the last word. Doesn't know where the template came from.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.exceptions import InvalidRequestError
from jaxllm.tokenizer.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 26
MAX_STEPS = 1 << 18  # loop turns and calls
MAX_PRODUCT = 1 << 26  # largest len * len that an amplifier such as replace or join may be given
MAX_NUMBER = 10**5  # largest number that a filter, a call, `*` or `**` may take: widths and counts


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Returns the prompt that the model's chat template makes of a conversation.

    The text holds the special tokens already: encode it with add_special_tokens=False.

    Args:
      messages: Each has a `role` and a `content`, both strings.
      add_generation_prompt: Whether to end with the words that begin the assistant's turn.

    Raises:
      InvalidRequestError: No messages, a malformed one, no template, or the template refuses or fails.
    """
    _check_messages(messages)
    if tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template; give plain prompts instead, or a checkpoint that brings one "
            "(chat_template.jinja, tokenizer_config.json or GGUF metadata)",
            "messages",
        )
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": _token_text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _token_text(tokenizer, next(iter(tokenizer.eos_token_ids), None)),
    }
    return _render(tokenizer.chat_template, variables)


class _TemplateLimitError(Exception):
    """A rendering spent its budget."""


class _Budget:
    """What one rendering may still spend."""

    __slots__ = ("chars", "steps")

    def __init__(self) -> None:
        self.chars = MAX_OUTPUT_CHARS
        self.steps = MAX_STEPS

    def spend_chars(self, num_chars: int) -> None:
        self.chars -= num_chars
        if self.chars < 0:
            raise _TemplateLimitError(f"it builds more than {MAX_OUTPUT_CHARS} characters")

    def spend_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _TemplateLimitError(f"it takes more than {MAX_STEPS} steps")


_AMPLIFIERS = frozenset(("do_format", "do_indent", "sync_do_join", "do_join", "do_replace", "do_wordwrap"))

# Out of a template's reach, unlike anything in its own variables.
_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls and operators paid from the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend_step()
        _check_numbers((*args, *kwargs.values()))
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):  # a string's method
            _check_product((owner, *args))
        return _paid(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_numbers((left, right))
            _check_product((left, right))
        if operator == "**" and (not isinstance(right, (int, float)) or abs(right) > 64):
            raise _TemplateLimitError("it raises to a power above 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return _paid(super().call_binop(context, operator, left, right))


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: a mark for training, of no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_messages(messages: list[dict[str, str]]) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message, got none", "messages")
    for index, message in enumerate(messages):
        is_legal = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_legal:
            raise InvalidRequestError(
                f"messages[{index}] must have a string role and a string content, got {message!r:.80}",
                "messages",
            )


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.decode([token_id], skip_special_tokens=False)


def _render(source: str, variables: dict[str, Any]) -> str:
    budget = _Budget()
    token = _budget.set(budget)
    pieces: list[str] = []
    try:
        for piece in _compile(source).generate(variables):
            budget.spend_chars(len(piece))
            pieces.append(piece)
    # A template may raise whatever Python can, at parsing too; it is the template's error, not the engine's.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InvalidRequestError(f"the model's chat template failed: {reason}", "messages") from error
    finally:
        _budget.reset(token)
    return "".join(pieces)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise _TemplateLimitError(f"it has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed")
    environment = _make_environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "paid_turns", [], [], None, None, lineno=loop.lineno)
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [nodes.Filter(node, "paid", [], [], None, None, lineno=concat.lineno) for node in concat.nodes]
    return environment.from_string(tree)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationTag],
        finalize=_paid,
        optimized=False,  # constants would be computed while compiling, outside the limits
    )
    environment.filters["tojson"] = _to_json
    filters = {name: _limited(function) for name, function in environment.filters.items()}
    environment.filters = {**filters, "paid": _paid, "paid_turns": _paid_turns}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter in the limits; wraps() keeps the marks by which Jinja passes it the environment."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend_step()
        _check_numbers((*args, *kwargs.values()))
        if function.__name__ == "do_format":
            _check_format(str(args[0]))
        if function.__name__ in _AMPLIFIERS:
            _check_product(args)
        return _paid(function(*args, **kwargs))

    return wrapper


def _paid(value: Any) -> Any:
    """Pays for a string or list that was built, and returns it."""
    if isinstance(value, (str, list, tuple)):
        _budget.get().spend_chars(len(value))
    return value


def _paid_turns(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend_step()
        yield value


def _check_product(values: Iterable[Any]) -> None:
    """Checks the two largest of the values, lengths of strings and lists and sizes of whole numbers."""
    sizes = [1, 1]
    for value in values:
        if isinstance(value, (str, list, tuple)):
            sizes.append(len(value))
        elif isinstance(value, int):
            sizes.append(abs(value))
    largest, second = sorted(sizes)[:-3:-1]
    if largest * second > MAX_PRODUCT:
        raise _TemplateLimitError("it repeats a text or list too often")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER:
            raise _TemplateLimitError(f"it uses a number above {MAX_NUMBER}")


def _check_format(text: str) -> None:
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 4:
            raise _TemplateLimitError("it formats with a width above 9999")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
