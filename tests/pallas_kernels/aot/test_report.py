import json

from pallas_kernels.aot.report import Row, format_table, summarize, to_json
from pallas_kernels.aot.workers import RowKey

FIGURES = {
    "seconds": 3.25,
    "vmem_bytes": 3 << 20,
    "spills": 0,
    "inner_bundles": 700,
    "inner_cycles": 900,
    "bundles_per_kv_token": 1.367,
    "mxu_busy": 0.5,
    "vpu_busy": 0.25,
    "moved_bytes": 5e8,
    "estimated_us": 330.0,
    "roofline_share": 0.99,
    "reachable_share": 0.995,
}
OURS = Row(RowKey("paged_attention", "Llama-3-8B decode", "v6e"), True, None, FIGURES)
IN_TREE = Row(
    RowKey("in-tree ragged_paged_attention", "Llama-3-8B decode", "v6e"),
    True,
    None,
    {**FIGURES, "estimated_us": 428.5, "roofline_share": 0.766},
)
GPU_FIGURES = {
    "seconds": 1.0,
    "shared_bytes": 33 * 1024,
    "registers": 128,
    "spills": 0,
    "inner_instructions": 512,
    "moved_bytes": 5e8,
    "estimated_us": 160.0,
    "roofline_share": 1.0,
}
REFUSED = Row(RowKey("paged_attention", "Llama-3-8B decode", "v5e"), False, "ValueError: no", {"seconds": 0.1})


def test_a_json_row_has_what_the_table_is_made_of() -> None:
    assert json.loads(to_json(REFUSED)) == {
        "kernel": "paged_attention",
        "shape": "Llama-3-8B decode",
        "target": "v5e",
        "compiled": False,
        "reason": "ValueError: no",
        "figures": {"seconds": 0.1},
    }


def test_a_row_stands_beside_the_in_tree_kernels_figures() -> None:
    cells = format_table([OURS, IN_TREE]).splitlines()[2].split()
    assert cells[:4] == "paged_attention Llama-3-8B decode v6e".split()
    assert cells[4:] == "3.2 3.0 MiB - 0 700 900 1.37 50% 25% 500.0 330.0 99% 100% 428.5 77%".split()


def test_another_kernel_of_the_same_shape_does_not() -> None:
    update = OURS._replace(key=OURS.key._replace(kernel="kv_cache_update"))
    assert format_table([update, IN_TREE]).splitlines()[2].split()[-2:] == ["-", "-"]


def test_a_gpu_row_has_registers_and_shared_memory() -> None:
    row = Row(RowKey("paged_attention", "Llama-3-8B decode", "sm_90"), True, None, GPU_FIGURES)
    cells = format_table([row]).splitlines()[2].split()
    assert cells[4:] == "1.0 33.0 KiB 128 0 512 - - - - 500.0 160.0 100% - - -".split()


def test_a_row_that_does_not_compile_shows_its_reason() -> None:
    table = format_table([OURS, REFUSED])
    assert "v5e      0.1  not compiled: ValueError: no" in table
    assert summarize([OURS, REFUSED]) == "1 of 2 rows compiled"
