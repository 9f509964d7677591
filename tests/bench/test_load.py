"""bench load: what it measures and prints."""

import json
from pathlib import Path

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.load import to_text
from jaxllm.worker.load_time import LoadTime
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder


def test_the_lines() -> None:
    assert to_text(LoadTime(seconds=2.0, cpu_seconds=1.5, num_bytes=500_000_000, peak_bytes=600_000_000)) == (
        "0.500 GB of weights in 2.00 s (1.50 s of processor time), 0.25 GB/s\n"
        "peak memory 0.600 GB beyond the start: the weights and 100 MB, 1.20 times the weights"
    )
    assert to_text(LoadTime(seconds=1.0, cpu_seconds=1.0, num_bytes=10**9, peak_bytes=None)).count("\n") == 0


def test_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    assert main(["load", "--model", str(folder), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    # 300 x 64 of embedding, two layers of 64 x (64 + 2 x 32 + 64 + 3 x 96), norms of 64: float32.
    assert measured["num_bytes"] == 4 * (300 * 64 + 2 * 64 * (64 + 2 * 32 + 64 + 3 * 96) + 5 * 64)
    assert measured["seconds"] > 0 and measured["cpu_seconds"] > 0 and measured["peak_bytes"] >= 0


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--model", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: no model '/nowhere'")
