"""BlockPool: order of the free queue, owners, findable content, and the ledger's check."""

from collections.abc import Callable

import pytest

from jaxllm.scheduler.block_hash import hash_block
from jaxllm.scheduler.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock

Fault = Callable[[BlockPool, list[KVCacheBlock]], list[list[KVCacheBlock]]]  # returns the block tables


def _free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue]


def test_queue_leaves_from_head_and_middle_and_comes_back_at_the_tail() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(5)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.popleft().block_id == 0
    queue.remove(blocks[3])
    assert [block.block_id for block in queue] == [1, 2, 4]
    queue.append(blocks[3])
    queue.append(blocks[0])
    assert [block.block_id for block in queue] == [1, 2, 4, 3, 0]
    assert queue.num_free_blocks == 5


def test_an_empty_queue_raises() -> None:
    queue = FreeKVCacheBlockQueue([])
    with pytest.raises(IndexError):
        queue.popleft()


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    assert pool.null_block.block_id == 0 and pool.num_free_blocks == 0
    with pytest.raises(IndexError):
        pool.get_new_blocks(1)


def test_double_free_is_refused() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="block 1 has no owner"):
        pool.free_blocks(blocks)


def test_a_block_with_two_owners_is_free_after_the_second_leaves() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert _free_ids(pool) == [2]
    pool.free_blocks(blocks)
    assert _free_ids(pool) == [2, 1]


def test_content_is_found_until_the_block_is_handed_out_again() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    key = hash_block(None, [1, 2])
    pool.cache_block(block, key)
    pool.free_blocks([block])
    assert pool.get_cached_block(hash_block(None, [1, 2])) is block
    assert [taken.block_id for taken in pool.get_new_blocks(2)] == [2, 1]
    assert pool.get_cached_block(key) is None
    assert pool.cached_block_hash_to_block == {}


def test_two_blocks_may_hold_the_same_prefix() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    key = hash_block(None, [1, 2])
    assert pool.cache_block(first, key) is key
    assert pool.cache_block(second, hash_block(None, [1, 2])) is key  # one object a prefix
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key) is second


def test_usage_leaves_the_null_block_out() -> None:
    pool = BlockPool(10)
    pool.get_new_blocks(3)
    assert pool.usage == 1 - 6 / 9


def test_reset_only_when_nobody_owns_a_block() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    key = hash_block(None, [1, 2])
    pool.cache_block(block, key)
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(key) is block
    pool.free_blocks([block])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(key) is None


def _skip_a_free(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    return [blocks[:1]]


def _count_an_owner_twice(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    blocks[0].ref_cnt = 2
    return [blocks]


def _free_an_owned_block(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    pool.free_block_queue.append(blocks[0])
    return [blocks]


def _lose_a_free_block(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    pool.free_block_queue.popleft()
    return [blocks]


def _forget_to_unlist_a_hash(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[list[KVCacheBlock]]:
    blocks[0].block_hash = None
    return [blocks]


@pytest.mark.parametrize(
    "plant",
    [_skip_a_free, _count_an_owner_twice, _free_an_owned_block, _lose_a_free_block, _forget_to_unlist_a_hash],
)
def test_check_integrity_finds_a_planted_fault(plant: Fault) -> None:
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(2)
    pool.cache_block(blocks[0], hash_block(None, [1]))
    pool.check_integrity([blocks])
    tables = plant(pool, blocks)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
