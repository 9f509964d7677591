"""The checks can fail: each of these faults, planted by monkeypatching, is caught by a few random lives."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.messages import SchedulerStats
from jaxllm.scheduler import host_blocks, kv_cache_manager
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.host_blocks import HostBlocks
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.preemption import Preemption
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.sequence import Sequence
from tests.fakes.scheduler_episode import SchedulerEpisode

_NUM_EPISODES = 60
Fault = Callable[[pytest.MonkeyPatch], None]


def _wrap(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """Replaces owner.name by change(original, *arguments)."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return plant


def _all_but_one(original: Any, pool: BlockPool, blocks: Any) -> None:
    original(pool, list(blocks)[1:])


def _forget_the_copy(original: Any, *args: Any) -> None:
    plan, allocation = args[0], args[4]
    num_before = len(plan.blocks_to_copy)
    original(*args)
    if allocation.replaced_blocks:
        del plan.blocks_to_copy[num_before:]


def _shift_the_mapping(original: Any, tables: Any, pool: BlockPool) -> Any:
    copied, pairs = original(tables, pool)
    sources = [source for source, _ in pairs]
    return copied, list(zip(sources[1:] + sources[:1], [target for _, target in pairs], strict=True))


def _stale_hash(original: Any, pool: BlockPool, block: Any) -> None:
    """A block that is handed out can still be found."""


def _cache_too_early(original: Any, kv: KVCacheManager, seq: Sequence, *args: Any) -> Any:
    allocation = original(kv, seq, *args)
    if allocation is not None and kv.enable_prefix_caching:
        computed, seq.num_computed_tokens = seq.num_computed_tokens, min(seq.num_tokens, seq.num_computed_tokens + 2)
        if len(kv.req_to_blocks[seq.seq_id]) * kv.block_size >= seq.num_computed_tokens:
            kv.cache_full_blocks(seq)
        seq.num_computed_tokens = computed
    return allocation


def _write_shared_blocks(original: Any, kv: KVCacheManager, table: Any, block_idx: int) -> Any:
    block = table[block_idx]
    return kv_cache_manager.ReplacedBlock(block_idx, block.block_id, block.block_id)


def _keep_the_host_blocks(original: Any, blocks: HostBlocks, seq_id: int) -> None:
    blocks.tables.pop(seq_id, None)


def _one_pair_less(original: Any, kv: KVCacheManager, seq_ids: Any, num_reserved: int) -> Any:
    pairs = original(kv, seq_ids, num_reserved)
    return pairs[:-1] if pairs else pairs


def _still_computed(original: Any, preemption: Preemption, group: Any, seqs: list[Sequence]) -> None:
    computed = [seq.num_computed_tokens for seq in seqs]
    original(preemption, group, seqs)
    for seq, num in zip(seqs, computed, strict=True):
        seq.num_computed_tokens = num


def _row_stays(original: Any, preemption: Preemption, seq: Sequence) -> None:
    seq.is_on_worker = False


def _budget_stays(original: Any, plan: StepPlan, *args: Any) -> None:
    budget = plan.token_budget
    original(plan, *args)
    plan.token_budget = budget


def _no_parent(original: Any, parent: Any, token_ids: Any, keys: Any, function: Any) -> Any:
    return original(None, token_ids, keys, function)


FAULTS: dict[str, Fault] = {
    "a free is skipped": _wrap(BlockPool, "free_blocks", _all_but_one),
    "a reference isn't counted": _wrap(BlockPool, "touch", _all_but_one),
    "a copy isn't issued": _wrap(StepPlan, "add", _forget_the_copy),
    "a shared block is written in place": _wrap(KVCacheManager, "_copy_on_write", _write_shared_blocks),
    "swap mapping shifted, on the way out": _wrap(host_blocks, "copy_tables", _shift_the_mapping),
    "swap mapping shifted, on the way in": _wrap(kv_cache_manager, "copy_tables", _shift_the_mapping),
    "a block isn't swapped in": _wrap(KVCacheManager, "swap_in", _one_pair_less),
    "host blocks are kept": _wrap(HostBlocks, "free", _keep_the_host_blocks),
    "a stale hash": _wrap(BlockPool, "_evict", _stale_hash),
    "found before it is written": _wrap(KVCacheManager, "allocate_slots", _cache_too_early),
    "a hash without its parent": _wrap(kv_cache_manager, "hash_block", _no_parent),
    "preempted, but still computed": _wrap(Preemption, "_recompute", _still_computed),
    "the worker isn't told": _wrap(Preemption, "drop_from_worker", _row_stays),
    "the budget isn't spent": _wrap(StepPlan, "add", _budget_stays),
}


def _run_episodes() -> list[SchedulerStats]:
    stats = []
    for seed in range(_NUM_EPISODES):
        episode = SchedulerEpisode(seed)
        episode.run(200)
        stats.append(episode.scheduler.stats())
    return stats


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        _run_episodes()


def test_without_a_fault_nothing_is_caught_and_swaps_copies_and_hits_happen() -> None:
    stats = _run_episodes()
    assert sum(item.num_swapped_in_blocks for item in stats) > 100
    assert sum(item.num_copied_blocks for item in stats) > 100
    assert sum(item.prefix_cache_hits for item in stats) > 100
