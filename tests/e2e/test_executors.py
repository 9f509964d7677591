"""One model's tokens don't depend on who drives its devices: this process, several, Ray's, or somebody's launcher."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sharded_models import run, run_ranks
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), tiny_llama())


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
        return run("tiny", model, 1, 1)


def test_there_is_enough_to_compare(alone: Any) -> None:
    assert min(alone[f"num_{what}"] for what in ("cached_tokens", "swapped_out_blocks", "copied_blocks")) > 0
    assert len({tuple(tokens[0]) for tokens in alone["greedy"]}) > 1


def test_two_processes_of_this_machine(model: Path, alone: Any) -> None:
    assert run("tiny", model, 2, 1, "mp") == alone


def test_two_stages_of_two_processes_each_and_narrow_numbers(model: Path) -> None:
    """They measure the int8 cache's scales together: hidden states go from process to process."""
    narrow = "int8_wo", "int8"
    assert run("tiny", model, 2, 2, "mp", *narrow) == run("tiny", model, 1, 1, "uni", *narrow)


def test_two_ranks_of_a_launcher(model: Path, alone: Any) -> None:
    assert run_ranks(2, "tiny", model, 2, 1) == [alone] * 2


def test_two_ranks_with_two_devices_each(model: Path, alone: Any) -> None:
    assert run_ranks(2, "tiny", model, 2, 2) == [alone] * 2


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
def test_actors_of_ray(model: Path, alone: Any) -> None:
    assert run("tiny", model, 2, 1, "ray") == alone
