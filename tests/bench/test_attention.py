"""bench attention: what it measures and prints."""

import json
from pathlib import Path

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.attention import to_lines
from jaxllm.worker.attention_cost import AttentionCost
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder


def test_the_lines() -> None:
    assert to_lines([AttentionCost("int8", 300.4, 1000.0, 0.3004)]) == [
        "microseconds a decode step; products with float32 weights",
        " KV cache  attention   products      share",
        "     int8        300       1000      30.0%",
    ]


def test_a_models_step_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    assert main(["attention", "--model", str(folder), "--num-seqs", "3", "--context-len", "20", "--json"]) == 0
    costs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cost["cache_dtype"] for cost in costs] == ["float32", "bfloat16", "int8"]
    assert all(cost["share"] == cost["attention_us"] / cost["products_us"] > 0 for cost in costs)


def test_bad_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["attention", "--num-seqs", "0"])
    assert "must be an integer of at least 1, got '0'" in capsys.readouterr().err
