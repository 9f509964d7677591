"""`bench serve`: how a running OpenAI-compatible server answers many clients. Flags and results are vLLM's.

Prompts are drawn from the tokens that the server itself makes of a known text, so that no model is needed here. The
table goes to standard output, progress to stderr.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jaxllm import envs
from jaxllm.bench.http_client import HttpError, Server, get_json, parse_base_url
from jaxllm.bench.serve_load import Load, measure_request, random_prompts, run_load
from jaxllm.bench.serve_plot import check_matplotlib, plot
from jaxllm.bench.serve_result import METRICS, RequestResult, summarize, to_table
from jaxllm.entrypoints.arg_parser import ArgParser, positive_int
from jaxllm.entrypoints.prompt_source import read_prompts
from jaxllm.exceptions import JaxllmError
from jaxllm.progress import progress_bar

_ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    try:
        if args.plot:
            check_matplotlib()
        return asyncio.run(_run(args))
    except (JaxllmError, HttpError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2


async def _run(args: argparse.Namespace) -> int:
    key = envs.api_key()
    url = args.base_url or f"http://{args.host}:{args.port}"
    server = parse_base_url(url, {} if key is None else {"authorization": f"Bearer {key}"})
    model = args.model or (await get_json(server, "/v1/models"))["data"][0]["id"]
    bodies, prompt_lens = await _requests(args, server, model)
    endpoint = _ENDPOINTS[args.backend]
    _progress("one request to see that it works")
    trial = await measure_request(server, endpoint, bodies[0], prompt_lens[0])
    if not trial.is_success:
        raise HttpError(f"the first request failed: {trial.error}")
    load = Load(request_rate=args.request_rate, burstiness=args.burstiness, max_concurrency=args.max_concurrency)
    with progress_bar(len(bodies), "requests", "request") as bar:
        results, duration_s = await run_load(
            server, endpoint, bodies, prompt_lens, load, args.seed, lambda _: bar.update(1)
        )
    metrics = [name for name in METRICS if name in args.percentile_metrics.split(",")]
    summary = summarize(results, duration_s, args.metric_percentiles, metrics)
    sys.stdout.write(to_table(summary, args.metric_percentiles, metrics) + "\n")
    if args.result_filename:
        _save(args, model, summary, results)
    if args.plot:
        plot(results, args.plot)
        _progress(f"wrote {args.plot}")
    for error in sorted({result.error for result in results if not result.is_success})[:3]:
        _progress(f"failed: {error}")
    return 0 if summary["completed"] else 1


async def _requests(args: argparse.Namespace, server: Server, model: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns each request's body, and how long its prompt is: tokens, or words of a text that was given."""
    shared = {
        "model": model,
        "max_tokens": args.random_output_len,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts: list[Any]
    if args.prompts_file:
        lines = read_prompts([], args.prompts_file)
        prompts = [lines[index % len(lines)] for index in range(args.num_prompts)]
    else:
        prompts = list(await random_prompts(server, model, args.num_prompts, args.random_input_len, args.seed))
    lens = [len(prompt.split()) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    if args.backend == "completions":
        return [{**shared, "prompt": prompt} for prompt in prompts], lens
    texts = [prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) for prompt in prompts]
    return [{**shared, "messages": [{"role": "user", "content": text}]} for text in texts], lens


def _save(args: argparse.Namespace, model: str, summary: dict[str, Any], results: Sequence[RequestResult]) -> None:
    record = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summary,
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itl for result in results],
        "generated_texts": [result.generated_text for result in results],
        "errors": [result.error for result in results],
    }
    with open(args.result_filename, "w", encoding="utf-8") as file:
        json.dump(record, file)
    _progress(f"wrote {args.result_filename}")


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench serve", "Measure how a running server answers many clients.")
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="where the server is, instead of --host and --port")
    add("--host", default="127.0.0.1", help="the server's host (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="the server's port (default: 8000)")
    add("--model", help="the model's name (default: the first that the server lists)")
    add("--backend", choices=tuple(_ENDPOINTS), default="completions", help="which API (default: completions)")
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=positive_int, default=100, metavar="N", help="requests (default: 100)")
    add("--random-input-len", type=positive_int, default=128, metavar="N", help="prompt tokens (default: 128)")
    add("--random-output-len", type=positive_int, default=128, metavar="N", help="output tokens (default: 128)")
    add("--prompts-file", metavar="FILE", help="a JSON or text line each, instead of random prompts")
    add("--request-rate", type=_positive, default=float("inf"), metavar="R", help="requests a second (default: inf)")
    add("--burstiness", type=_positive, default=1.0, metavar="B", help="1 is Poisson, less is burstier (default: 1)")
    add("--max-concurrency", type=positive_int, metavar="N", help="most requests at a time (default: no limit)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts and of when they are sent (default: 0)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make every answer as long as it may be; other servers may not know it (default: on)",
    )
    add = parser.add_argument_group("result").add_argument
    add(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="M,M",
        help=f"which of {', '.join(METRICS)} to report (default: all)",
    )
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=[50.0, 90.0, 95.0, 99.0],
        metavar="P,P",
        help="percentiles to report (default: 50,90,95,99)",
    )
    add("--result-filename", metavar="FILE", help="write everything to this file, as JSON")
    add("--plot", metavar="FILE", help="write a picture: .png, .svg or .pdf")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers in [0, 100] such as 50,99, got {text!r}")
    return values


def _progress(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
