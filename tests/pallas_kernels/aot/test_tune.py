import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.aot import tune
from pallas_kernels.aot.tune import choose, decode_candidates, distinct_shapes, prefill_candidates
from pallas_kernels.aot.workers import RowKey
from pallas_kernels.paged_attention.block_sizes import default_sizes
from pallas_kernels.paged_attention.tpu_config import TileSizes

MIB = 1 << 20


def answer(estimated_us: float, vmem_bytes: int = MIB, spills: int = 0, compute_us: float = 1.0) -> dict[str, Any]:
    figures = {"estimated_us": estimated_us, "vmem_bytes": vmem_bytes, "spills": spills, "scalar_spills": 0}
    figures["compute_us"] = compute_us
    return {"compiled": True, "reason": None, "figures": figures}


def key(*sizes: int) -> RowKey:
    return RowKey("paged_attention", "s", "tpu7x", sizes)


def test_the_fastest_within_half_of_vmem_wins() -> None:
    answers = {
        key(1, 1, 1, 1): answer(10.0),
        key(2, 2, 2, 2): answer(8.0, vmem_bytes=32 * MIB),
        key(3, 3, 3, 3): answer(7.0, vmem_bytes=32 * MIB + 1),
        key(4, 4, 4, 4): {"compiled": False, "reason": "no", "figures": {}},
        key(5, 5, 5, 5)._replace(shape="other"): answer(1.0),
    }
    assert choose(answers, "s", "tpu7x") == TileSizes(2, 2, 2, 2)


def test_spills_lose_against_any_that_has_none() -> None:
    assert choose({key(1, 1, 1, 1): answer(10.0), key(2, 2, 2, 2): answer(8.0, spills=3)}, "s", "tpu7x") == TileSizes(
        1, 1, 1, 1
    )
    assert choose({key(2, 2, 2, 2): answer(8.0, spills=3)}, "s", "tpu7x") == TileSizes(2, 2, 2, 2)


def test_of_those_that_wait_for_memory_the_one_with_least_to_compute_wins() -> None:
    answers = {key(1, 1, 1, 1): answer(8.0, compute_us=5.0), key(2, 2, 2, 2): answer(8.0, compute_us=4.0)}
    assert choose(answers, "s", "tpu7x") == TileSizes(2, 2, 2, 2)


def test_nothing_fitting_is_no_choice() -> None:
    assert choose({key(1, 1, 1, 1): answer(1.0, vmem_bytes=64 * MIB)}, "s", "tpu7x") is None


def test_models_with_the_same_heads_are_tuned_once() -> None:
    names = [shape.name for shape in distinct_shapes("decode-64x2048")]
    assert "Llama-3-8B decode-64x2048" in names and "Llama-3-8B decode-64x2048 int8-kv" in names
    assert "Qwen3-4B decode-64x2048" not in names and "Mixtral-8x7B decode-64x2048" not in names


def test_prefill_keeps_what_decode_chose() -> None:
    start = TileSizes(kv_buffer_bytes=123, decode_tokens=456)
    assert {(sizes.kv_buffer_bytes, sizes.decode_tokens) for sizes in prefill_candidates(start)} == {(123, 456)}
    assert TileSizes() in decode_candidates(TileSizes()) and TileSizes() in prefill_candidates(TileSizes())


def test_the_table_is_written_and_other_entries_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compile_rows(keys: Sequence[RowKey], num_processes: int) -> Iterator[tuple[RowKey, dict[str, Any]]]:
        for row in keys:
            sizes = TileSizes(*row.sizes)
            is_best = (sizes.decode_tokens, sizes.row_block) == (2048, 256 if "prefill" in row.shape else 512)
            yield row, answer(1.0 if is_best else 2.0)

    table = tmp_path / "sizes.json"
    table.write_text('{"v6e": {"old": {"decode_tokens": 1}}}')
    monkeypatch.setattr(tune, "TABLE_PATH", table)
    monkeypatch.setattr(tune, "compile_rows", compile_rows)
    monkeypatch.setattr(tune, "missing_packages", lambda targets: "")
    assert tune.main(["--targets", "v6e"]) == 0
    written = json.loads(table.read_text())["v6e"]
    assert written["old"] == {"decode_tokens": 1}
    chosen = dataclasses.replace(default_sizes("v6e"), decode_tokens=2048, row_block=256, prefill_units=16)
    assert written["bfloat16 H32 K8 D128 P128"] == dataclasses.asdict(chosen)
