"""Damaged converted models load or are refused with one line: no crash, no hang, memory capped, nothing outside opened.

scripts/fuzz_orbax does the same with more of them.
"""

from collections import Counter
from pathlib import Path

from tests.fakes.checkpoint_fuzz import faults, run_cases
from tests.fakes.fuzz_orbax import orbax_cases, write_orbax_seeds

OPENER = "tests.fakes.fuzz_openers:open_model"
COUNT = 100


def test_damaged_converted_models(tmp_path: Path) -> None:
    seeds = write_orbax_seeds(tmp_path / "seeds")
    outcomes = run_cases(OPENER, seeds[0], orbax_cases(tmp_path / "cases", seeds, COUNT))
    assert faults(outcomes) == []
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds["refused"] > COUNT / 2 and kinds["loads"] > COUNT / 50
    # Whatever leads out of the folder is refused, and Orbax's own files play no part.
    for outcome in outcomes:
        if "replaced" in outcome.case.name or "renamed weight" in outcome.case.name.replace("_", " "):
            assert outcome.kind == "refused", outcome
        if "orbax_files" in outcome.case.name:
            assert outcome.kind == "loads", outcome
    assert len({outcome.detail for outcome in outcomes}) > COUNT / 4
