"""`python -m jaxllm.convert SRC DST`: the door to the converter. Parses, calls, prints.

Works on the CPU, whatever devices there are. Exit codes: 0, 2 bad input, 130 Ctrl-C.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxllm.config import DTYPES
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import JaxllmError
from jaxllm.quantization import SCHEMES

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. `argv` defaults to the process's arguments."""
    args = _make_parser().parse(sys.argv[1:] if argv is None else argv)
    _use_cpu(args.mesh)
    from jaxllm.model_loader.converter import convert  # after the choice of devices

    start_s = time.monotonic()
    try:
        manifest = convert(args.source, args.target, args.dtype, args.quantization, args.mesh)
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


def _use_cpu(num_devices: int) -> None:
    """Makes JAX use the CPU, as so many devices. Nothing may have used a device yet, unless there are enough."""
    jax.config.update("jax_platforms", "cpu")
    if num_devices > 1:
        jax.config.update("jax_num_cpu_devices", num_devices)


def _mesh(text: str) -> int:
    match = re.fullmatch(r"tensor=([1-9][0-9]{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be tensor=N, N devices that share each layer, got {text!r:.80}")
    return int(match[1])


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
    parser.add_argument(
        "--quantization",
        choices=tuple(SCHEMES),
        help="store weights as numbers and scales, as --quantization of the engine would make them at each start",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        default=1,
        metavar="tensor=N",
        help="lay the weights out for --tensor-parallel-size N; other sizes can load them too, not as fast "
        "(default: tensor=1)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
