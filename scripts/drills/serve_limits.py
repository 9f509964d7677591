"""What a server does at its limits, measured from outside. The client shares the processors and adds to all figures.

The device is a fake whose steps take a millisecond, but for `health`, which wants a real tokenizer.
"""

import argparse
import asyncio
import concurrent.futures
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from jaxllm.bench import serve_load
from jaxllm.bench.http_client import Server, parse_base_url, post_stream
from scripts.drills.raw_client import Answer, Burst, ask, burst, connect, request_bytes

_FAKE = ["-m", "tests.fakes.fake_server", "tests.fakes.light_executor:LightExecutor"]
_ENDLESS = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
_IDLE = {"vllm:kv_cache_usage_perc": 0.0, "vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
_STEPS = "vllm:iteration_tokens_total_count"


async def close(args: argparse.Namespace) -> None:
    """One stream after the other is closed; then half of 200 at random moments."""
    async with _server(_FAKE) as server:
        times_ms, num_steps = [], []
        for _ in range(50):
            async with aclosing(post_stream(server, "/v1/completions", _ENDLESS)) as events:
                for _ in range(5):
                    await anext(events)
                before = await _metrics(server)
            closed_s = time.perf_counter()
            after = await _until_idle(server)
            times_ms.append(1000 * (time.perf_counter() - closed_s))
            num_steps.append(after[_STEPS] - before[_STEPS])
        _print("from closing a stream to free blocks, ms", times_ms)
        _print("steps from the last look at it to free blocks", num_steps)
        draw = random.Random(1)
        lens = [draw.randrange(1, 200) if draw.random() < 0.5 else None for _ in range(200)]
        await asyncio.gather(*(_read(server, num) for num in lens))
        ended_s = time.perf_counter()
        await _until_idle(server)
        num_dropped = sum(num is not None for num in lens)
        print(
            f"200 streams, {num_dropped} of them dropped: all blocks free {time.perf_counter() - ended_s:.3f} s after"
        )


async def _read(server: Server, num_events: int | None) -> None:
    """Reads a stream of 400 tokens, or its first events."""
    async with aclosing(post_stream(server, "/v1/completions", {**_ENDLESS, "max_tokens": 400})) as events:
        async for _ in events:
            if num_events is not None:
                num_events -= 1
                if not num_events:
                    return


async def queue(args: argparse.Namespace) -> None:
    """2,000 requests on as many open connections, written at once; then some one by one while the queue stays full."""
    async with _server([*_FAKE, "--max-queue", "256"]) as server:
        connections = [connect(server.host, server.port) for _ in range(2000)]
        body = {"prompt": "a", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        for _ in range(args.repeats):
            done = burst(connections, _post(server, "/v1/completions", body))
            _print_burst(done)
            await _until_idle(server)
        long = _post(server, "/v1/completions", {**body, "max_tokens": 4000})
        for first in (256, 512):  # these run, those wait
            for connection in connections[first : first + 256]:
                connection.sendall(long)
            while (await _metrics(server))["vllm:num_requests_running"] < 256:
                await asyncio.sleep(0.01)
        refused = [ask(connections[0], _post(server, "/v1/completions", body)) for _ in range(200)]
        assert {answer.status for answer in refused} == {429}, refused
        _print("429 one by one while the queue is full: ms by the client", [answer.client_ms for answer in refused])
        for connection in connections:
            connection.close()


def _print_burst(done: Burst) -> None:
    by_status: dict[int, list[Answer]] = {}
    for answer in done.answers:
        by_status.setdefault(answer.status, []).append(answer)
    counts = {status: len(found) for status, found in sorted(by_status.items())}
    print(f"2000 requests, written in {done.sent_ms:.0f} ms, all answered after {done.all_ms:.0f} ms: {counts}")
    for status, found in sorted(by_status.items()):
        _print(f"{status}: ms from reading the request to its answer, by the server", [a.server_ms for a in found])
        _print(f"{status}: ms from writing it to reading the answer, by the client", [a.client_ms for a in found])


async def tokens(args: argparse.Namespace) -> None:
    """Streams of 128 tokens, some at a time."""
    async with _server(_FAKE) as server:
        for num_streams in (32, 128):
            bodies = [{**_ENDLESS, "max_tokens": 128}] * (8 * num_streams)
            load = serve_load.Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=num_streams)
            lens = [1] * len(bodies)
            results, wall_s = await serve_load.run_load(
                server, "/v1/completions", bodies, lens, load, 0, lambda _: None
            )
            assert all(result.is_success for result in results), results
            rate = sum(1 + len(result.itl) for result in results) / wall_s
            print(f"{num_streams} streams: {128 * len(bodies) / wall_s:.0f} tokens/s in {rate:.0f} events/s")


async def health(args: argparse.Namespace) -> None:
    """/health 200 times a second, by a process of its own, while 20 bodies of 1 MB are worked through; four kinds."""
    command = ["-m", "jaxllm.serve", "--model", args.model, "--max-num-seqs", "4", "--max-model-len", "256"]
    draw = random.Random(2)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randrange(2, 9))) for _ in range(5000)]
    text = " ".join(draw.choices(words, k=200_000))[:1_000_000]
    kinds: list[tuple[str, str, dict[str, Any], int]] = [
        ("texts to tokenize", "/tokenize", {"prompt": text}, 200),
        ("prompts, too long for the model", "/v1/completions", {"prompt": text}, 400),
        ("conversations, too long", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, 400),
        ("prompts of token ids, too long", "/v1/completions", {"prompt": [12345] * 166_000}, 400),
    ]
    async with _server([*command, "--port", "0"]) as server:
        for name, path, body, status in kinds:
            begin_s = time.perf_counter()
            times_ms: list[float] = []
            for _ in range(args.repeats):
                times_ms += await _probe_meanwhile(server, _post(server, path, body), status)
            print(f"{args.repeats} times 20 {name}: {time.perf_counter() - begin_s:.1f} s")
            _print("/health meanwhile, ms", times_ms)


async def _probe_meanwhile(server: Server, request: bytes, status: int) -> list[float]:
    """Returns how long /health took while 20 connections wrote a request and waited for the answer, in milliseconds."""
    address = (server.host, str(server.port))
    flags = ["-m", "scripts.drills.raw_client", *address, "/health", "0.005"]
    prober = await asyncio.create_subprocess_exec(
        sys.executable, *flags, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    assert prober.stdout is not None
    await prober.stdout.readline()
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        loop = asyncio.get_running_loop()
        connections = [connect(server.host, server.port) for _ in range(20)]
        asked = [loop.run_in_executor(threads, ask, connection, request) for connection in connections]
        answers = await asyncio.gather(*asked)
    for connection in connections:
        connection.close()
    assert {answer.status for answer in answers} == {status}, answers
    times_ms: list[float] = json.loads((await prober.communicate(b""))[0])
    return times_ms


def _post(server: Server, path: str, body: Any) -> bytes:
    return request_bytes("POST", path, server.host, json.dumps(body).encode())


@asynccontextmanager
async def _server(command: Sequence[str]) -> AsyncIterator[Server]:
    """Starts a server on a free port, and waits until it is ready."""
    flags = [] if "--port" in command else ["--port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *flags, stderr=asyncio.subprocess.PIPE, limit=1 << 20
    )
    assert process.stderr is not None
    try:
        log: list[str] = []
        while not log or "ready to answer" not in log[-1]:
            log.append((await process.stderr.readline()).decode())
            assert log[-1], "".join(log)
        (line,) = (line for line in log if "HTTP on " in line)
        yield parse_base_url("http://" + line.split("HTTP on ")[1].split(";")[0], {})
    finally:
        process.terminate()
        await process.wait()


async def _metrics(server: Server) -> dict[str, float]:
    """Returns the value of each metric's first series."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: {server.host}\r\nconnection: close\r\n\r\n".encode())
    lines = (await reader.read(-1)).decode().splitlines()
    writer.close()
    values: dict[str, float] = {}
    for line in lines:
        if line.startswith(("vllm:", "jaxllm:")):
            values.setdefault(line.split("{")[0], float(line.rsplit(" ", 1)[1]))
    return values


async def _until_idle(server: Server) -> dict[str, float]:
    while True:
        metrics = await _metrics(server)
        if _IDLE.items() <= metrics.items():
            return metrics


def _print(what: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{what}: median {statistics.median(ordered):.1f}, p99 {p99:.1f}, most {ordered[-1]:.1f} ({len(ordered)})")


_PARTS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, None]]] = {
    "close": close,
    "queue": queue,
    "tokens": tokens,
    "health": health,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/serve_limits", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *_PARTS], help="what is measured (default: everything)")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer `health` takes")
    parser.add_argument("--repeats", type=int, default=3, help="how often `queue` and `health` do it (default: 3)")
    args = parser.parse_args()
    for part in args.parts or _PARTS:
        asyncio.run(_PARTS[part](args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
