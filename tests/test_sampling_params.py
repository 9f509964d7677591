"""SamplingParams: each rule with the value below it, at its edge, and above."""

import math
from typing import Any

import msgspec
import pytest

from jaxllm.exceptions import InvalidRequestError
from jaxllm.sampling_params import BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        {"n": 128},
        {"temperature": 0},
        {"temperature": 1e6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 2**31 - 1},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"logprobs": 0},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"stop": "a"},
        {"stop": ["a" * 256] * 16},
        {"stop": []},
        {"stop_token_ids": [0] * 128},
        {"stop_token_ids": []},
        {"min_tokens": 16},
        {"min_tokens": 2**31 - 1, "max_tokens": None},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"allowed_token_ids": [0] * 1024},
        {"bad_words": ["a" * 256] * 256},
        {"bad_words": []},
        {"n": 2, "best_of": 2},
        {"use_beam_search": True, "temperature": 0},
        {"use_beam_search": True, "temperature": 0, "n": 16},
        {"use_beam_search": True, "temperature": 0, "n": 2, "best_of": 16, "top_k": -1, "stop_token_ids": [1]},
        {"use_beam_search": True, "temperature": 0, "length_penalty": -10, "early_stopping": "never"},
        {"use_beam_search": True, "temperature": 0, "length_penalty": 10, "early_stopping": True},
    ],
)
def test_legal_values(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert all(getattr(made, name) == value for name, value in params.items())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 10**9, 1.0, True, "1", None]),
        ("temperature", [-1, -1e-9, math.nan, math.inf, -math.inf, "1", True, None]),
        ("top_p", [0, -0.1, 1.01, math.nan, math.inf, "1", None]),
        ("top_k", [-2, 2**31, 1.5, math.nan, True, None]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("seed", [2**63, -(2**63) - 1, 1.5, True]),
        ("max_tokens", [0, -1, 2**31, 1.5, True]),
        ("min_tokens", [-1, 17, 2**31, 1.5, True, None]),
        ("presence_penalty", [-2.01, 2.01, math.nan, math.inf, "1", True, None]),
        ("frequency_penalty", [-2.01, 2.01, math.nan, -math.inf, "1", True, None]),
        ("repetition_penalty", [0, -1, 0.0099, 100.1, 1e-50, math.nan, math.inf, "1", True, None]),
        ("allowed_token_ids", [[], [-1], [2**31], [1.5], [True], ["1"], 5, "12", [0] * 1025]),
        ("bad_words", ["x", [""], [" "], [5], ["a" * 257], ["a"] * 257, {"a": 1}]),
        ("logprobs", [-1, 21, 10**9, True, 1.0]),
        ("prompt_logprobs", [-1, 21, 10**9, True, 1.0]),
        ("stop", ["", [""], ["a", ""], [1], 1, ["a" * 257], ["a"] * 17, {"a"}]),
        ("stop_token_ids", [[-1], [2**31], [0] * 129, ["a"], [True], [1.0], "ab"]),
        ("ignore_eos", [1, None, "yes"]),
        ("detokenize", [0, None]),
        ("skip_special_tokens", [1]),
        ("include_stop_str_in_output", [1]),
        ("use_beam_search", [1, None]),
        ("best_of", [0, -1, 129, 2.0, True, "2", 2]),
        ("length_penalty", [10.1, -10.1, math.nan, "1", True, None, 0.5]),
        ("early_stopping", [None, "always", 1, 0, True, "never"]),
    ],
)
def test_illegal_values_name_their_field_in_one_line(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value
        assert field in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_b58_greedy_sequences_are_all_alike(temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match="set temperature above 0"):
        SamplingParams(n=2, temperature=temperature)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of must be at least n=3, got 2"),
        ({"best_of": 17}, "best_of must be at most 16 with use_beam_search, got 17"),
        ({"n": 17}, "n must be at most 16 with use_beam_search, got 17"),
        ({"temperature": 0.5}, "temperature must be 0 with use_beam_search, got 0.5"),
        ({"top_p": 0.9}, "top_p must be 1 with use_beam_search, got 0.9"),
        ({"top_k": 5}, "top_k must be 0 or -1 with use_beam_search, got 5"),
        ({"min_p": 0.1}, "min_p must be 0 with use_beam_search, got 0.1"),
        ({"stop": ["a"]}, r"stop must be None with use_beam_search \(stop_token_ids may be given\), got \['a'\]"),
        ({"early_stopping": "maybe"}, "early_stopping must be true, false or \"never\", got 'maybe'"),
    ],
)
def test_rules_of_beam_search(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**{"use_beam_search": True, "temperature": 0.0, **params})


@pytest.mark.parametrize("name", ["best_of", "length_penalty", "early_stopping"])
def test_beam_fields_alone_are_refused(name: str) -> None:
    value = {"best_of": 2, "length_penalty": 2.0, "early_stopping": True}[name]
    with pytest.raises(InvalidRequestError, match="without use_beam_search"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("width", [0, 17, True, 2.0])
def test_beam_search_params_name_their_width(width: Any) -> None:
    with pytest.raises(InvalidRequestError, match="beam_width"):
        BeamSearchParams(beam_width=width, max_tokens=4).to_sampling_params()


def test_beam_search_params_become_sampling_params() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True, length_penalty=0.5).to_sampling_params()
    assert params == SamplingParams(
        n=4,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        length_penalty=0.5,
        early_stopping="never",
        detokenize=False,
    )
    with pytest.raises(InvalidRequestError, match="temperature must be 0"):
        BeamSearchParams(beam_width=4, max_tokens=8, temperature=1.0).to_sampling_params()


def test_b14_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize=True"):
        SamplingParams(stop=["a"], detokenize=False)


@pytest.mark.parametrize(
    ("temperature", "is_greedy", "effective"),
    [(0, True, 0.0), (9e-6, True, 0.0), (1e-5, False, 0.01), (0.005, False, 0.01), (0.5, False, 0.5)],
)
def test_temperature_steps(temperature: float, is_greedy: bool, effective: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert (params.is_greedy, params.effective_temperature) == (is_greedy, effective)


@pytest.mark.parametrize(("stop", "strings"), [(None, []), ("ab", ["ab"]), (["a", "b"], ["a", "b"])])
def test_stop_strings_are_a_list(stop: str | list[str] | None, strings: list[str]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


def test_it_survives_the_wire_and_is_checked_again_there() -> None:
    params = SamplingParams(n=2, top_p=0.5, stop=["a"], seed=-3, max_tokens=None)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.json.decode(b'{"top_p": 0}', type=SamplingParams)
