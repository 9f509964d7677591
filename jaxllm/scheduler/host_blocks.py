"""HostBlocks: block tables of swapped-out sequences over a BlockPool in host memory. Knows no queue."""

from collections.abc import Iterable

from jaxllm.scheduler.block_pool import BlockPool, KVCacheBlock
from jaxllm.sequence import Sequence

BlockTables = dict[int, list[KVCacheBlock]]  # seq_id -> its block table
BlockPairs = list[tuple[int, int]]  # (source, destination) block ids


def copy_tables(tables: BlockTables, pool: BlockPool) -> tuple[BlockTables, BlockPairs]:
    """Rebuilds block tables in another pool: one new block for each distinct one, shared by the same sequences.

    Raises:
      IndexError: The pool has fewer free blocks than there are distinct ones.
    """
    copies: dict[int, KVCacheBlock] = {}
    copied: BlockTables = {}
    for seq_id, table in tables.items():
        copied[seq_id] = []
        for block in table:
            if block.block_id in copies:
                pool.touch([copies[block.block_id]])
            else:
                (copies[block.block_id],) = pool.get_new_blocks(1)
            copied[seq_id].append(copies[block.block_id])
    return copied, [(source, copy.block_id) for source, copy in copies.items()]


def num_distinct_blocks(tables: BlockTables) -> int:
    return len({block.block_id for table in tables.values() for block in table})


class HostBlocks:
    """What swapped-out sequences hold.

    Attributes:
      num_blocks: With the null block; 0 if there is no host memory to swap to.
      block_pool: Made when something is swapped out for the first time.
      tables: seq_id -> its block table in host memory.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_pool: BlockPool | None = None
        self.tables: BlockTables = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds; the null block isn't among them."""
        return max(self.num_blocks - 1, 0) if self.block_pool is None else self.block_pool.num_free_blocks

    def take(self, device_tables: BlockTables) -> BlockPairs | None:
        """Makes room for these tables. Returns (device, host) pairs to copy, or None if room is short."""
        if self.block_pool is None and self.num_blocks:
            self.block_pool = BlockPool(self.num_blocks)
        if self.block_pool is None or num_distinct_blocks(device_tables) > self.block_pool.num_free_blocks:
            return None
        tables, pairs = copy_tables(device_tables, self.block_pool)
        self.tables.update(tables)
        return pairs

    def free(self, seq_id: int) -> None:
        """Gives up the sequence's blocks; no-op if it holds none."""
        table = self.tables.pop(seq_id, [])
        if self.block_pool is not None:
            self.block_pool.free_blocks(table)

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Checks every block's owners.

        Args:
          seqs: Exactly the sequences that should hold host blocks.

        Raises:
          AssertionError: Some block is lost or wrongly counted.
        """
        by_id = {seq.seq_id: seq for seq in seqs}
        assert by_id.keys() == self.tables.keys(), "the holders of host blocks aren't the swapped sequences"
        if self.block_pool is None:
            return
        self.block_pool.check_integrity(self.tables.values())
        assert not self.block_pool.cached_block_hash_to_block, "a host block is findable"
        for seq_id, seq in by_id.items():
            table = self.tables[seq_id]
            num_tokens = len(table) * seq.block_size
            assert num_tokens >= seq.num_computed_tokens, f"sequence {seq_id} has computed more than it holds"
