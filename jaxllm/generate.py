"""`python -m jaxllm.generate [PROMPT ...]`: the door to one model's text. Parses, calls, prints.

Text goes to stdout, everything else to stderr. Exit codes: 0, 1 the engine failed, 2 bad input, 130 Ctrl-C.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.offline_runner import OfflineRunner, chat_prompt
from jaxllm.entrypoints.output_format import to_json_line, to_stats_line, to_text
from jaxllm.entrypoints.progress import ProgressBar
from jaxllm.entrypoints.prompt_source import max_num_tokens, read_prompts
from jaxllm.exceptions import ConfigError, EngineDeadError, InvalidRequestError, JaxllmError
from jaxllm.model_loader.generation_config import sampling_defaults
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

MakeEngine = Callable[[EngineArgs], LLMEngine]

_EXIT_BAD_INPUT = 2
_EXIT_ENGINE_FAILED = 1
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141  # as a process that SIGPIPE ended
# --seed seeds the requests themselves.
_NO_FLAGS = ("seed",)
# What a model's own generation config may set where no flag does.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
_DEFAULT_MAX_TOKENS = 128
# What a chat template adds to a prompt, roughly; where it is more, the prompt is computed in two chunks.
_CHAT_TEMPLATE_TOKENS = 64


def main(argv: Sequence[str] | None = None, make_engine: MakeEngine = LLMEngine.from_engine_args) -> int:
    """Runs the command and returns its exit code. `argv` defaults to the process's arguments."""
    args = _make_parser().parse(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        _run(args, make_engine)
        sys.stdout.flush()
    except EngineDeadError as error:
        return _report(error, _EXIT_ENGINE_FAILED)
    except JaxllmError as error:
        return _report(error, _EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our text has gone. The interpreter flushes stdout once more at exit: let it succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return 0


def _run(args: argparse.Namespace, make_engine: MakeEngine) -> None:
    # Whatever can be refused without a model is refused before one is loaded.
    prompts = read_prompts(args.prompts, args.prompts_file)
    _sampling_params(args, {})
    is_streaming = _is_streaming(args, len(prompts))
    if (args.logprobs is not None or args.prompt_logprobs is not None) and not args.json:
        sys.stderr.write("note: log probabilities are shown with --json only\n")
    _fit_batch(args, prompts)
    engine = make_engine(EngineArgs.from_cli_args(args, exclude=_NO_FLAGS))
    try:
        params = _sampling_params(args, sampling_defaults(engine.config.generation_config))
        if args.chat:
            prompts = [_chat_prompt(engine, prompt, args.system) for prompt in prompts]
        runner = OfflineRunner(engine)
        if is_streaming:
            outputs = runner.run(prompts, [params], _StreamPrinter().update, is_streaming=True)
            sys.stdout.write("\n")
            sys.stdout.flush()
        else:
            with ProgressBar(len(prompts), disable=None if len(prompts) > 1 else True) as progress:
                outputs = runner.run(prompts, [params] * len(prompts), progress.update)
            _print_outputs(outputs, args.json)
        if args.stats or is_streaming and sys.stdout.isatty():
            sys.stderr.write(to_stats_line(outputs) + "\n")
    finally:
        engine.shutdown()


def _fit_batch(args: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    """Fills in batch limits that weren't given: no larger than these prompts need, so that less is compiled."""
    if args.max_num_seqs is None:
        args.max_num_seqs = max(min(EngineArgs.max_num_seqs, len(prompts) * args.n), 1)
    if args.max_num_batched_tokens is None:
        most_tokens = sum(map(max_num_tokens, prompts)) + len(prompts) * _CHAT_TEMPLATE_TOKENS
        args.max_num_batched_tokens = min(EngineArgs.max_num_batched_tokens, max(most_tokens, args.max_num_seqs))


class _StreamPrinter:
    """Prints what is new in the one sequence's text, as it comes."""

    def __init__(self) -> None:
        self._num_printed = 0

    def update(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            text = output.outputs[0].text
            sys.stdout.write(text[self._num_printed :])
            sys.stdout.flush()
            self._num_printed = len(text)


def _print_outputs(outputs: list[RequestOutput], is_json: bool) -> None:
    for output in outputs:
        line = to_json_line(output) if is_json else to_text(output, shows_prompt=len(outputs) > 1)
        sys.stdout.write(line + "\n")


def _is_streaming(args: argparse.Namespace, num_prompts: int) -> bool:
    can_stream = num_prompts == 1 and args.n == 1 and not args.json
    if args.stream and not can_stream:
        raise ConfigError("--stream needs one prompt, --n 1 and no --json; leave it out")
    return can_stream and (sys.stdout.isatty() if args.stream is None else args.stream)


def _sampling_params(args: argparse.Namespace, of_model: Mapping[str, Any]) -> SamplingParams:
    """Returns the flags' parameters; what no flag sets is the model's own default, or else this command's."""
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: only a chat template has a place for it")
    given = {name: getattr(args, name) for name in _MODEL_DEFAULTS if getattr(args, name) is not None}
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": _DEFAULT_MAX_TOKENS, **of_model, **given},
        n=args.n,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
    )


def _chat_prompt(engine: LLMEngine, prompt: Prompt, system: str | None) -> Prompt:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str) or isinstance(prompt, dict) and "prompt_token_ids" in prompt:
        raise InvalidRequestError("--chat needs prompts that are text, got token ids", "prompt")
    if not text:
        raise InvalidRequestError("prompt must not be empty", "prompt")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    chat = chat_prompt(engine.tokenizer, messages)
    if isinstance(prompt, dict) and "cache_salt" in prompt:
        chat["cache_salt"] = prompt["cache_salt"]
    return chat


def _report(error: Exception, exit_code: int) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return exit_code


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm generate", "Generate text with a language model.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    add = parser.add_argument_group("input and output").add_argument
    add("--prompts-file", metavar="FILE", help="more prompts, a JSON or text line each; - is stdin")
    add("--chat", action="store_true", help="take each prompt as a user's message")
    add("--system", metavar="TEXT", help="the system message of --chat")
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as it comes; on by default on a terminal",
    )
    add("--json", action="store_true", help="print one JSON object a prompt")
    add("--stats", action="store_true", help="print times and token rates on stderr")
    add = parser.add_argument_group("sampling").add_argument
    own = "the model's own default, or"
    add("--max-tokens", type=int, metavar="N", help=f"most tokens to generate (default: {own} {_DEFAULT_MAX_TOKENS})")
    add("--temperature", type=float, metavar="T", help=f"0 takes the likeliest token (default: {own} 0)")
    add("--top-p", type=float, metavar="P", help=f"keep the likeliest tokens up to this probability (default: {own} 1)")
    add("--top-k", type=int, metavar="K", help=f"keep the K likeliest tokens; 0 keeps all (default: {own} 0)")
    add("--min-p", type=float, metavar="P", help=f"least probability, as a share of the likeliest's (default: {own} 0)")
    add("--seed", type=int, metavar="N", help="makes the draws repeatable")
    add("--n", type=int, default=1, metavar="N", help="sequences a prompt (default: 1)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--logprobs", type=int, metavar="K", help="report the K likeliest tokens at each generated position")
    add("--prompt-logprobs", type=int, metavar="K", help="the same at each prompt position")
    EngineArgs.add_cli_args(parser, exclude=_NO_FLAGS)
    parser.set_defaults(max_num_seqs=None, max_num_batched_tokens=None)  # see _fit_batch
    return parser


if __name__ == "__main__":
    sys.exit(main())
