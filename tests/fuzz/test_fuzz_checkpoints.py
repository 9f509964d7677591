"""Damaged checkpoints load or are refused with one line: no crash, no hang, memory capped, nothing outside opened.

scripts/fuzz_checkpoints does the same with more of them.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.checkpoint_fuzz import Case, Outcome, faults, run_cases
from tests.fakes.fuzz_seeds import (
    family_cases,
    folder_cases,
    gguf_cases,
    write_family_seeds,
    write_folder_seeds,
    write_gguf_seeds,
)

OPENER = "tests.fakes.fuzz_openers:open_model"
COUNT = 300


def test_damaged_gguf_files(tmp_path: Path) -> None:
    seeds = write_gguf_seeds(tmp_path / "seeds")
    outcomes = run_cases(OPENER, seeds[0], gguf_cases(tmp_path / "cases", seeds, COUNT))
    _check(outcomes)


def test_damaged_folders(tmp_path: Path) -> None:
    seeds = write_folder_seeds(tmp_path / "seeds")
    outcomes = run_cases(OPENER, seeds[0], folder_cases(tmp_path / "cases", seeds, COUNT))
    _check(outcomes)
    leading_out = [
        outcome for outcome in outcomes if "a link out" in outcome.case.name or "names '" in outcome.case.name
    ]
    assert len(leading_out) > 20 and {outcome.kind for outcome in leading_out} == {"refused"}


def test_damaged_configs_of_every_family(tmp_path: Path) -> None:
    seeds = write_family_seeds(tmp_path / "seeds")
    outcomes = run_cases(OPENER, seeds[0], family_cases(tmp_path / "cases", seeds, 6 * len(seeds)))
    assert faults(outcomes) == []


def test_the_seeds_are_whole(tmp_path: Path) -> None:
    seeds = [*write_gguf_seeds(tmp_path / "files"), *write_folder_seeds(tmp_path / "folders")]
    seeds += write_family_seeds(tmp_path / "families")
    outcomes = run_cases(OPENER, seeds[0], [Case(seed.name, seed, seed) for seed in seeds])
    assert [(outcome.case.name, outcome.kind) for outcome in outcomes] == [(seed.name, "loads") for seed in seeds]


def _check(outcomes: Sequence[Outcome]) -> None:
    assert faults(outcomes) == []
    kinds = Counter(outcome.kind for outcome in outcomes)
    # Damage is neither so heavy that nothing is read past the first byte, nor so light that nothing is found.
    assert kinds["refused"] > len(outcomes) / 3 and kinds["loads"] > len(outcomes) / 50
    assert len({outcome.detail for outcome in outcomes}) > len(outcomes) / 6
