"""What a run against a server came to. Field names, definitions and the table are those of vLLM's `bench serve`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_NAMES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
_NAMES |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
METRICS = tuple(_NAMES)


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times in seconds."""

    prompt_len: int
    start_s: float
    is_success: bool = False
    error: str = ""
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    generated_text: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, linear between neighbours: of [1, 2, 3, 4], 50 is 2.5."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(
    results: Sequence[RequestResult], duration_s: float, percentiles: Sequence[float], metrics: Sequence[str]
) -> dict[str, Any]:
    """Returns the summary of a run, times in milliseconds."""
    done = [result for result in results if result.is_success]
    num_input = sum(result.prompt_len for result in done)
    num_output = sum(result.output_len for result in done)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    values = {
        "ttft": [result.ttft for result in done],
        "tpot": [result.tpot for result in done if result.tpot is not None],
        "itl": [gap for result in done for gap in result.itl],
        "e2el": [result.latency for result in done],
    }
    for metric in metrics:
        summary |= _spread(metric, values[metric], percentiles)
    return summary


def to_table(summary: dict[str, Any], percentiles: Sequence[float], metrics: Sequence[str]) -> str:
    """Returns the summary for people."""
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="=")]
    for label, name in (
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(_row(label, summary[name]))
    for metric in metrics:
        lines.append("{s:{c}^{n}}".format(s=_NAMES[metric], n=50, c="-"))
        short = metric.upper()
        lines.append(_row(f"Mean {short} (ms):", summary[f"mean_{metric}_ms"]))
        lines.append(_row(f"Median {short} (ms):", summary[f"median_{metric}_ms"]))
        lines += [_row(f"P{_word(p)} {short} (ms):", summary[f"p{_word(p)}_{metric}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * 50])


def _spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values_ms = [1000 * value for value in values] or [0.0]
    return {
        f"mean_{metric}_ms": statistics.fmean(values_ms),
        f"median_{metric}_ms": statistics.median(values_ms),
        f"std_{metric}_ms": statistics.pstdev(values_ms),
        **{f"p{_word(percent)}_{metric}_ms": percentile(values_ms, percent) for percent in percentiles},
    }


def _peak_rate(results: Sequence[RequestResult]) -> float:
    """Returns the most output tokens of any whole second since the first request."""
    counts: dict[int, int] = {}
    begin_s = min((result.start_s for result in results), default=0.0)
    for result in results:
        moment_s = result.start_s + result.ttft - begin_s
        for gap in (0.0, *result.itl):
            moment_s += gap
            counts[int(moment_s)] = counts.get(int(moment_s), 0) + 1
    return float(max(counts.values(), default=0))


def _peak_concurrency(results: Sequence[RequestResult]) -> int:
    moments = [(result.start_s, 1) for result in results]
    moments += [(result.start_s + result.latency, -1) for result in results]
    running = peak = 0
    for _, change in sorted(moments):
        running += change
        peak = max(peak, running)
    return peak


def _word(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def _row(label: str, value: float) -> str:
    number = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {number}"
