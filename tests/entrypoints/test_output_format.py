"""JSON lines, plain text and the line of rates, on outputs written out by hand."""

import json
import math

from jaxllm.entrypoints.output_format import to_json_line, to_stats_line, to_text
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def make_output(
    num_prompt_tokens: int = 4,
    num_tokens: int = 11,
    start_s: float = 100.0,
    prompt: str | None = "the prompt",
) -> RequestOutput:
    """Waits 1 s, then 0.5 s to its first token, then 2 s to its end."""
    return RequestOutput(
        request_id="0",
        prompt=prompt,
        prompt_token_ids=list(range(num_prompt_tokens)),
        prompt_logprobs=None,
        outputs=[CompletionOutput(index=0, text="héllo", token_ids=[1] * num_tokens, finish_reason="length")],
        finished=True,
        metrics=RequestMetrics(start_s, start_s + 1.0, start_s + 1.5, start_s + 3.5, num_cached_tokens=3),
    )


def test_json_has_every_field() -> None:
    assert json.loads(to_json_line(make_output(num_tokens=2))) == {
        "prompt": "the prompt",
        "prompt_token_ids": [0, 1, 2, 3],
        "outputs": [
            {
                "index": 0,
                "text": "héllo",
                "token_ids": [1, 1],
                "finish_reason": "length",
                "stop_reason": None,
                "cumulative_logprob": None,
            }
        ],
        "metrics": {
            "num_prompt_tokens": 4,
            "num_cached_tokens": 3,
            "num_generated_tokens": 2,
            "queue_time_s": 1.0,
            "time_to_first_token_s": 1.5,
            "total_time_s": 3.5,
            "prompt_tokens_per_s": 8.0,
            "decode_tokens_per_s": 0.5,
        },
    }


def test_json_is_valid_with_values_that_json_lacks() -> None:
    output = make_output()
    output.prompt_logprobs = [None, {5: Logprob(-math.inf, 1, "\n")}]
    output.outputs[0].logprobs = [{7: Logprob(math.nan, 1, "é")}]
    output.outputs[0].cumulative_logprob = -math.inf
    line = to_json_line(output)
    assert line.isascii() and "\n" not in line
    record = json.loads(line, parse_constant=lambda name: 1 / 0)
    assert record["prompt_logprobs"] == [None, {"5": {"logprob": -9999.0, "rank": 1, "decoded_token": "\n"}}]
    assert record["outputs"][0]["logprobs"] == [{"7": {"logprob": -9999.0, "rank": 1, "decoded_token": "é"}}]
    assert record["outputs"][0]["cumulative_logprob"] == -9999.0


def test_json_of_an_output_that_never_ran() -> None:
    output = make_output(num_tokens=0)
    output.metrics = RequestMetrics(arrival_time_s=5.0)
    metrics = json.loads(to_json_line(output))["metrics"]
    assert (metrics["total_time_s"], metrics["decode_tokens_per_s"]) == (0.0, None)


def test_text() -> None:
    output = make_output()
    assert to_text(output, shows_prompt=False) == "héllo"
    assert to_text(output, shows_prompt=True) == "> the prompt\nhéllo\n"
    assert to_text(make_output(2, prompt=None), shows_prompt=True) == "> token ids [0, 1]\nhéllo\n"
    output.outputs.append(CompletionOutput(index=1, text="other"))
    assert to_text(output, shows_prompt=False) == "[0] héllo\n[1] other"


def test_stats_of_one_request() -> None:
    assert to_stats_line([make_output()]) == "time to first token 1.500 s, prompt 8.0 tok/s, decode 5.0 tok/s"


def test_stats_of_several_requests_are_totals() -> None:
    # Prompts run from 101.0 to 103.5, decoding from 101.5 to 105.5.
    outputs = [make_output(), make_output(start_s=102.0, num_prompt_tokens=6, num_tokens=31)]
    assert to_stats_line(outputs) == "mean time to first token 1.500 s, prompt 4.0 tok/s, decode 10.0 tok/s"


def test_stats_without_a_second_token() -> None:
    assert to_stats_line([make_output(num_tokens=1)]).endswith("decode - tok/s")
