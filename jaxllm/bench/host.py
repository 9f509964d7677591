"""`bench host`: microseconds that each step costs on the host, beside a device that takes no time.

Every sequence is decoding: one token a sequence and step, as in the long middle of a batch. Each number is the median
over the steps. The tokenizer costs nothing; a model's own comes on top of `output`. Knows the parts of a step, not
what they do; the worker's part is imported by name, since it brings JAX with it.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.engine import garbage
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.entrypoints.arg_parser import ArgParser, positive_int
from jaxllm.exceptions import JaxllmError, exit_code
from jaxllm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    ModelRunnerOutput,
    SampledToken,
    SchedulerOutput,
)
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.worker.buckets import max_num_draws, token_ladder

_EXECUTOR_COST = "jaxllm.bench.executor_cost"
_INPUT_BATCH = "jaxllm.worker.input_batch:InputBatch"
_NUM_SEQS = (1, 16, 64, 256, 1024)
_PROMPT_LENS = (64, 192)  # drawn between these, so that the sequences don't fill their blocks in the same step
_MAX_MODEL_LEN = 1024
_BLOCK_SIZE = 16
_VOCAB_SIZE = 32_000
_MAX_STEPS = 512


class PassInputs(Protocol):
    """The part of a prepared forward pass that the made-up device needs."""

    @property
    def draws(self) -> list[int]: ...


class InputBatch(Protocol):
    """The worker's rows."""

    def apply(self, step: SchedulerOutput) -> None: ...

    def to_forward_batches(self, step: SchedulerOutput) -> list[PassInputs]: ...


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Microseconds a step. `total` is what stands between two steps of the device; `output` can run beside one."""

    num_seqs: int
    schedule: float
    prepare: float
    update: float
    output: float
    total: float  # schedule + prepare + update


class _LetterTokenizer:
    """Every token is the letter a."""

    vocab_size = _VOCAB_SIZE
    special_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * len(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "a" * len(ids)

    def files(self) -> dict[str, bytes]:
        return {}


class HostLoop:
    """The host's parts of an engine with num_seqs requests, and a device that draws token 1 at once.

    Args:
      num_seqs: Requests, all running at once.
      clock_ns: Nanoseconds of a monotonic clock.
    """

    def __init__(self, num_seqs: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        max_num_batched_tokens = max(2048, num_seqs)
        num_blocks = num_seqs * (_MAX_MODEL_LEN // _BLOCK_SIZE) + 1
        self._clock_ns = clock_ns
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=_MAX_MODEL_LEN
            ),
            CacheConfig(),
            KVCacheInfo(num_blocks, _BLOCK_SIZE, num_seqs, max_num_batched_tokens),
        )
        self._input_batch = _make_input_batch(num_seqs, max_num_batched_tokens)
        self._output_processor = OutputProcessor(_LetterTokenizer())
        for request in _requests(num_seqs):
            self._output_processor.add_request(request.request_id, request, None, final_only=True)
            self._scheduler.add_request(request)

    def run_to_decode(self) -> None:
        """Computes every prompt, until a step draws a token for each sequence."""
        num_seqs = self._scheduler.max_num_seqs
        while len(self.step()[0].num_scheduled_tokens) < num_seqs or self._scheduler.queues.waiting:
            pass

    def step(self) -> tuple[SchedulerOutput, list[int]]:
        """Runs one step. Returns it, and the nanoseconds of schedule, prepare, update and output."""
        times = [self._clock_ns()]
        step = self._scheduler.schedule(0.0)
        times.append(self._clock_ns())
        self._input_batch.apply(step)
        passes = self._input_batch.to_forward_batches(step)
        times.append(self._clock_ns())
        result = ModelRunnerOutput({seq_id: [SampledToken(1)] for inputs in passes for seq_id in inputs.draws}, {})
        times.append(self._clock_ns())
        outputs: EngineCoreOutputs = self._scheduler.update_from_output(step, result)
        times.append(self._clock_ns())
        self._output_processor.process_outputs(outputs)
        times.append(self._clock_ns())
        schedule, prepare, _, update, output = (after - before for before, after in zip(times, times[1:], strict=False))
        return step, [schedule, prepare, update, output]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    if args.executor is not None:
        return _compare_executors(args)
    results = [measure(num_seqs, args.steps) for num_seqs in args.num_seqs]
    if args.json:
        sys.stdout.write("".join(json.dumps(asdict(result)) + "\n" for result in results))
        return 0
    sys.stdout.write("microseconds a step\n" + _line("seqs", *_COLUMNS))
    for result in results:
        values = asdict(result)
        sys.stdout.write(_line(str(result.num_seqs), *(f"{values[name]:.0f}" for name in _COLUMNS)))
    return 0


def _compare_executors(args: argparse.Namespace) -> int:
    cost = importlib.import_module(_EXECUTOR_COST)
    try:
        results = [asdict(cost.measure(args.executor, num_seqs, args.steps)) for num_seqs in args.num_seqs]
    except JaxllmError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    if args.json:
        sys.stdout.write("".join(json.dumps(result) + "\n" for result in results))
        return 0
    sys.stdout.write(
        f"microseconds a step, {cost.NUM_WORKERS} workers\n" + _line("seqs", "uni", args.executor, "added")
    )
    for result in results:
        sys.stdout.write(_line(*(f"{value:.0f}" for value in result.values())))
    return 0


def measure(num_seqs: int, num_steps: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> HostTimes:
    """Returns the medians of num_steps decode steps of num_seqs sequences."""
    loop = HostLoop(num_seqs, clock_ns)
    loop.run_to_decode()
    garbage.settle()  # as the core's process does
    times = [loop.step()[1] for _ in range(num_steps)]
    schedule, prepare, update, output = (statistics.median(column) / 1000 for column in zip(*times, strict=True))
    total = statistics.median(sum(row[:3]) for row in times) / 1000
    return HostTimes(num_seqs=num_seqs, schedule=schedule, prepare=prepare, update=update, output=output, total=total)


_COLUMNS = ("schedule", "prepare", "update", "total", "output")


def _line(*cells: str) -> str:
    return "  ".join(f"{cell:>8}" for cell in cells) + "\n"


def _requests(num_seqs: int) -> list[EngineCoreRequest]:
    draw = random.Random(0)
    return [
        EngineCoreRequest(
            request_id=str(idx),
            prompt_token_ids=draw.choices(range(_VOCAB_SIZE), k=draw.randint(*_PROMPT_LENS)),
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=None),
            eos_token_ids=[],
            arrival_time_s=0.0,
            seed=idx,
            max_tokens=_MAX_MODEL_LEN,
        )
        for idx in range(num_seqs)
    ]


def _make_input_batch(num_seqs: int, max_num_batched_tokens: int) -> InputBatch:
    module_name, class_name = _INPUT_BATCH.split(":")
    input_batch_class = vars(importlib.import_module(module_name))[class_name]
    ladder = token_ladder(max_num_batched_tokens, "cpu")
    batch: InputBatch = input_batch_class(num_seqs, max_num_draws(num_seqs, "cpu"), _MAX_MODEL_LEN, _BLOCK_SIZE, ladder)
    return batch


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench host", "Measure what each step costs on the host, without a model or a device.")
    parser.add_argument(
        "--num-seqs",
        type=positive_int,
        nargs="+",
        default=list(_NUM_SEQS),
        metavar="N",
        help=f"sequences that run at once (default: {' '.join(map(str, _NUM_SEQS))})",
    )
    parser.add_argument(
        "--steps",
        type=_num_steps,
        default=200,
        metavar="N",
        help=f"timed steps for each number, at most {_MAX_STEPS} (default: 200)",
    )
    parser.add_argument(
        "--executor",
        choices=("mp", "ray"),
        help="measure instead what this executor with two workers adds to a step, over one worker in this process",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    return parser


def _num_steps(text: str) -> int:
    value = positive_int(text)
    if value > _MAX_STEPS:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_STEPS}, got {value}")
    return value
