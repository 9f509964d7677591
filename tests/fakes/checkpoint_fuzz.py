"""Runs damaged checkpoints through a child with limits and says what each did: the harness of everything in tests/fuzz.

A test makes cases in a temporary folder, each with a path to open and the folder that nothing may be opened outside of:

    outcomes = run_cases("tests.fakes.fuzz_openers:open_model", seed_path, cases)
    assert not faults(outcomes)

The opener is "module:function"; the function takes a Path, loads everything there is, and returns a word about it or
raises JaxllmError. Allowed outcomes are "loads" and "refused" (one printable line). All else is a fault: "message" (an
error text of several lines), "exception" (another exception, MemoryError among them), "outside" (a file outside
the folder was opened, or any for writing), "crash" and "hang".
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[2]
_WALL_S = 300.0  # for a process that sleeps; frozen ones must not count as hanging


class Case(NamedTuple):
    name: str  # what was done to the model
    path: Path  # what is opened
    root: Path  # nothing outside it may be opened; a file stands for itself


class Outcome(NamedTuple):
    case: Case
    kind: str
    detail: str


def run_cases(
    opener: str, seed: Path, cases: Iterable[Case], memory_bytes: int = 1 << 30, cpu_s: float = 20.0
) -> list[Outcome]:
    """Opens each case and returns what became of it. A child that dies is replaced.

    Args:
      opener: "module:function", imported by the child.
      seed: A whole model, which the opener must be able to open.
      cases: What to open. Made one by one, so that a generator may build each case just before it is opened.
      memory_bytes: What a case may take beyond what the child holds after opening the seed.
      cpu_s: Processor time that a case may take.
    """
    outcomes = []
    child: _Child | None = None
    try:
        for case in cases:
            if child is None:
                child = _Child([opener, str(seed), str(memory_bytes), str(cpu_s)])
            kind, detail = child.open(case)
            outcomes.append(Outcome(case, kind, detail))
            if kind in ("crash", "hang"):
                child = child.close()
    finally:
        if child is not None:
            child.close()
    return outcomes


def faults(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns one text for each outcome that isn't allowed."""
    return [f"{o.case.name}: {o.kind}: {o.detail}" for o in outcomes if o.kind not in ("loads", "refused")]


class _Child:
    def __init__(self, arguments: list[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.fuzz_child", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        kind, detail = self._answer()
        if kind != "ready":
            self.close()
            raise AssertionError(f"the opener could not open the seed: {kind}: {detail}")

    def open(self, case: Case) -> tuple[str, str]:
        request = json.dumps({"path": str(case.path), "root": str(case.root)}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(request.encode())
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> tuple[str, str]:
        line = b""
        assert self._process.stdout is not None
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], _WALL_S)[0]:
                return "hang", f"no answer for {_WALL_S:.0f} s"
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return self._death()
            line += part
        answer = json.loads(line)
        return answer["kind"], answer["detail"]

    def _death(self) -> tuple[str, str]:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-1500:].decode("utf-8", "replace")
        if code == -signal.SIGPROF:
            return "hang", "its processor time ran out"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "crash", f"{name}: {said}"
