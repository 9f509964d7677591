"""The harness sees every kind of fault, and goes on after it."""

from pathlib import Path

from tests.fakes.checkpoint_fuzz import Case, faults, run_cases

KINDS = {
    "fine": "loads",
    "refused": "refused",
    "lines": "message",
    "exception": "exception",
    "memory": "exception",
    "outside": "outside",
    "write": "outside",
    "crash": "crash",
    "hang": "hang",
    "fine again": "loads",
}


def test_each_kind_of_fault_is_seen(tmp_path: Path) -> None:
    cases = []
    for word in KINDS:
        path = tmp_path / word
        path.write_text(word)
        cases.append(Case(word, path, path))
    outcomes = run_cases("tests.fakes.fuzz_openers:misbehave", tmp_path / "fine", cases, cpu_s=0.5)
    assert {outcome.case.name: outcome.kind for outcome in outcomes} == KINDS
    assert len(faults(outcomes)) == 7
    assert "SIGSEGV" in faults(outcomes)[5] and "MemoryError" in faults(outcomes)[2]
