"""`bench quality`: what --quantization and --kv-cache-dtype cost in exactness, and save in memory.

Predicts a text of English with the model as the engine would hold it, and in float32. Knows how the text is cut; what
runs it, and is loaded only here, is jaxllm/worker/quality.py.
"""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.bench.english import english_text
from jaxllm.engine.front_end import load_front_end
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import ConfigError, JaxllmError
from jaxllm.tokenizer.tokenizer import Tokenizer

_DEFAULT_NUM_TOKENS = 4000
_TEXT_LEN = 2000  # long enough for what only long texts show
_MEASURE = ("jaxllm.worker.quality", "measure_quality")


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    try:
        quality = _run(args)
    except (JaxllmError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write((_to_json(quality, args) if args.json else to_text(quality)) + "\n")
    return 0


def cut(tokenizer: Tokenizer, text: str, num_tokens: int, text_len: int) -> tuple[list[list[int]], int]:
    """Cuts a text into pieces of text_len tokens, each after what the tokenizer begins texts with.

    Returns:
      The pieces, and how many tokens at the beginning of each are given: the first can't be predicted.

    Raises:
      ConfigError: The text is too short.
    """
    beginning = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < num_tokens:
        raise ConfigError(f"the text must have {num_tokens} tokens, got {len(ids)}; set --num-tokens or --text-file")
    text_len = min(text_len, num_tokens)
    starts = range(0, num_tokens - text_len + 1, text_len)
    return [beginning + ids[start : start + text_len] for start in starts], max(len(beginning), 1)


def _run(args: argparse.Namespace) -> Any:
    config, tokenizer, _ = load_front_end(EngineArgs.from_cli_args(args))
    text = Path(args.text_file).read_text(encoding="utf-8") if args.text_file else english_text()
    texts, num_given = cut(tokenizer, text, args.num_tokens, min(_TEXT_LEN, config.scheduler.max_model_len - 1))
    module, function = _MEASURE
    return vars(importlib.import_module(module))[function](config, texts, num_given)


def to_text(quality: Any) -> str:
    """Returns the lines for one Quality."""
    change = quality.perplexity / quality.reference_perplexity - 1
    return "\n".join(
        (
            f"{quality.num_tokens} tokens predicted",
            f"mean KL divergence from float32: {quality.mean_kl:.5f} nats",
            f"perplexity: {quality.perplexity:.4f}, in float32 {quality.reference_perplexity:.4f} ({change:+.2%})",
            f"weights: {quality.weight_bytes} bytes, in bfloat16 {quality.bfloat16_bytes} "
            f"({quality.weight_bytes / quality.bfloat16_bytes:.1%} of it), in float32 {quality.float32_bytes}",
        )
    )


def _to_json(quality: Any, args: argparse.Namespace) -> str:
    chosen = {"model": args.model, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    return json.dumps({**chosen, **dataclasses.asdict(quality)})


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench quality", "Measure what quantization costs in exactness and saves in memory.")
    add = parser.add_argument_group("text").add_argument
    add(
        "--num-tokens",
        type=_num_tokens,
        default=_DEFAULT_NUM_TOKENS,
        metavar="N",
        help=f"tokens of text to predict (default: {_DEFAULT_NUM_TOKENS})",
    )
    add("--text-file", metavar="FILE", help="a text of your own (default: prose of Python's language reference)")
    add("--json", action="store_true", help="print the result as one JSON object")
    EngineArgs.add_cli_args(parser)
    return parser


def _num_tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 2, got {text!r}")
    return int(text)
