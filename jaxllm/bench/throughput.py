"""`bench throughput`: how many tokens a second an engine makes when it gets all prompts at once.

Fields of the result are named as in vLLM's `bench throughput --output-json`. Standard output holds the
result alone; progress goes to stderr. Knows LLM's public face, nothing of the engine behind it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, get_args

from jaxllm.bench.workload import random_prompts, repeat
from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.llm_engine import DEFAULT_ENGINE_PROCESS, EngineProcess
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser, positive_int
from jaxllm.entrypoints.llm import LLM
from jaxllm.entrypoints.prompt_source import read_prompts
from jaxllm.exceptions import JaxllmError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

_DEFAULT_NUM_PROMPTS = 32
_WARM_UP_OUTPUT_LEN = 4


class Generator(Protocol):
    """The part of LLM that is measured."""

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]: ...


@dataclass(frozen=True, kw_only=True)
class ThroughputResult:
    """One timed run. elapsed_time is in seconds; total_num_tokens counts prompt and output tokens."""

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    total_output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    output_tokens_per_second: float


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    try:
        result = _run(args)
    except JaxllmError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(_to_text(result, args) + "\n")
    return 0


def measure(
    llm: Generator,
    prompts_of_run: Callable[[int], list[Prompt]],
    sampling_params: SamplingParams,
    repeats: int,
    clock: Callable[[], float],
) -> ThroughputResult:
    """Returns the fastest of `repeats` timed runs, after one untimed run of a few tokens.

    Args:
      prompts_of_run: Run number -> its prompts. Run 0 is the warm-up.
      clock: Returns seconds.
    """
    warm_up_prompts = prompts_of_run(0)
    _progress(f"warm-up with {len(warm_up_prompts)} prompts")
    warm_up_params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_WARM_UP_OUTPUT_LEN)
    llm.generate(warm_up_prompts, warm_up_params, use_tqdm=False)
    results = []
    for idx in range(1, repeats + 1):
        prompts = prompts_of_run(idx)
        start = clock()
        outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
        results.append(_result(outputs, clock() - start))
        _progress(f"run {idx}/{repeats}: {results[-1].output_tokens_per_second:.1f} output tokens/s")
    return min(results, key=lambda result: result.elapsed_time)


def _run(args: argparse.Namespace) -> ThroughputResult:
    lines = read_prompts([], args.prompts_file) if args.prompts_file else []
    num_prompts = args.num_prompts or len(lines) or _DEFAULT_NUM_PROMPTS
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=args.output_len, detokenize=not args.disable_detokenize
    )
    with LLM(engine_process=args.engine_process, **asdict(EngineArgs.from_cli_args(args))) as llm:
        tokenizer = llm.get_tokenizer()

        def prompts_of_run(idx: int) -> list[Prompt]:
            if lines:
                return repeat(lines, num_prompts)
            # Fresh prompts each time, so that no run finds its own in the prefix cache.
            return random_prompts(
                num_prompts,
                args.input_len,
                tokenizer.vocab_size,
                tokenizer.special_token_ids,
                seed=(args.seed or 0) + idx,
            )

        return measure(llm, prompts_of_run, params, args.repeats, time.perf_counter)


def _result(outputs: Sequence[RequestOutput], elapsed_s: float) -> ThroughputResult:
    num_output_tokens = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    num_tokens = num_output_tokens + sum(len(output.prompt_token_ids) for output in outputs)
    return ThroughputResult(
        elapsed_time=elapsed_s,
        num_requests=len(outputs),
        total_num_tokens=num_tokens,
        total_output_tokens=num_output_tokens,
        requests_per_second=len(outputs) / elapsed_s,
        tokens_per_second=num_tokens / elapsed_s,
        output_tokens_per_second=num_output_tokens / elapsed_s,
    )


def _to_text(result: ThroughputResult, args: argparse.Namespace) -> str:
    if args.json:
        return json.dumps({"model": args.model, "max_num_seqs": args.max_num_seqs, **asdict(result)})
    return (
        f"Throughput: {result.requests_per_second:.2f} requests/s, "
        f"{result.tokens_per_second:.2f} total tokens/s, "
        f"{result.output_tokens_per_second:.2f} output tokens/s"
    )


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench throughput", "Measure how fast many prompts given at once are answered.")
    add = parser.add_argument_group("workload").add_argument
    add(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help=f"number of requests (default: {_DEFAULT_NUM_PROMPTS}, or one a line of --prompts-file)",
    )
    add(
        "--input-len",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens of a random prompt (default: 128)",
    )
    add(
        "--output-len",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens to generate for each prompt (default: 128)",
    )
    add("--prompts-file", metavar="FILE", help="a JSON or text line each, instead of random prompts")
    add(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="timed runs; the fastest counts (default: 1)",
    )
    add("--disable-detokenize", action="store_true", help="make token ids only, no text")
    add(
        "--engine-process",
        choices=get_args(EngineProcess),
        default=DEFAULT_ENGINE_PROCESS,
        help=f"mp: the engine in a process of its own; inproc: in this one (default: {DEFAULT_ENGINE_PROCESS})",
    )
    add("--json", action="store_true", help="print the result as one JSON object")
    EngineArgs.add_cli_args(parser)
    return parser


def _progress(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
