"""What a server costs over the engine alone: the same prompts through HTTP streams and through LLM in one process.

Both are loaded once and run in turn, so that a slow moment of the machine meets both. Wall time holds the client's own
work too, which shares the processors here; processor time is the server's alone, front end and core.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from jaxllm import LLM, SamplingParams
from jaxllm.bench import serve_load
from jaxllm.bench.http_client import Server, parse_base_url
from jaxllm.bench.workload import random_prompts

_PORT_LINE = "HTTP on "


class Times(NamedTuple):
    wall_s: float
    core_s: float  # processor time of the process that the engine core is in
    front_s: float  # that of the server's front end

    @property
    def total_s(self) -> float:
        return self.core_s + self.front_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/overhead", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32, help="requests at a time")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        _run_engine(args)
        return 0
    rounds: list[tuple[Times, Times]] = []
    with _engine(args) as engine, _server(args) as (url, server):
        for index in range(args.rounds + 1):
            alone, served = _time_engine(engine), _time_server(args, url, server, index)
            print(f"{f'round {index}' if index else 'warm-up'}: {_in_words(alone)} alone; {_in_words(served)} served")
            if index:
                rounds.append((alone, served))
    _print_ratios("wall time, served over alone", [served.wall_s / alone.wall_s for alone, served in rounds])
    _print_ratios("processor time, served over alone", [served.total_s / alone.total_s for alone, served in rounds])
    return 0


def _print_ratios(what: str, ratios: Sequence[float]) -> None:
    print(f"{what}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _in_words(times: Times) -> str:
    front = f" ({times.front_s:.2f} in the front end)" if times.front_s else ""
    return f"{times.wall_s:.2f} s, {times.total_s:.2f} s of processors{front}"


def _limits(args: argparse.Namespace) -> dict[str, int]:
    return {"max_num_seqs": args.streams, "max_model_len": args.input_len + args.output_len}


def _run_engine(args: argparse.Namespace) -> None:
    """Answers the prompts of a new seed for each line of standard input; writes wall and processor seconds."""
    with LLM(args.model, engine_process="inproc", **_limits(args)) as llm:
        tokenizer = llm.get_tokenizer()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_len)
        for seed, _ in enumerate(sys.stdin):
            ids = random_prompts(
                args.streams, args.input_len, tokenizer.vocab_size, tokenizer.special_token_ids, seed=seed
            )
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            llm.generate(ids, params, use_tqdm=False)
            print(json.dumps([time.perf_counter() - start_s, time.process_time() - start_cpu_s]), flush=True)


@contextmanager
def _engine(args: argparse.Namespace) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "scripts.drills.overhead", *sys.argv[1:], "--engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _time_engine(process: "subprocess.Popen[str]") -> Times:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wall_s, cpu_s = json.loads(process.stdout.readline())
    return Times(wall_s, cpu_s, 0.0)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, psutil.Process]]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _limits(args).items()]
    command = [sys.executable, "-m", "jaxllm.serve", "--model", args.model, "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while True:
                time.sleep(0.2)
                assert process.poll() is None, Path(log.name).read_text()
                lines = [line for line in Path(log.name).read_text().splitlines() if _PORT_LINE in line]
                if lines:
                    url = "http://" + lines[0].split(_PORT_LINE)[1].split(";")[0]
                    if _is_ready(url):
                        break
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health") as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def _time_server(args: argparse.Namespace, url: str, server: psutil.Process, seed: int) -> Times:
    """Sends the requests from here; what that takes counts as wall time only."""
    front, core = [server], server.children(recursive=True)
    before_s = _processor_s(front), _processor_s(core)
    wall_s = asyncio.run(_send(args, parse_base_url(url, {}), seed))
    return Times(wall_s, _processor_s(core) - before_s[1], _processor_s(front) - before_s[0])


async def _send(args: argparse.Namespace, server: Server, seed: int) -> float:
    prompts = await serve_load.random_prompts(server, args.model, args.streams, args.input_len, seed)
    body = {"model": args.model, "max_tokens": args.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    load = serve_load.Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=args.streams)
    lens = [args.input_len] * args.streams
    results, wall_s = await serve_load.run_load(server, "/v1/completions", bodies, lens, load, 0, lambda _: None)
    assert all(result.is_success for result in results), results
    return wall_s


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
