"""Jinja in the immutable sandbox, with a budget: what a chat template may compute, and for how long.

A template is code from a model's folder. It reaches no file, no module and no private attribute. All that takes time or
memory is paid from one rendering's budget, before it is done: loop turns, calls, characters and elements of what is
built, compared or turned to text, where an element that stands in a list twice counts twice. The clock is looked at
whenever something is paid, and no single step is so large that it could not wait for that.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 26
MAX_STEPS = 1 << 18  # loop turns and calls
MAX_CPU_S = 5.0
MAX_PRODUCT = 1 << 26  # largest len * len that an amplifier such as replace or join may be given
MAX_NUMBER = 10**5  # largest number that a filter, a call, `*` or `**` may take: widths and counts
MAX_SPLIT_CHARS = 1 << 22  # longest string that may become a list


class TemplateLimitError(Exception):
    """A rendering spent its budget."""


def render(source: str, variables: dict[str, Any]) -> str:
    """Renders a template.

    Raises:
      TemplateLimitError: It went beyond a limit.
      Exception: Whatever Python can raise, at parsing too; it is the template's error, not ours.
    """
    budget = _Budget()
    token = _budget.set(budget)
    pieces: list[str] = []
    try:
        for piece in _compile(source).generate(variables):
            budget.spend_chars(len(piece))
            pieces.append(piece)
    finally:
        _budget.reset(token)
    return "".join(pieces)


class _Budget:
    """What one rendering may still spend."""

    __slots__ = ("_end_s", "chars", "steps")

    def __init__(self) -> None:
        self.chars = MAX_OUTPUT_CHARS
        self.steps = MAX_STEPS
        self._end_s = time.thread_time() + MAX_CPU_S

    def spend_chars(self, num_chars: int) -> None:
        self.chars -= num_chars
        if self.chars < 0:
            raise TemplateLimitError(f"it builds or compares more than {MAX_OUTPUT_CHARS} characters")
        self._check_time()

    def spend_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._end_s:
            raise TemplateLimitError(f"it computes for more than {MAX_CPU_S:g} s")


# These look at what they are given, or return part of it; the other filters and tests compare it or make it text.
_SHALLOW_FILTERS = frozenset(
    "abs attr batch count d default first items last length list map random reject rejectattr reverse round select "
    "selectattr slice".split()
)
_COMPARING_TESTS = frozenset("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper".split())
_AMPLIFIERS = frozenset(("format", "indent", "join", "replace", "wordwrap"))
_TEXT, _COMPARED, _COUNTED = 1, 64, 1 << 40  # characters of a string that cost one

# Out of a template's reach, unlike anything in its own variables.
_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls, operators and keys paid from the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend_step()
        values = (*args, *kwargs.values())
        _check_numbers(values)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):  # a string's method
            _check_product((owner, *args))
            _check_split(obj.__name__, owner)
            _weigh(values, _TEXT)
            return _paid(super().call(context, obj, *args, **kwargs))
        if not isinstance(obj, Macro) or obj.catch_varargs or obj.catch_kwargs:
            _weigh(values, _COUNTED)
        result = _paid(super().call(context, obj, *args, **kwargs))
        return result if isinstance(result, str) else _weigh(result, _COUNTED)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _weigh(argument, _COMPARED))  # a tuple is hashed

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
            raise TemplateLimitError("it raises to a power above 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _weigh(right, _TEXT)
        result = _paid(super().call_binop(context, operator, left, right))
        return result if isinstance(result, str) else _weigh(result, _COUNTED)


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: a mark for training, of no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Payments(NodeTransformer):
    """Lets the parts of a template that reach no function of ours pay: loops, `~`, comparisons, slices, literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("paid_turns", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through("paid_text", part) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("paid_comparison", node.expr)
        for operand in node.ops:
            operand.expr = _through("paid_comparison", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("paid", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("paid_count", node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _through("paid_count", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _through("paid_count", self.generic_visit(node))


class _Namespace(Namespace):
    """Its text doesn't hold its values' texts, so that namespaces of namespaces stay short."""

    def __repr__(self) -> str:
        return "<Namespace>"


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateLimitError(f"it has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed")
    environment = _make_environment()
    tree = _Payments().visit(environment.parse(source))
    return environment.from_string(tree)


def _through(filter_name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, filter_name, [], [], None, None, lineno=node.lineno)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationTag],
        finalize=_paid_text,
        optimized=False,  # constants would be computed while compiling, outside the limits
    )
    environment.filters["tojson"] = _to_json
    environment.filters = {
        **{name: _limited(name, function) for name, function in environment.filters.items()},
        "paid": _paid,
        "paid_count": lambda value: _weigh(value, _COUNTED),
        "paid_comparison": lambda value: _weigh(value, _COMPARED),
        "paid_text": _paid_text,
        "paid_turns": _paid_turns,
    }
    tests: dict[str, Any] = environment.tests
    for name in _COMPARING_TESTS:
        tests[name] = _paid_test(tests[name])
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter in the limits; wraps() keeps the marks by which Jinja passes it the environment."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend_step()
        values = (*args, *kwargs.values())
        _check_numbers(values)
        if name == "format":
            _check_format(str(args[0]))
        if name in _AMPLIFIERS:
            _check_product(args)
        for value in args:
            if isinstance(value, str):
                _check_split(name, value)
        if name not in _SHALLOW_FILTERS:
            _weigh([value for value in values if isinstance(value, (list, tuple, dict))], _TEXT)
        result = _paid(function(*args, **kwargs))
        return result if isinstance(result, str) else _weigh(result, _COUNTED)

    return wrapper


def _paid_test(function: Callable[..., Any]) -> Callable[..., bool]:
    @wraps(function)
    def wrapper(*args: Any) -> bool:
        _weigh(args, _COMPARED)
        return bool(function(*args))

    return wrapper


def _paid(value: Any) -> Any:
    """Pays for a string or list that was built, and returns it."""
    if isinstance(value, (str, list, tuple)):
        _budget.get().spend_chars(len(value))
    return value


def _paid_text(value: Any) -> Any:
    """Pays for what is about to become text, and returns it."""
    return _weigh(value, _TEXT)


def _paid_turns(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend_step()
        yield value if isinstance(value, str) else _weigh(value, _COUNTED)


def _weigh(value: Any, chars_per_cost: int) -> Any:
    """Pays for a value with all that it holds, as often as it holds it, and returns it."""
    budget = _budget.get()
    if isinstance(value, str):
        budget.spend_chars(len(value) // chars_per_cost)
    elif isinstance(value, (list, tuple, dict)):
        todo: list[Any] = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                budget.spend_chars(1 + len(item) // chars_per_cost)
            elif isinstance(item, (list, tuple, dict)):
                budget.spend_chars(1 + len(item))
                todo.extend(item)
                todo.extend(item.values() if isinstance(item, dict) else ())
    return value


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
        raise TemplateLimitError("it repeats a text or list too often")


def _check_split(name: str, text: str) -> None:
    if name in ("split", "rsplit", "splitlines", "list") and len(text) > MAX_SPLIT_CHARS:
        raise TemplateLimitError(f"it makes a list of a text of more than {MAX_SPLIT_CHARS} characters")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"it uses a number above {MAX_NUMBER}")


def _check_format(text: str) -> None:
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 4:
            raise TemplateLimitError("it formats with a width above 9999")


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
