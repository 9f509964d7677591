import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pallas_kernels.aot import __main__ as aot
from pallas_kernels.aot.registry import BASELINE, KERNELS
from pallas_kernels.aot.report import Row
from pallas_kernels.aot.targets import TARGETS
from pallas_kernels.aot.workers import RowKey

_FIGURES = {"seconds": 1.0, "vmem_bytes": 1, "moved_bytes": 1, "estimated_us": 1.0, "roofline_share": 0.9}
_FIGURES |= {"spills": 0, "scalar_spills": 0, "bundles_per_kv_token": 1.0}


def answer_all(refused: set[str], share: float = 0.9) -> Any:
    def compile_rows(keys: Sequence[RowKey], num_processes: int) -> Iterator[tuple[RowKey, dict[str, Any]]]:
        for key in reversed(keys):
            is_compiled = key.kernel not in refused
            figures = {**_FIGURES, "roofline_share": share}
            yield key, {"compiled": is_compiled, "reason": None if is_compiled else "E: no", "figures": figures}

    return compile_rows


@pytest.fixture
def has_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "missing_packages", lambda targets: "")


@pytest.mark.usefixtures("has_compilers")
def test_a_refused_row_that_must_compile_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "compile_rows", answer_all({"paged_attention"}))
    assert aot.main(["--targets", "v6e", "--fast", "--json"]) == 1
    output, errors = capsys.readouterr()
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == len(aot.select_rows(["v6e"], is_fast=True))
    assert "must compile but doesn't: paged_attention / Llama-3-8B decode-64x2048 / v6e: E: no" in errors


@pytest.mark.usefixtures("has_compilers")
def test_the_in_tree_kernel_may_refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot, "compile_rows", answer_all({BASELINE}))
    assert aot.main(["--targets", "v6e", "--fast"]) == 0
    output, _ = capsys.readouterr()
    assert "not compiled: E: no" in output


@pytest.mark.usefixtures("has_compilers")
def test_a_row_below_its_limit_is_another_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "compile_rows", answer_all(set(), share=0.8))
    assert aot.main(["--targets", "v6e", "--fast"]) == 3
    assert "misses a limit: paged_attention / Llama-3-8B decode-64x2048 / v6e: 80.0% of" in capsys.readouterr().err


@pytest.mark.usefixtures("has_compilers")
def test_kept_rows_of_the_in_tree_kernel_are_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is kept stands in the table, also in the fast one, and ours is compared with it."""
    kept = Row(RowKey(BASELINE, "Llama-3-8B prefill-2048", "v6e"), True, None, {**_FIGURES, "estimated_us": 0.5})
    other = kept._replace(key=kept.key._replace(target="v5e"))
    monkeypatch.setattr(aot, "read_rows", lambda: {(row.key.shape, row.key.target): row for row in (kept, other)})
    compiled: list[RowKey] = []

    def compile_rows(keys: Sequence[RowKey], num_processes: int) -> Iterator[tuple[RowKey, dict[str, Any]]]:
        compiled.extend(keys)
        yield from answer_all(set())(keys, num_processes)

    monkeypatch.setattr(aot, "compile_rows", compile_rows)
    assert aot.main(["--targets", "v6e", "--fast", "--json"]) == 3
    output, errors = capsys.readouterr()
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["shape"] for row in rows if row["kernel"] == BASELINE and row["figures"]["estimated_us"] == 0.5] == [
        "Llama-3-8B prefill-2048"
    ]
    assert kept.key not in compiled and len(rows) == len(compiled) + 1
    assert "Llama-3-8B prefill-2048 / v6e: 1.0 us, the in-tree kernel takes 0.5" in errors


def test_every_kernel_is_in_the_table_for_each_of_its_targets() -> None:
    rows = aot.select_rows(list(TARGETS), is_fast=False)
    assert {(row.kernel, row.target) for row in rows} == {
        (kernel.name, target) for kernel in KERNELS.values() for target in kernel.targets
    }
    assert len(set(rows)) == len(rows)


def test_models_with_the_same_heads_are_compiled_once() -> None:
    rows = [
        RowKey("paged_attention", f"{model} decode-64x2048", target)
        for model in ("Llama-3-8B", "Qwen3-32B", "Qwen3-4B", "Mixtral-8x7B")
        for target in ("v5e", "v6e")
    ]
    groups = aot.group_rows(rows)
    assert list(groups) == rows[:4]
    assert groups[rows[0]] == [rows[0], rows[4], rows[6]]
    assert groups[rows[2]] == [rows[2]]


def test_fast_rows_are_rows_of_the_table() -> None:
    assert set(aot.select_rows(list(TARGETS), is_fast=True)) < set(aot.select_rows(list(TARGETS), is_fast=False))


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        aot.main(["--targets", "v6e,v9"])
    assert stopped.value.code == 2
    assert "must be some of v5e, v5p, v6e, tpu7x, sm_80, sm_90, sm_100, got 'v9'" in capsys.readouterr().err


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert aot.main(["--targets", "v6e,sm_90"]) == 2
    assert capsys.readouterr().err == "compiling for v6e, sm_90 needs libtpu and triton: pip install 'jaxllm[aot]'\n"
