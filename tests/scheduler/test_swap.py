"""Swap: whole groups to host memory and back, sharing kept, nothing computed twice; a full host pool recomputes."""

from collections.abc import Sequence

import pytest

from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.sequence import SequenceStatus
from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import free_ids, make_request, make_scheduler, run_all, run_step


def _by_seed(token_ids: Sequence[int], seed: int) -> int:
    return 10 * seed + len(token_ids)


def _old_and_pair(num_host_blocks: int, old_tokens: int = 7, **policies: str) -> tuple[Scheduler, FakeExecutor]:
    """ "old" grows until the pair "a" has to go."""
    executor = FakeExecutor(draw=_by_seed, num_blocks=8, block_size=2, num_host_blocks=num_host_blocks)
    scheduler = make_scheduler(executor, enable_prefix_caching=False, **policies)
    scheduler.add_request(make_request("old", [50, 51, 52, 53], max_tokens=old_tokens))
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14], n=2, max_tokens=4))
    return scheduler, executor


_EXPECTED = {
    ("old", 0): [1004, 1005, 1006, 1007, 1008, 1009, 1010],
    ("a", 0): [1005, 1006, 1007, 1008],
    ("a", 1): [1015, 1016, 1017, 1018],
}


def test_a_group_is_swapped_whole_and_resumes_without_computing_anything_twice() -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    assert run_all(scheduler, executor) == _EXPECTED
    outs = [step.blocks_to_swap_out for step in executor.steps if step.blocks_to_swap_out]
    ins = [step.blocks_to_swap_in for step in executor.steps if step.blocks_to_swap_in]
    assert len(outs) == len(ins) == 1
    assert [host for _, host in outs[0]] == [1, 2, 3, 4] == [host for host, _ in ins[0]]
    # 4 + 5 prompt tokens, then one step a token but for the first of each: nothing was computed again.
    assert sum(step.num_tokens for step in executor.steps) == 9 + 6 + 3 + 3
    assert scheduler.stats().num_preemptions == 2
    assert (scheduler.stats().num_swapped_out_blocks, scheduler.stats().num_swapped_in_blocks) == (4, 4)


def test_shared_blocks_are_moved_once_and_shared_again() -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    pairs: list[tuple[int, int]] = []
    while not pairs:
        pairs = run_step(scheduler, executor)[0].blocks_to_swap_out
    kv = scheduler.kv_cache_manager
    first, second = (kv.host_blocks.tables[seq_id] for seq_id in (1, 2))
    assert [block.block_id for block in first] == [1, 2, 3] and [block.block_id for block in second] == [1, 2, 4]
    assert [block.ref_cnt for block in first] == [2, 2, 1]
    group = scheduler.queues.swapped.first()
    assert [seq.status for seq in group.seqs] == [SequenceStatus.SWAPPED] * 2
    assert scheduler.stats().num_swapped == 1
    while not executor.steps[-1].blocks_to_swap_in:
        run_step(scheduler, executor)
    tables = [kv.block_ids(seq_id) for seq_id in (1, 2)]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    run_all(scheduler, executor)
    assert sorted(free_ids(scheduler)) == list(range(1, 8))


@pytest.mark.parametrize(("num_host_blocks", "policies"), [(4, {}), (0, {}), (8, {"preemption_mode": "recompute"})])
def test_no_host_memory_or_too_little_recomputes(num_host_blocks: int, policies: dict[str, str]) -> None:
    scheduler, executor = _old_and_pair(num_host_blocks, **policies)  # 4 blocks: 3 usable, 4 wanted
    assert run_all(scheduler, executor) == _EXPECTED
    assert scheduler.stats().num_swapped_out_blocks == 0
    assert scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(("mode", "swaps"), [("auto", False), ("swap", True)])
def test_single_sequences_swap_only_on_request(mode: str, swaps: bool) -> None:
    executor = FakeExecutor(num_blocks=5, block_size=2, num_host_blocks=5)
    scheduler = make_scheduler(executor, enable_prefix_caching=False, preemption_mode=mode)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=4))
    scheduler.add_request(make_request("b", [20, 21, 22], max_tokens=4))
    assert run_all(scheduler, executor) == {("a", 0): [12, 13, 14, 15], ("b", 0): [23, 24, 25, 26]}
    assert (scheduler.stats().num_swapped_out_blocks > 0) == swaps


def test_a_group_whose_other_sequences_have_finished_is_recomputed() -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    run_step(scheduler, executor)
    scheduler.finish_sequence("a", 1)
    scheduler.add_request(make_request("late", [60, 61, 62], max_tokens=5))
    run_all(scheduler, executor)
    assert scheduler.stats().num_preemptions > 0
    assert scheduler.stats().num_swapped_out_blocks == 0


def test_nobody_waits_in_front_of_the_swapped() -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    while not scheduler.queues.swapped:
        run_step(scheduler, executor)
    scheduler.add_request(make_request("late", [60], max_tokens=1))
    while scheduler.queues.swapped:
        step, _ = run_step(scheduler, executor)
        if scheduler.queues.swapped:
            assert 3 not in step.num_scheduled_tokens
    run_all(scheduler, executor)


@pytest.mark.parametrize("num_ended", [1, 2])
def test_swapped_sequences_may_end(num_ended: int) -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    while not scheduler.queues.swapped:
        run_step(scheduler, executor)
    for index in range(num_ended):
        scheduler.finish_sequence("a", index)
    scheduler.check_integrity()
    ended = {("a", index) for index in range(num_ended)}
    assert not ended & set(run_all(scheduler, executor))
    host_pool = scheduler.kv_cache_manager.host_blocks.block_pool
    assert host_pool is not None and host_pool.num_free_blocks == 7


def test_abort_while_swapped_frees_the_host_blocks() -> None:
    scheduler, executor = _old_and_pair(num_host_blocks=8)
    while not scheduler.queues.swapped:
        run_step(scheduler, executor)
    scheduler.abort_request("a")
    scheduler.check_integrity()
    host_pool = scheduler.kv_cache_manager.host_blocks.block_pool
    assert host_pool is not None and host_pool.num_free_blocks == 7
    run_all(scheduler, executor)


def test_what_comes_back_can_be_found_by_others() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=8, block_size=2, num_host_blocks=8)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("old", [50, 51, 52, 53], max_tokens=7))
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14], n=2, max_tokens=4))
    assert run_all(scheduler, executor) == _EXPECTED
    assert scheduler.stats().num_swapped_in_blocks > 0
    scheduler.add_request(make_request("b", [10, 11, 12, 13, 14], max_tokens=1))
    assert run_step(scheduler, executor)[1][0].num_cached_tokens == 4
