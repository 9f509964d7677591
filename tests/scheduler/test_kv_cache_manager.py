"""KVCacheManager: hand-computed examples of allocation, prefix hits, copy-on-write; blocks of 4 tokens."""

from hypothesis import given
from hypothesis import strategies as st

from jaxllm.scheduler.kv_cache_manager import Allocation, KVCacheManager, ReplacedBlock
from jaxllm.sequence import Sequence
from tests.scheduler.builders import make_seq


def _manager(num_blocks: int = 10) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size=4, enable_prefix_caching=True)


def _free_ids(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.block_pool.free_block_queue]


def _compute(kv: KVCacheManager, seq: Sequence) -> int:
    """Computes all tokens of a sequence without blocks; returns how many were found in the cache."""
    hits = kv.get_computed_blocks(seq)
    assert kv.allocate_slots(seq, seq.num_tokens - 4 * len(hits), hits) is not None
    seq.num_computed_tokens = seq.num_tokens
    kv.cache_full_blocks(seq)
    return 4 * len(hits)


def test_oracle_of_the_free_queue_and_prefix_hits() -> None:
    kv = _manager(num_blocks=10)
    a = make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert _compute(kv, a) == 0
    assert kv.block_ids(0) == [1, 2, 3]
    assert kv.num_cached_block == {0: 2}
    kv.free(0)
    assert _free_ids(kv) == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert [block.block_hash is not None for block in kv.block_pool.blocks[1:4]] == [True, True, False]
    b = make_seq(1, [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22])
    hits = kv.get_computed_blocks(b)
    assert [block.block_id for block in hits] == [1, 2]
    assert kv.allocate_slots(b, 3, hits) == Allocation((1, 2, 4), ())
    assert kv.block_ids(1) == [1, 2, 4]
    assert _free_ids(kv) == [5, 6, 7, 8, 9, 3]
    assert kv.usage == 1 - 6 / 9


def test_oracle_of_an_exact_multiple() -> None:
    kv = _manager()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    _compute(kv, make_seq(0, prompt))
    assert _compute(kv, make_seq(1, prompt)) == 4
    assert kv.block_ids(1) == [1, 3]
    assert _compute(kv, make_seq(2, [*prompt, 9])) == 8


def test_common_prefix_blocks_are_held_by_every_running_sequence() -> None:
    kv = _manager(num_blocks=20)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    _compute(kv, make_seq(0, [*prompt, 9]))
    assert kv.get_num_common_prefix_blocks(0, 1) == 3
    _compute(kv, make_seq(1, [*prompt, 10]))
    _compute(kv, make_seq(2, [*prompt, 9, 10, 11]))
    assert [kv.get_num_common_prefix_blocks(seq_id, 3) for seq_id in (0, 1, 2)] == [2, 2, 2]
    _compute(kv, make_seq(3, [1, 2, 3, 4, 0]))  # has one block in common with the others
    assert [kv.get_num_common_prefix_blocks(seq_id, 4) for seq_id in (0, 3)] == [1, 1]
    _compute(kv, make_seq(4, [0, 2, 3]))
    assert kv.get_num_common_prefix_blocks(0, 5) == 0
    for seq_id in (1, 2, 3, 4):
        kv.free(seq_id)
    assert kv.get_num_common_prefix_blocks(0, 1) == 3


def test_lookup_stops_at_the_first_miss() -> None:
    kv = _manager()
    _compute(kv, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]))
    seq = make_seq(1, [1, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 12, 13])
    assert [block.block_id for block in kv.get_computed_blocks(seq)] == [1]


def test_oracle_of_copy_on_write() -> None:
    kv = _manager()
    seq0 = make_seq(0, [1, 2, 3, 4, 5, 6])
    _compute(kv, seq0)
    seq1 = seq0.fork(1, 1)
    kv.fork(0, 1)
    assert [kv.block_pool.blocks[block_id].ref_cnt for block_id in (1, 2)] == [2, 2]
    seq0.append_token_id(7)
    seq1.append_token_id(8)
    assert kv.allocate_slots(seq0, 1) == Allocation((), (ReplacedBlock(1, 2, 3),))
    assert kv.allocate_slots(seq1, 1) == Allocation((), ())  # the last owner writes in place
    assert (kv.block_ids(0), kv.block_ids(1)) == ([1, 3], [1, 2])
    assert kv.block_pool.num_usable_blocks - kv.block_pool.num_free_blocks == 3
    kv.check_integrity([seq0, seq1])
    kv.free(0)
    assert _free_ids(kv) == [4, 5, 6, 7, 8, 9, 3]
    assert kv.block_pool.blocks[1].ref_cnt == 1


def test_four_owners_make_three_copies() -> None:
    kv = _manager()
    seqs = [make_seq(0, [1, 2, 3])]
    _compute(kv, seqs[0])
    for index in (1, 2, 3):
        seqs.append(seqs[0].fork(index, index))
        kv.fork(0, index)
    copies = []
    for seq in seqs:
        seq.append_token_id(9)
        allocation = kv.allocate_slots(seq, 1)
        assert allocation is not None
        copies += [(replaced.source, replaced.destination) for replaced in allocation.replaced_blocks]
    assert copies == [(1, 2), (1, 3), (1, 4)]


def test_a_shared_full_block_is_not_copied() -> None:
    kv = _manager()
    seq0 = make_seq(0, [1, 2, 3, 4])
    _compute(kv, seq0)
    seq0.fork(1, 1)
    kv.fork(0, 1)
    seq0.append_token_id(5)
    assert kv.allocate_slots(seq0, 1) == Allocation((2,), ())


def test_short_of_blocks_means_nothing_has_changed() -> None:
    kv = _manager(num_blocks=5)
    _compute(kv, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8]))
    kv.free(0)
    owner = make_seq(1, [9, 9, 9])
    _compute(kv, owner)
    before = (_free_ids(kv), [block.ref_cnt for block in kv.block_pool.blocks], dict(kv.num_cached_block))
    seq = make_seq(2, [1, 2, 3, 4, *range(50, 60)])  # 1 hit, which is free itself, and 3 new: 3 are free
    hits = kv.get_computed_blocks(seq)
    assert [block.block_id for block in hits] == [1]
    assert kv.allocate_slots(seq, 10, hits) is None
    assert (_free_ids(kv), [block.ref_cnt for block in kv.block_pool.blocks], kv.num_cached_block) == before
    kv.check_integrity([owner])


def test_no_room_for_a_copy_is_also_short() -> None:
    kv = _manager(num_blocks=2)
    seq0 = make_seq(0, [1, 2])
    _compute(kv, seq0)
    seq1 = seq0.fork(1, 1)
    kv.fork(0, 1)
    seq0.append_token_id(3)
    assert kv.allocate_slots(seq0, 1) is None
    kv.free(seq1.seq_id)
    assert kv.allocate_slots(seq0, 1) == Allocation((), ())


def test_salts_and_adapters_share_nothing() -> None:
    kv = _manager(num_blocks=32)
    found = []
    for seq_id in range(8):
        seq = make_seq(seq_id, [1, 2, 3, 4, 5])
        seq.cache_keys = [(), (("salt", "a"),), (("salt", "b"),), (("adapter", "a"),)][seq_id % 4]
        found.append(_compute(kv, seq))
    assert found == [0, 0, 0, 0, 4, 4, 4, 4]


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=False)
    assert [_compute(kv, make_seq(seq_id, [1, 2, 3, 4, 5])) for seq_id in range(2)] == [0, 0]
    kv.record_lookup(5, 0)
    assert (kv.num_queried_tokens, kv.req_to_block_hashes) == (0, {})


def test_reset_prefix_cache() -> None:
    kv = _manager()
    _compute(kv, make_seq(0, [1, 2, 3, 4, 5]))
    assert not kv.reset_prefix_cache()
    kv.free(0)
    assert kv.reset_prefix_cache()
    assert kv.get_computed_blocks(make_seq(1, [1, 2, 3, 4, 5])) == []


def test_an_overwritten_start_hides_the_rest_of_a_prefix() -> None:
    kv = _manager(num_blocks=4)
    _compute(kv, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    kv.free(0)  # free: 3, 2, 1; the deepest is overwritten first
    _compute(kv, make_seq(1, [50, 51]))
    assert [block.block_id for block in kv.get_computed_blocks(make_seq(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]))] == [
        1,
        2,
    ]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12))
def test_a_weak_hash_never_finds_a_foreign_prefix(prompts: list[list[int]]) -> None:
    kv = KVCacheManager(8, block_size=2, enable_prefix_caching=True, hash_function=lambda data: data[-8:-7])
    content: dict[int, list[int]] = {}  # block id -> the whole prefix up to its end
    for seq_id, prompt in enumerate(prompts):
        seq = make_seq(seq_id, prompt, block_size=2)
        hits = kv.get_computed_blocks(seq)
        for block_idx, block in enumerate(hits):
            assert content[block.block_id] == prompt[: 2 * (block_idx + 1)]
        assert kv.allocate_slots(seq, len(prompt) - 2 * len(hits), hits) is not None
        for block_idx, block_id in enumerate(kv.block_ids(seq_id)):
            content[block_id] = prompt[: 2 * (block_idx + 1)]
        seq.num_computed_tokens = len(prompt)
        kv.cache_full_blocks(seq)
        kv.check_integrity([seq])
        kv.free(seq_id)
        kv.free_block_hashes(seq_id)
