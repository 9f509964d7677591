"""`python -m jaxllm.bench COMMAND`. Knows the commands' names, not what they do."""

import sys
from collections.abc import Sequence

from jaxllm.bench import attention, host, load, quality, serve, throughput

_COMMANDS = {
    "attention": attention.main,
    "host": host.main,
    "load": load.main,
    "quality": quality.main,
    "serve": serve.main,
    "throughput": throughput.main,
}
_USAGE = f"usage: jaxllm bench COMMAND ...; commands: {', '.join(_COMMANDS)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and returns its exit code. `argv` defaults to the process's arguments."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if not args or args[0] not in _COMMANDS:
        sys.stderr.write(_USAGE)
        return 2
    return _COMMANDS[args[0]](args[1:])


if __name__ == "__main__":
    sys.exit(main())
