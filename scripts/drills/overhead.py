"""What a server costs over the engine alone: the same prompts through HTTP streams and through LLM in one process.

Both are loaded once and run in turn, so that a slow moment of the machine meets both. Wall time holds the client's own
work too, which shares the processors here; processor time is the server's alone, front end and core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from jaxllm import LLM, SamplingParams
from jaxllm.bench.workload import random_prompts

_PORT_LINE = "HTTP on "


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
    alone, served = [], []
    with _engine(args) as engine, _server(args) as (url, server):
        for index in range(args.rounds + 1):
            pair = _time_engine(engine), _time_server(args, url, server, index)
            print(
                f"{'warm-up' if not index else f'round {index}'}: {_in_words(pair[0])} alone, {_in_words(pair[1])} served"
            )
            if index:
                alone.append(pair[0])
                served.append(pair[1])
    for number, what in enumerate(("wall", "processor")):
        ratios = [server[number] / engine[number] for engine, server in zip(alone, served, strict=True)]
        print(
            f"{what} time, served over alone: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return 0


def _in_words(times: tuple[float, float]) -> str:
    return f"{times[0]:.2f} s wall {times[1]:.2f} s processor"


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


def _time_engine(process: "subprocess.Popen[str]") -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wall_s, cpu_s = json.loads(process.stdout.readline())
    return wall_s, cpu_s


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


def _time_server(args: argparse.Namespace, url: str, server: psutil.Process, seed: int) -> tuple[float, float]:
    before_s = _processor_s(server)
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "jaxllm.bench", "serve", "--base-url", url, "--seed", str(seed)]
        command += ["--num-prompts", str(args.streams), "--max-concurrency", str(args.streams)]
        command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        command += ["--result-filename", result.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        record = json.load(open(result.name))
    assert record["completed"] == args.streams, record["errors"]
    return record["duration"], _processor_s(server) - before_s


def _processor_s(server: psutil.Process) -> float:
    """Returns what a server's processes have used, the client's trial request among it."""
    return sum(sum(process.cpu_times()[:2]) for process in [server, *server.children(recursive=True)])


if __name__ == "__main__":
    sys.exit(main())
