"""`bench attention`: what attention costs beside the products with weights, in one decode step on this machine.

What measures, and is imported only here, is jaxllm/worker/attention_cost.py.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxllm.engine.front_end import load_front_end
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser, positive_int
from jaxllm.exceptions import JaxllmError

_MEASURE = ("jaxllm.worker.attention_cost", "measure_attention")
_COLUMNS = ("KV cache", "attention", "products", "share")


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    try:
        config, _, _ = load_front_end(EngineArgs.from_cli_args(args))
        module, function = _MEASURE
        costs = vars(importlib.import_module(module))[function](config, args.num_seqs, args.context_len)
    except JaxllmError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    lines = [json.dumps(dataclasses.asdict(cost)) for cost in costs] if args.json else to_lines(costs)
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def to_lines(costs: Sequence[Any]) -> list[str]:
    """Returns a table of AttentionCosts, a line each."""
    rows = [
        (cost.cache_dtype, f"{cost.attention_us:.0f}", f"{cost.products_us:.0f}", f"{cost.share:.1%}") for cost in costs
    ]
    return [
        "microseconds a decode step; products with float32 weights",
        *("  ".join(f"{cell:>9}" for cell in row) for row in (_COLUMNS, *rows)),
    ]


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench attention", "Measure attention beside products with weights, in one decode step.")
    add = parser.add_argument_group("step").add_argument
    add("--num-seqs", type=positive_int, default=64, metavar="N", help="sequences that decode (default: 64)")
    add("--context-len", type=positive_int, default=160, metavar="N", help="tokens of each (default: 160)")
    add("--json", action="store_true", help="print one JSON object for each dtype of the KV cache")
    EngineArgs.add_cli_args(parser)
    return parser
