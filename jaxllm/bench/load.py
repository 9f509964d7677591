"""`bench load`: how long a model takes to load, and how much memory meanwhile.

Everything but the weights has been read before the clock starts: that is the front end's work. What loads, and is
imported only here, is jaxllm/worker/load_time.py.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxllm.engine.front_end import load_front_end
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import JaxllmError

_MEASURE = ("jaxllm.worker.load_time", "measure_load")


def main(argv: Sequence[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    args = _make_parser().parse(argv)
    try:
        config, _, _ = load_front_end(EngineArgs.from_cli_args(args))
        module, function = _MEASURE
        measured = vars(importlib.import_module(module))[function](config)
    except JaxllmError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write((json.dumps(dataclasses.asdict(measured)) if args.json else to_text(measured)) + "\n")
    return 0


def to_text(measured: Any) -> str:
    """Returns the lines for one LoadTime."""
    num_gb = measured.num_bytes / 1e9
    lines = [
        f"{num_gb:.3f} GB of weights in {measured.seconds:.2f} s ({measured.cpu_seconds:.2f} s of processor time), "
        f"{num_gb / measured.seconds:.2f} GB/s"
    ]
    if measured.peak_bytes is not None:
        extra_mb = (measured.peak_bytes - measured.num_bytes) / 1e6
        lines.append(
            f"peak memory {measured.peak_bytes / 1e9:.3f} GB beyond the start: the weights and {extra_mb:.0f} MB, "
            f"{measured.peak_bytes / measured.num_bytes:.2f} times the weights"
        )
    return "\n".join(lines)


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm bench load", "Measure how long a model takes to load, and the memory meanwhile.")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    EngineArgs.add_cli_args(parser)
    return parser
