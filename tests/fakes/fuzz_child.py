"""The process in which damaged checkpoints are opened: `python -m tests.fakes.fuzz_child OPENER SEED BYTES CPU_S`.

It opens SEED, which is whole, so that every import is done; then it limits its own memory to what it has and BYTES
more, and its processor time to CPU_S a case. Each line of stdin names a case, {"path": ..., "root": ...}; each line of
stdout says what became of it, {"kind": ..., "detail": ...}. checkpoint_fuzz.py is the other end.
"""

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.exceptions import JaxllmError

# Code may be imported late; a model's data comes from nowhere but its own folder.
_CODE = tuple(os.path.realpath(folder) + os.sep for folder in (sys.prefix, sys.base_prefix, Path(__file__).parents[2]))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class _OpenFiles:
    """Notes every file that is opened outside `root`, or for writing."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.foreign: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or self.root is None or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path = os.path.realpath(os.fsdecode(args[0]))
        is_ours = path == self.root or path.startswith(self.root + os.sep)
        if args[2] & _WRITES or not is_ours and not path.startswith(_CODE):
            self.foreign.append(path)


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    opener = vars(importlib.import_module(module))[name]
    opener(Path(sys.argv[2]))
    limit = _virtual_bytes() + int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    opened = _OpenFiles()
    sys.addaudithook(opened)
    _say("ready", "")
    for line in sys.stdin:
        case = json.loads(line)
        opened.root, opened.foreign = os.path.realpath(case["root"]), []
        # SIGPROF's default ends the process, wherever it is caught, and a frozen machine doesn't count.
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[4]))
        kind, detail = _open(opener, Path(case["path"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        opened.root = None
        if opened.foreign:
            kind, detail = "outside", f"opened {opened.foreign[0]}; {detail}"
        _say(kind, detail)


def _open(opener: Callable[[Path], str], path: Path) -> tuple[str, str]:
    try:
        return "loads", opener(path)
    except JaxllmError as error:
        message = f"{type(error).__name__}: {error}"
        return "refused" if message.isprintable() and len(message) < 2000 else "message", message
    except BaseException as error:  # panics of Rust libraries are no Exception
        lines = traceback.format_exception(error, limit=-4)
        return "exception", "".join(lines)[-3000:]


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _say(kind: str, detail: str) -> None:
    sys.stdout.write(json.dumps({"kind": kind, "detail": detail}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
