"""`python -m jaxllm.convert SRC DST`: the door to the converter. Parses, calls, prints.

Works on the CPU, whatever devices there are. Exit codes: 0, 2 bad input, 130 Ctrl-C.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxllm.config import DTYPES
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import JaxllmError

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. `argv` defaults to the process's arguments."""
    args = _make_parser().parse(sys.argv[1:] if argv is None else argv)
    jax.config.update("jax_platforms", "cpu")
    from jaxllm.model_loader.converter import convert  # after the choice of platform

    start_s = time.monotonic()
    try:
        manifest = convert(args.source, args.target, args.dtype)
    except JaxllmError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    sys.stdout.write(
        f"{args.target}: {len(manifest.weights)} weights, {manifest.num_bytes / 1e9:.2f} GB, "
        f"in {time.monotonic() - start_s:.1f} s; load it with --model {args.target}\n"
    )
    return 0


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm convert", "Write a model as a folder that loads faster, in Orbax's format.")
    parser.add_argument("source", metavar="SRC", help="the model, as for --model elsewhere")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to write, which must not exist yet")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of the stored weights; auto keeps the source's, float32 where that is quantised (default: auto)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
