"""`python -m jaxllm COMMAND`, also the `jaxllm` console script. Knows only the commands' names."""

import difflib
import importlib
import sys
from collections.abc import Sequence

import jaxllm

# Command -> the module whose main(argv) runs it. Imported late: a command pays for itself alone.
_COMMANDS = {
    "generate": "jaxllm.generate",
    "serve": "jaxllm.serve",
    "bench": "jaxllm.bench.__main__",
    "convert": "jaxllm.convert",
    "plan": "jaxllm.plan",
    "models": "jaxllm.entrypoints.model_list",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `argv` defaults to the process's arguments."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: jaxllm COMMAND ...\ncommands: {', '.join(_COMMANDS)}\n")
        return 0 if args else 2
    if args[0] == "--version":
        sys.stdout.write(f"jaxllm {jaxllm.__version__}\n")
        return 0
    if args[0] not in _COMMANDS:
        close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; commands: {', '.join(_COMMANDS)}"
        sys.stderr.write(f"error: unknown command {args[0]}{hint}\n")
        return 2
    code: int = importlib.import_module(_COMMANDS[args[0]]).main(args[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
