"""RequestOutputs as the generate command shows them: JSON lines, plain text, and one line of rates."""

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxllm.engine.logprobs import LOWEST_LOGPROB
from jaxllm.outputs import CompletionOutput, PositionLogprobs, RequestOutput


def to_json_line(output: RequestOutput) -> str:
    """Returns one line of valid JSON, ASCII alone, so that any terminal and any pipe can carry it."""
    record: dict[str, Any] = {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_position_json(position) for position in output.prompt_logprobs]
    record["outputs"] = [_completion_json(completion) for completion in output.outputs]
    record["metrics"] = _metrics_json(output)
    return json.dumps(record, allow_nan=False)


def to_text(output: RequestOutput, shows_prompt: bool) -> str:
    """Returns the generated text; its prompt above it, and numbered where there are several."""
    if len(output.outputs) == 1:
        text = output.outputs[0].text
    else:
        text = "\n".join(f"[{completion.index}] {completion.text}" for completion in output.outputs)
    if not shows_prompt:
        return text
    prompt = f"token ids {output.prompt_token_ids}" if output.prompt is None else output.prompt
    return f"> {prompt}\n{text}\n"


def to_stats_line(outputs: Sequence[RequestOutput]) -> str:
    """Returns the time to the first token (a mean, of several requests) and the two token rates.

    Rates are over all requests together: prompt tokens until the last request's first token, generated
    tokens after the first one of all.
    """
    times = [_times(output) for output in outputs]
    first_token_s = [
        first - output.metrics.arrival_time_s for output, (_, first, _) in zip(outputs, times, strict=True)
    ]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_decoded = sum(_num_decoded_tokens(output) for output in outputs)
    prompt_s = max(first for _, first, _ in times) - min(scheduled for scheduled, _, _ in times)
    decode_s = max(finished for _, _, finished in times) - min(first for _, first, _ in times)
    label = "time to first token" if len(outputs) == 1 else "mean time to first token"
    return (
        f"{label} {sum(first_token_s) / len(first_token_s):.3f} s, "
        f"prompt {_rate_text(num_prompt_tokens, prompt_s)}, decode {_rate_text(num_decoded, decode_s)}"
    )


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": _finite(completion.cumulative_logprob),
    }
    if completion.logprobs is not None:
        record["logprobs"] = [_position_json(position) for position in completion.logprobs]
    return record


def _position_json(position: PositionLogprobs | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def _metrics_json(output: RequestOutput) -> dict[str, Any]:
    scheduled, first, finished = _times(output)
    arrival = output.metrics.arrival_time_s
    return {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_generated_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        "queue_time_s": round(scheduled - arrival, 6),
        "time_to_first_token_s": round(first - arrival, 6),
        "total_time_s": round(finished - arrival, 6),
        "prompt_tokens_per_s": _rate(len(output.prompt_token_ids), first - scheduled),
        "decode_tokens_per_s": _rate(_num_decoded_tokens(output), finished - first),
    }


def _times(output: RequestOutput) -> tuple[float, float, float]:
    """Returns (first scheduled, first token, finished); a moment that never came is the one before it."""
    metrics = output.metrics
    scheduled = metrics.first_scheduled_time_s
    if scheduled is None:
        scheduled = metrics.arrival_time_s
    first = scheduled if metrics.first_token_time_s is None else metrics.first_token_time_s
    return scheduled, first, first if metrics.finished_time_s is None else metrics.finished_time_s


def _num_decoded_tokens(output: RequestOutput) -> int:
    """Returns the generated tokens without each sequence's first, which the prompt's step gave."""
    return sum(max(len(completion.token_ids) - 1, 0) for completion in output.outputs)


def _rate(num_tokens: int, seconds: float) -> float | None:
    return round(num_tokens / seconds, 3) if num_tokens and seconds > 0 else None


def _rate_text(num_tokens: int, seconds: float) -> str:
    rate = _rate(num_tokens, seconds)
    return "- tok/s" if rate is None else f"{rate:.1f} tok/s"


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else LOWEST_LOGPROB
