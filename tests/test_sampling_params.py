"""SamplingParams: each rule with the value below it, at its edge, and above."""

import math
from typing import Any

import msgspec
import pytest

from jaxllm.exceptions import InvalidRequestError
from jaxllm.sampling_params import SamplingParams


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
    ],
)
def test_legal_values(params: dict[str, Any]) -> None:
    SamplingParams(**params)


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
        ("logprobs", [-1, 21, 10**9, True, 1.0]),
        ("prompt_logprobs", [-1, 21, 10**9, True, 1.0]),
        ("stop", ["", [""], ["a", ""], [1], 1, ["a" * 257], ["a"] * 17, {"a"}]),
        ("stop_token_ids", [[-1], [2**31], [0] * 129, ["a"], [True], [1.0], "ab"]),
        ("ignore_eos", [1, None, "yes"]),
        ("detokenize", [0, None]),
        ("skip_special_tokens", [1]),
        ("include_stop_str_in_output", [1]),
    ],
)
def test_illegal_values_name_their_field_in_one_line(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value
        assert field in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_b58_greedy_sequences_are_all_alike(temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match="set temperature above 0"):
        SamplingParams(n=2, temperature=temperature)


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
