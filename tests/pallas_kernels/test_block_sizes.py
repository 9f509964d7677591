import json
import re
from pathlib import Path

import pytest

from pallas_kernels.paged_attention import block_sizes
from pallas_kernels.paged_attention.block_sizes import AttentionKey, check_block_tables, find_tile_sizes
from pallas_kernels.paged_attention.tpu_config import TileSizes

KEY = AttentionKey(kv_dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, block_size=128)


def test_block_tables_fit_up_to_half_of_the_scalar_memory() -> None:
    # 131,072 entries of four bytes: 256 sequences of 512 blocks of 128 tokens.
    check_block_tables(num_seqs=256, max_model_len=65_536, block_size=128)
    with pytest.raises(ValueError) as raised:
        check_block_tables(num_seqs=256, max_model_len=65_537, block_size=128)
    assert str(raised.value) == (
        "the block tables of 256 sequences of 513 blocks must fit into 512 KiB of a TPU's scalar memory, got 513 KiB; "
        "set --block-size to at least 256 or --max-num-seqs to at most 255 or --max-model-len to at most 65536"
    )


@pytest.mark.parametrize(("num_seqs", "max_model_len", "block_size"), [(100, 40_000, 16), (256, 131_072, 32)])
def test_each_advice_is_enough(num_seqs: int, max_model_len: int, block_size: int) -> None:
    with pytest.raises(ValueError) as raised:
        check_block_tables(num_seqs, max_model_len, block_size)
    advice = dict(re.findall(r"--([a-z-]+) to at (?:most|least) (\d+)", str(raised.value)))
    size, seqs, length = (int(advice[flag]) for flag in ("block-size", "max-num-seqs", "max-model-len"))
    check_block_tables(num_seqs, max_model_len, size)
    check_block_tables(seqs, max_model_len, block_size)
    check_block_tables(num_seqs, length, block_size)


def test_no_block_size_is_advised_that_is_not_allowed() -> None:
    with pytest.raises(ValueError) as raised:
        check_block_tables(num_seqs=1024, max_model_len=131_072, block_size=16)
    assert "--block-size" not in str(raised.value)


def test_tuned_sizes_are_found_by_chip_and_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "sizes.json"
    table.write_text(json.dumps({"v6e": {"bfloat16 H32 K8 D128 P128": {"decode_tokens": 256, "prefill_rows": 1024}}}))
    monkeypatch.setattr(block_sizes, "TABLE_PATH", table)
    block_sizes._read_table.cache_clear()
    try:
        of_chip = {"row_block": 512, "prefill_units": 8, "sums_by_products": 1}
        assert find_tile_sizes("v6e", KEY) == TileSizes(decode_tokens=256, prefill_rows=1024, **of_chip)
        assert find_tile_sizes("v5e", KEY) == TileSizes()
        assert find_tile_sizes(None, KEY) == TileSizes()
        assert find_tile_sizes("v6e", KEY._replace(block_size=64)) == TileSizes(**of_chip)
    finally:
        block_sizes._read_table.cache_clear()


def test_the_committed_sizes_are_of_known_chips_and_fields() -> None:
    table = json.loads(block_sizes.TABLE_PATH.read_text())
    assert set(table) <= {"v5e", "v5p", "v6e", "tpu7x"}
    for entries in table.values():
        for sizes in entries.values():
            TileSizes(**sizes)
