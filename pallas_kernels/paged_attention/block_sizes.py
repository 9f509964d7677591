"""Sizes that the TPU attention kernels are compiled with, and the check that a configuration's block tables fit.

The sizes come from `scripts/tune_block_sizes`, which compiles candidates for each chip without a TPU, estimates their
time and writes block_sizes.json. Knows no arrays and no kernel.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.paged_attention.tpu_config import TileSizes

TABLE_PATH = Path(__file__).with_name("block_sizes.json")
SMEM_BYTES = 1 << 20  # of a TensorCore, v4 and newer
_ENTRY_BYTES = 4
_LARGER_BLOCKS = (32, 64, 128, 256)
# What isn't tuned is from here, or TileSizes' own defaults. These two have matrix units 256 wide.
_CHIP_SIZES = {chip: TileSizes(row_block=512, prefill_units=8, sums_by_products=1) for chip in ("v6e", "tpu7x")}


class AttentionKey(NamedTuple):
    """What sizes depend on, beside the chip."""

    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __str__(self) -> str:
        """The key as block_sizes.json has it: bfloat16 H32 K8 D128 P128."""
        return f"{self.kv_dtype} H{self.num_heads} K{self.num_kv_heads} D{self.head_dim} P{self.block_size}"


def find_tile_sizes(chip: str | None, key: AttentionKey) -> TileSizes:
    """Returns the tuned sizes of an attention on a chip.

    Args:
      chip: v5e, v5p, v6e or tpu7x; None where there is no TPU.
      key: The attention.

    Returns:
      The chip's defaults if that was never tuned.
    """
    return dataclasses.replace(default_sizes(chip), **_read_table().get(chip or "", {}).get(str(key), {}))


def default_sizes(chip: str | None) -> TileSizes:
    """Returns the sizes for what isn't tuned."""
    return _CHIP_SIZES.get(chip or "", TileSizes())


def check_block_tables(num_seqs: int, max_model_len: int, block_size: int) -> None:
    """Checks that a TPU's scalar memory holds the block tables of a step. The kernels read them there.

    Half of it is theirs; the rest is for the lists of work and the compiler.

    Raises:
      ValueError: They don't fit. Says what would.
    """
    capacity = SMEM_BYTES // 2 // _ENTRY_BYTES
    blocks_per_seq = -(-max_model_len // block_size)
    if num_seqs * blocks_per_seq <= capacity:
        return
    ways = [
        f"--max-num-seqs to at most {capacity // blocks_per_seq}",
        f"--max-model-len to at most {capacity // num_seqs * block_size}",
    ]
    fitting = [size for size in _LARGER_BLOCKS if num_seqs * -(-max_model_len // size) <= capacity]
    if fitting:
        ways.insert(0, f"--block-size to at least {fitting[0]}")
    needed, limit = num_seqs * blocks_per_seq * _ENTRY_BYTES >> 10, SMEM_BYTES // 2 >> 10
    raise ValueError(
        f"the block tables of {num_seqs} sequences of {blocks_per_seq} blocks must fit into {limit} KiB of a TPU's "
        f"scalar memory, got {needed} KiB; set {' or '.join(ways)}"
    )


@functools.cache
def _read_table() -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    table: Mapping[str, Mapping[str, Mapping[str, int]]] = json.loads(TABLE_PATH.read_text())
    return table
