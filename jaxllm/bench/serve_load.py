"""The load of `bench serve`: prompts, when each is sent, how many at a time, and what its client saw."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from jaxllm.bench.http_client import HttpError, Server, post_json, post_stream
from jaxllm.bench.serve_result import RequestResult

_VOCABULARY_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards brew potions, counting stars, rivers and stones. "
    "A small engine reads many prompts at once; each answer grows word by word until it ends. Paris, Rome, Berlin, 12 "
    "apples, 7 pears and 1984 reasons to write another line about the weather, the sea, music, trains and old books."
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come.

    Attributes:
      request_rate: Requests a second; infinity sends all at once.
      burstiness: Shape of the gaps between them: 1 is a Poisson process, less is burstier, more is steadier.
      max_concurrency: Most requests at a time; None sets no limit.
    """

    request_rate: float
    burstiness: float
    max_concurrency: int | None


async def random_prompts(server: Server, model: str, num_prompts: int, input_len: int, seed: int) -> list[list[int]]:
    """Returns prompts of input_len tokens, drawn from those that the server makes of a known text.

    Raises:
      HttpError, OSError: The server doesn't tokenize.
    """
    answer = await post_json(server, "/tokenize", {"model": model, "prompt": _VOCABULARY_TEXT})
    known = sorted(set(answer["tokens"]))
    draw = random.Random(seed)
    return [draw.choices(known, k=input_len) for _ in range(num_prompts)]


def start_times(num_requests: int, load: Load, seed: int) -> list[float]:
    """Returns when each request is sent, in seconds from the beginning."""
    if load.request_rate == float("inf"):
        return [0.0] * num_requests
    draw = random.Random(seed)
    mean_gap_s = 1 / load.request_rate
    times, now_s = [], 0.0
    for _ in range(num_requests):
        times.append(now_s)
        now_s += draw.gammavariate(load.burstiness, mean_gap_s / load.burstiness)
    return times


async def run_load(
    server: Server,
    endpoint: str,
    bodies: Sequence[dict[str, Any]],
    prompt_lens: Sequence[int],
    load: Load,
    seed: int,
    on_done: Callable[[RequestResult], None],
) -> tuple[list[RequestResult], float]:
    """Sends every body at its time. Returns what became of each, in order, and the seconds that all took."""
    places = None if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    begin_s = time.perf_counter()

    async def send(body: dict[str, Any], prompt_len: int, start_s: float) -> RequestResult:
        await asyncio.sleep(begin_s + start_s - time.perf_counter())
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            result = await measure_request(server, endpoint, body, prompt_len)
        on_done(result)
        return result

    starts = start_times(len(bodies), load, seed)
    sending = [send(*one) for one in zip(bodies, prompt_lens, starts, strict=True)]
    results = await asyncio.gather(*sending)
    return list(results), time.perf_counter() - begin_s


async def measure_request(server: Server, endpoint: str, body: dict[str, Any], prompt_len: int) -> RequestResult:
    """Sends one streaming request and times its chunks."""
    result = RequestResult(prompt_len, time.perf_counter())
    last_s = result.start_s
    try:
        async with aclosing(post_stream(server, endpoint, body)) as events:
            async for chunk in events:
                if "error" in chunk:
                    raise HttpError(str(chunk["error"].get("message")))
                last_s = _take_chunk(result, chunk, last_s)
        result.latency = last_s - result.start_s
        result.is_success = result.ttft > 0
        if not result.is_success:
            result.error = "no token came"
    except (HttpError, OSError) as error:
        result.error = str(error)
    return result


def _take_chunk(result: RequestResult, chunk: dict[str, Any], last_s: float) -> float:
    """Counts one chunk; returns when the newest token came."""
    if chunk.get("usage"):
        result.output_len = chunk["usage"]["completion_tokens"]
    text = _text_of(chunk)
    if text is None:
        return last_s
    now_s = time.perf_counter()
    if result.ttft:
        result.itl.append(now_s - last_s)
    else:
        result.ttft = now_s - result.start_s
    result.generated_text += text
    return now_s


def _text_of(chunk: dict[str, Any]) -> str | None:
    """Returns a token's text, "" while it is held back; None for a chunk without a token: roles, ends, usage."""
    if not chunk["choices"] or chunk["choices"][0]["finish_reason"] is not None:
        return None
    choice = chunk["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    return None if "role" in choice["delta"] else choice["delta"].get("content")
