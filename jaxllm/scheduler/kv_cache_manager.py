"""KVCacheManager: which physical blocks hold which sequence's keys and values. Knows no queue and no budget.

A block becomes findable by other sequences only through cache_full_blocks(), called when the step that wrote
it has finished: inside a step nothing orders one sequence's writes before another's reads.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxllm.intmath import cdiv
from jaxllm.scheduler.block_hash import BlockHash, HashFunction, hash_block, sha256
from jaxllm.scheduler.block_pool import BlockPool, KVCacheBlock
from jaxllm.scheduler.host_blocks import BlockPairs, HostBlocks, copy_tables, num_distinct_blocks
from jaxllm.sequence import Sequence


class ReplacedBlock(NamedTuple):
    """A shared block that a sequence is about to write, replaced in its block table by a copy of its own."""

    block_idx: int  # position in the block table
    source: int  # block id before
    destination: int  # block id after


class Allocation(NamedTuple):
    """What allocate_slots changed in a sequence's block table."""

    new_block_ids: tuple[int, ...]  # appended, hits of the prefix cache first
    replaced_blocks: tuple[ReplacedBlock, ...]  # to be copied on the device before this step writes


_UNCHANGED = Allocation((), ())


class KVCacheManager:
    """Block tables over one BlockPool.

    Attributes:
      req_to_blocks: seq_id -> its block table.
      req_to_block_hashes: seq_id -> identities of its full blocks, as far as needed. Kept over preemption.
      num_cached_block: seq_id -> how many blocks from the start of its table are findable.
      host_blocks: What swapped-out sequences hold.
      num_queried_tokens, num_hit_tokens: Prefix cache statistics; see record_lookup.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        hash_function: HashFunction = sha256,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks)
        self.host_blocks = HostBlocks(num_host_blocks)
        self.req_to_blocks: dict[int, list[KVCacheBlock]] = {}
        self.req_to_block_hashes: dict[int, list[BlockHash]] = {}
        self.num_cached_block: dict[int, int] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._hash_function = hash_function

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]."""
        return self.block_pool.usage

    def block_ids(self, seq_id: int) -> list[int]:
        return [block.block_id for block in self.req_to_blocks[seq_id]]

    def get_computed_blocks(self, seq: Sequence) -> list[KVCacheBlock]:
        """Returns the longest run of cached blocks from the sequence's start. Changes no owner.

        At least the last token is left to compute, because its logits are needed: 8 tokens in blocks of 4 can
        hit one block, 9 can hit two.
        """
        if not self.enable_prefix_caching:
            return []
        found: list[KVCacheBlock] = []
        for block_idx in range((seq.num_tokens - 1) // self.block_size):
            block = self.block_pool.get_cached_block(self._block_hash(seq, block_idx))
            if block is None or block.block_hash is None:
                break
            self.req_to_block_hashes[seq.seq_id][block_idx] = block.block_hash
            found.append(block)
        return found

    def record_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Counts one lookup whose blocks were then taken, in tokens. No-op without prefix caching."""
        if not self.enable_prefix_caching:
            return
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        computed_blocks: list[KVCacheBlock] | None = None,
        num_reserved_blocks: int = 0,
    ) -> Allocation | None:
        """Makes room for the keys and values of the next `num_new_tokens` tokens.

        Args:
          seq: The sequence, with num_computed_tokens of its tokens computed (0 if computed_blocks is given).
          num_new_tokens: Tokens that will be written after the computed ones.
          computed_blocks: What get_computed_blocks found, for a sequence that holds no blocks.
          num_reserved_blocks: Free blocks that must remain.

        Returns:
          What changed in the block table, or None, with nothing changed at all, when blocks are short.
        """
        hits = computed_blocks or []
        table = self.req_to_blocks.get(seq.seq_id, [])
        if num_new_tokens == 1 and table:  # most calls by far: one more token, in a block of its own
            block_idx = seq.num_computed_tokens // self.block_size
            if block_idx < len(table) and table[block_idx].ref_cnt == 1:
                return _UNCHANGED
        assert not (hits and table), "only a sequence without blocks can take cached ones"
        start = seq.num_computed_tokens + len(hits) * self.block_size
        first, end = start // self.block_size, cdiv(start + num_new_tokens, self.block_size)
        shared = [first + i for i, block in enumerate(table[first:end]) if block.ref_cnt > 1]
        num_appended = max(0, end - len(table) - len(hits))
        if table and not shared and not num_appended:
            return _UNCHANGED
        num_free_hits = sum(block.ref_cnt == 0 for block in hits)
        num_available = self.block_pool.num_free_blocks - num_free_hits - num_reserved_blocks
        if len(shared) + num_appended > num_available:
            return None
        if not table:
            self.req_to_blocks[seq.seq_id] = table
            self.num_cached_block[seq.seq_id] = len(hits)
        self.block_pool.touch(hits)
        replaced = tuple(self._copy_on_write(table, block_idx) for block_idx in shared)
        appended = hits + self.block_pool.get_new_blocks(num_appended)
        table.extend(appended)
        return Allocation(tuple(block.block_id for block in appended), replaced)

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Makes the sequence's full, computed blocks findable. Call it once their step has finished."""
        if not self.enable_prefix_caching:
            return
        first, end = self.num_cached_block[seq.seq_id], seq.num_computed_tokens // self.block_size
        if end <= first:
            return
        table = self.req_to_blocks[seq.seq_id]
        for block_idx in range(first, end):
            block = table[block_idx]
            # After a swap-in a sibling may have been here first.
            block_hash = self._block_hash(seq, block_idx)
            known = block.block_hash or self.block_pool.cache_block(block, block_hash)
            self.req_to_block_hashes[seq.seq_id][block_idx] = known
        self.num_cached_block[seq.seq_id] = end

    def fork(self, parent_id: int, child_id: int) -> None:
        """Gives a new sequence the parent's block table. Copies come when a shared block is written."""
        table = list(self.req_to_blocks[parent_id])
        self.block_pool.touch(table)
        self.req_to_blocks[child_id] = table
        self.num_cached_block[child_id] = self.num_cached_block[parent_id]
        self.req_to_block_hashes[child_id] = list(self.req_to_block_hashes.get(parent_id, []))

    def num_blocks_needed(self, wanted: Iterable[tuple[Sequence, int]]) -> int:
        """Returns how many free blocks allocate_slots would take for all of these (sequence, new tokens)."""
        num_appended = 0
        num_writers: dict[int, int] = {}
        for seq, num_new_tokens in wanted:
            table = self.req_to_blocks[seq.seq_id]
            first = seq.num_computed_tokens // self.block_size
            end = cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size)
            num_appended += max(0, end - len(table))
            for block in table[first:end]:
                num_writers[block.block_id] = num_writers.get(block.block_id, 0) + 1
        blocks = self.block_pool.blocks
        # The last owner of a shared block writes in place.
        num_copies = sum(num - (num == blocks[block_id].ref_cnt) for block_id, num in num_writers.items())
        return num_appended + num_copies

    def swap_out(self, seq_ids: Iterable[int]) -> BlockPairs | None:
        """Moves block tables to host memory; what the sequences share they share there too.

        Returns:
          (device, host) blocks to copy before anything else is written, or None, with nothing changed, when
          host blocks are short.
        """
        tables = {seq_id: self.req_to_blocks[seq_id] for seq_id in seq_ids}
        pairs = self.host_blocks.take(tables)
        if pairs is not None:
            for seq_id in tables:
                self.free(seq_id)
        return pairs

    def swap_in(self, seq_ids: Iterable[int], num_reserved_blocks: int) -> BlockPairs | None:
        """Moves block tables back from host memory.

        Returns:
          (host, device) blocks to copy before the step's copies and forward, or None, with nothing changed,
          when fewer than num_reserved_blocks would remain free.
        """
        tables = {seq_id: self.host_blocks.tables[seq_id] for seq_id in seq_ids}
        if num_distinct_blocks(tables) > self.block_pool.num_free_blocks - num_reserved_blocks:
            return None
        device_tables, pairs = copy_tables(tables, self.block_pool)
        self.req_to_blocks.update(device_tables)
        for seq_id in tables:
            self.num_cached_block[seq_id] = 0
            self.host_blocks.free(seq_id)
        return pairs

    def free(self, seq_id: int) -> None:
        """Gives up the sequence's device blocks; no-op if it holds none. Their content can be found until
        overwritten.

        The last block goes first, so that the deepest part of a prefix is overwritten before its start.
        """
        table = self.req_to_blocks.pop(seq_id, [])
        self.num_cached_block.pop(seq_id, None)
        self.block_pool.free_blocks(reversed(table))

    def free_block_hashes(self, seq_id: int) -> None:
        """Forgets the block identities of a sequence that has finished."""
        self.req_to_block_hashes.pop(seq_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. Returns False, and does nothing, while a sequence holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def get_num_common_prefix_blocks(self, seq_id: int, num_running_seqs: int) -> int:
        """Returns how many blocks, counted from the start, all running sequences have in common.

        Args:
          seq_id: Any one of the running sequences.
          num_running_seqs: Number of sequences that hold blocks.
        """
        num_blocks = 0
        for block in self.req_to_blocks[seq_id]:
            if block.ref_cnt != num_running_seqs:
                break
            num_blocks += 1
        return num_blocks

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Checks every block's owners and every table against its sequence.

        Args:
          seqs: Exactly the sequences that should hold blocks.

        Raises:
          AssertionError: Some block is lost, doubly owned, too early freed or wrongly findable.
        """
        self.block_pool.check_integrity(self.req_to_blocks.values())
        by_id = {seq.seq_id: seq for seq in seqs}
        assert by_id.keys() == self.req_to_blocks.keys(), "the holders of blocks aren't the running sequences"
        assert by_id.keys() == self.num_cached_block.keys()
        for seq_id, seq in by_id.items():
            ids = self.block_ids(seq_id)
            assert len(set(ids)) == len(ids), f"sequence {seq_id} holds a block twice"
            assert len(ids) * self.block_size >= seq.num_computed_tokens, (
                f"sequence {seq_id} has computed more than it holds"
            )
            for block_idx in range(self.num_cached_block[seq_id]):
                block_hash = self.req_to_blocks[seq_id][block_idx].block_hash
                tokens = tuple(seq.logical_token_blocks[block_idx])
                assert block_hash is not None and block_hash.token_ids == tokens, f"sequence {seq_id}: stale hash"

    def _block_hash(self, seq: Sequence, block_idx: int) -> BlockHash:
        hashes = self.req_to_block_hashes.setdefault(seq.seq_id, [])
        while len(hashes) <= block_idx:
            parent = hashes[-1] if hashes else None
            tokens = seq.logical_token_blocks[len(hashes)]
            hashes.append(hash_block(parent, tokens, () if hashes else seq.cache_keys, self._hash_function))
        return hashes[block_idx]

    def _copy_on_write(self, table: list[KVCacheBlock], block_idx: int) -> ReplacedBlock:
        source = table[block_idx]
        (destination,) = self.block_pool.get_new_blocks(1)
        self.block_pool.free_blocks([source])  # its other owners keep it: the reference count was above 1
        table[block_idx] = destination
        return ReplacedBlock(block_idx, source.block_id, destination.block_id)
