"""BlockPool, KVCacheBlock, FreeKVCacheBlockQueue: who may use which physical block. Knows no sequence.

A block with no owner stays in the free queue with its hash, so that its content can still be found until the
block is handed out again. Blocks are handed out from the head of the queue and come back at the tail: least
recently freed goes first.
"""

from collections.abc import Iterable, Iterator, Sequence

from jaxllm.scheduler.block_hash import BlockHash

NULL_BLOCK_ID = 0


class KVCacheBlock:
    """A physical block.

    Attributes:
      ref_cnt: Number of sequences whose block table holds it.
      block_hash: Identity of its content once full and computed; None otherwise.
      prev_free_block, next_free_block: Neighbours in the free queue; None outside of it.
    """

    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block", "is_null")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = False


class FreeKVCacheBlockQueue:
    """Doubly linked through the blocks themselves, so that a block leaves from the middle in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)  # sentinels: no operation has a special case at the ends
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Removes and returns the block at the head.

        Raises:
          IndexError: The queue is empty.
        """
        if not self.num_free_blocks:
            raise IndexError("no free block")
        block = self._head.next_free_block
        assert block is not None
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        last = self._tail.prev_free_block
        assert last is not None and block.next_free_block is None, f"block {block.block_id} is free already"
        last.next_free_block = block
        block.prev_free_block = last
        block.next_free_block = self._tail
        self._tail.prev_free_block = block
        self.num_free_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None and after is not None, f"block {block.block_id} is not free"
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block


class BlockPool:
    """All blocks of one KV cache. Block 0 is the null block: padding writes to it and no sequence owns it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "block 0 is the null block: a pool has at least 2 blocks"
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block: dict[bytes, dict[int, KVCacheBlock]] = {}  # digest -> block id -> block
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.null_block.ref_cnt = 1

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that have an owner, in [0, 1]."""
        return 1 - self.num_free_blocks / self.num_usable_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks from the head of the free queue. What they held can't be found any more.

        Raises:
          IndexError: Fewer blocks are free.
        """
        if num_blocks > self.num_free_blocks:
            raise IndexError(f"{num_blocks} blocks wanted, {self.num_free_blocks} free")
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds one owner to each block; a free one leaves the free queue and keeps its content."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Takes one owner from each block, in the order in which they are to be handed out again."""
        for block in blocks:
            assert block.ref_cnt > 0 and not block.is_null, f"block {block.block_id} has no owner to lose"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Returns a block that holds exactly this prefix, or None."""
        for block in self.cached_block_hash_to_block.get(block_hash.digest, {}).values():
            if block.block_hash is not None and block.block_hash.is_same_prefix(block_hash):
                return block
        return None

    def cache_block(self, block: KVCacheBlock, block_hash: BlockHash) -> BlockHash:
        """Makes a full, computed block findable. Returns the one object that stands for its prefix."""
        assert block.block_hash is None and not block.is_null, f"block {block.block_id} can't be cached"
        twin = self.get_cached_block(block_hash)
        if twin is not None and twin.block_hash is not None:
            block_hash = twin.block_hash
        block.block_hash = block_hash
        self.cached_block_hash_to_block.setdefault(block_hash.digest, {})[block.block_id] = block
        return block_hash

    def reset_prefix_cache(self) -> bool:
        """Forgets all content. Returns False, and does nothing, while a block has an owner."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self.blocks:
            block.block_hash = None
        self.cached_block_hash_to_block.clear()
        return True

    def check_integrity(self, block_tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Checks the ledger against every block table there is.

        Raises:
          AssertionError: A block is lost, freed while owned, wrongly counted or wrongly findable.
        """
        owners = [0] * len(self.blocks)
        owners[NULL_BLOCK_ID] = 1
        for table in block_tables:
            for block in table:
                owners[block.block_id] += 1
        assert [block.ref_cnt for block in self.blocks] == owners, "reference counts differ from owners"
        free = [block.block_id for block in self.free_block_queue]
        assert len(free) == self.num_free_blocks, "the free queue has lost count"
        unowned = [block_id for block_id, count in enumerate(owners) if count == 0]
        assert sorted(free) == unowned, "the free queue isn't the set of blocks without owner"
        cached = {(block.block_hash.digest, block.block_id) for block in self.blocks if block.block_hash is not None}
        findable = {
            (digest, block_id) for digest, twins in self.cached_block_hash_to_block.items() for block_id in twins
        }
        assert cached == findable, "the cache map and the blocks' hashes differ"
        assert all(self.cached_block_hash_to_block.values()), "the cache map keeps an empty entry"

    def _evict(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        twins = self.cached_block_hash_to_block[block.block_hash.digest]
        del twins[block.block_id]
        if not twins:
            del self.cached_block_hash_to_block[block.block_hash.digest]
        block.block_hash = None
