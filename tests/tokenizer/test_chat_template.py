"""Chat templates: what Hugging Face's offer, and what hostile ones try."""

import time
from typing import Any

import pytest

from jaxllm.exceptions import InvalidRequestError
from jaxllm.tokenizer import template_sandbox
from jaxllm.tokenizer.chat_template import render_chat
from jaxllm.tokenizer.template_sandbox import MAX_CPU_S
from tests.fakes.byte_tokenizer import ByteTokenizer

MESSAGES = [{"role": "user", "content": "Hi <b>ü</b>"}]


def _render(template: str | None, messages: Any = MESSAGES, **kwargs: Any) -> str:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    return render_chat(tokenizer, messages, **kwargs)


def _error(template: str, messages: Any = MESSAGES) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        _render(template, messages)
    assert "\n" not in str(caught.value) and caught.value.param == "messages"
    return str(caught.value)


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}", "user: Hi <b>ü</b>"),
        ("{% if add_generation_prompt %}\n    go\n{% endif %}\n!", "    go\n!"),  # trim_blocks
        ("  {% if true %}\n  a\n  {% endif %}", "  a\n"),  # lstrip_blocks
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>ü</b>"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in [1, 2] %}{{ loop.index0 }}{{ loop.length }}{{ loop.last }} {% endfor %}",
         "02False 12True "),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{% set s = namespace(n=0) %}{% for i in [1, 2] %}{% set s.n = s.n + i %}{% endfor %}{{ s.n }}",
         "3"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m(1) ~ '!' }}", "<a><1>!"),
        ("{{ messages[0].content.split(' ')[0].strip().replace('H', 'h') + '%s' % 'x' }}", "hix"),
        ("{{ strftime_now('%Y') | length }}{{ tools is none }}{{ tools is defined }}", "4FalseFalse"),
        ("{{ ['a', 'b'] | map('upper') | join(', ') }}", "A, B"),
        ("{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "1"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, expected: str) -> None:
    assert _render(template) == expected


def test_the_generation_prompt_is_optional() -> None:
    template = "x{% if add_generation_prompt %}y{% endif %}"
    assert (_render(template), _render(template, add_generation_prompt=False)) == ("xy", "x")


def test_the_templates_own_message() -> None:
    message = _error("{{ raise_exception('roles must\\nalternate') }}")
    assert message == "the model's chat template failed: roles must"


def test_no_template() -> None:
    with pytest.raises(InvalidRequestError, match="this model has no chat template; give plain prompts instead"):
        _render(None)


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{}], ["hi"], [{"role": "user"}], [{"role": "user", "content": 7}], [None]]
)
def test_malformed_messages(messages: Any) -> None:
    assert "message" in _error("x", messages)


def test_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "a"}]
    _error("{% set _ = messages[0].update({'content': 'b'}) %}", messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum.__globals__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ render_chat }}{{ _budget }}",
    ],
)
def test_nothing_private_is_reached(template: str) -> None:
    try:
        assert _render(template) == ""
    except InvalidRequestError as error:
        assert "\n" not in str(error)


LONG = (
    "{% set ns = namespace(s='a' * 90000, t='', y=[1]) %}"
    "{% for i in range(6) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{% set ns.t = ns.s[:-1] ~ 'a' %}"
)
# str.format fills in what makes the next level of a structure from the last one.
TREE = (
    "{{% set ns = namespace(y=[1], z=[1]) %}}"
    "{{% for i in range(60) %}}{{% set ns.z = ns.y %}}{{% set ns.y = {} %}}{{% endfor %}}"
)
GROW = "{% set ns = namespace(x='aaaaaaaa', y=[1]) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxx{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        GROW + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        GROW + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
        GROW + "{% set ns.y = ns.y * 1000 %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ 9**9**9 }}",
        "{{ range(99999) | list | join('a' * 90000) }}",
        "{{ ('a' * 90000).replace('', 'a' * 90000) }}",
        "{% if true %}" * 50_000 + "{% endif %}" * 50_000,
        "{% if true %}" * 5_000 + "{% endif %}" * 5_000,
        "{{ " + "(" * 6_000 + "1" + ")" * 6_000 + " }}",
        "{{ 1" + "+1" * 20_000 + " }}",
        "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
    ],
)
def test_endless_and_growing_templates(template: str) -> None:
    start_s = time.thread_time()
    assert _error(template).startswith("the model's chat template failed: ")
    assert time.thread_time() - start_s < 2 * MAX_CPU_S


@pytest.mark.parametrize(
    "template",
    [
        LONG + "{% for i in range(99999) %}{% if 'ab' in ns.s %}{% endif %}{% endfor %}",
        LONG + "{% if 'ab' in ns.s %}{% endif %}" * 1_500,
        LONG + "{% if ns.s == ns.t %}{% endif %}" * 1_500,
        LONG + "{% set x = ns.s[1:] %}" * 1_500,
        LONG + "{% set x = ns.s.count('ab') %}" * 2_000,
        LONG + "{% set x = ns.s is upper %}" * 1_500,
        LONG + "{{ ns.s | list | length }}",
        LONG + "{{ ns.s.split('a') | length }}",
        TREE.format("[ns.y, ns.y]") + "{{ ns.y }}",
        TREE.format("[ns.y, ns.y]") + "{{ ns.y | tojson }}",
        TREE.format("{'a': ns.y, 'b': ns.y}") + "{{ ns.y == ns.z }}",
        TREE.format("dict(a=ns.y, b=ns.y)") + "{{ ns.y | string }}",
        TREE.format("cycler(ns.y, ns.y).items") + "{{ {ns.y: 1} }}",
        TREE.format("{}.fromkeys(range(9), ns.y)") + "{{ ns.y ~ '' }}",
        TREE.format("[1] | batch(100000, ns.y) | first") + "{{ '%s' % ns.y }}",
        TREE.format("namespace(a=ns.y, b=ns.y)") + "{{ ns.y }}" + "{% for i in range(10**6) %}{% endfor %}",
        "{% set ns = namespace(y=[1]) %}{% macro m() %}{% set ns.y = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ m(ns.y, ns.y) }}{% endfor %}{{ ns.y }}",
    ],
)
def test_all_that_takes_time_or_memory_is_paid_for(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_S", 1.0)
    start_s = time.thread_time()
    assert _error(template).startswith("the model's chat template failed: it ")
    assert time.thread_time() - start_s < 5


@pytest.mark.parametrize("template", ["{% if %}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{% for %}", "{{"])
def test_broken_templates(template: str) -> None:
    assert _error(template).startswith("the model's chat template failed: ")


def test_long_chats_are_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 1000}] * 2000
    template = "{% for m in messages %}{{ '<' + m.role + '>' ~ m.content | trim ~ '\\n' }}{% endfor %}"
    assert len(_render(template, messages)) == 2000 * (6 + 4999 + 1)
