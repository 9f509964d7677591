"""The worker that answers here is a stand-in: no compiler is started."""

import sys
from pathlib import Path

import pytest

from pallas_kernels.aot import workers
from pallas_kernels.aot.workers import RowKey, compile_rows

WORKER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["shape"] == "crash":
        print("noise", file=sys.stderr)
        print("Check failed: x", file=sys.stderr)
        sys.exit(3)
    print(json.dumps({"compiled": True, "reason": None, "figures": {"asked": request, "target": TARGET}}), flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(target: str, dumps: Path) -> list[str]:
        script = tmp_path / f"{target}.py"
        script.write_text(f"TARGET = {target!r}\n{WORKER}")
        return [sys.executable, str(script)]

    monkeypatch.setattr(workers, "_command", command)


@pytest.mark.usefixtures("stand_in")
def test_rows_go_to_their_targets_worker() -> None:
    keys = [RowKey("k", "a", "v6e"), RowKey("k", "a", "sm_90"), RowKey("k", "b", "v6e")]
    answers = dict(compile_rows(keys, 2))
    assert {key: answers[key]["figures"]["target"] for key in keys} == {key: key.target for key in keys}
    assert answers[keys[2]]["figures"]["asked"] == {"kernel": "k", "shape": "b", "target": "v6e", "sizes": []}


@pytest.mark.usefixtures("stand_in")
def test_a_compiler_that_dies_costs_one_row() -> None:
    keys = [RowKey("k", shape, "v6e") for shape in ("a", "crash", "b")]
    answers = dict(compile_rows(keys, 1))
    assert [answers[key]["compiled"] for key in keys] == [True, False, True]
    assert answers[keys[1]]["reason"] == "the compiler ended with status 3: Check failed: x"
