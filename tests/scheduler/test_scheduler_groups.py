"""Scheduler, requests of several sequences: forks, copy-on-write, preemption, endings one by one."""

from collections.abc import Sequence

from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import EOS, free_ids, make_request, make_scheduler, run_all, run_step, table


def _by_seed(token_ids: Sequence[int], seed: int) -> int:
    """Draws that tell their seed and their position: seed 101 at position 6 gives 1016."""
    return 10 * seed + len(token_ids)


def test_the_prompt_is_computed_once_and_child_i_draws_from_seed_plus_i() -> None:
    executor = FakeExecutor(draw=_by_seed)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14, 15], n=3, max_tokens=3))
    step, (output,) = run_step(scheduler, executor)
    assert (step.num_scheduled_tokens, step.num_samples) == ({0: 6}, {0: 3})
    assert [(seq.index, seq.new_tokens[0].token_id) for seq in output.sequences] == [
        (0, 1006),
        (1, 1016),
        (2, 1026),
    ]
    step, _ = run_step(scheduler, executor)
    assert (step.num_scheduled_tokens, step.num_samples) == ({0: 1, 1: 1, 2: 1}, {})
    assert [(new.seq_id, new.token_ids[6:], new.seed, new.num_computed_tokens) for new in step.new_seqs] == [
        (1, [1016], 101, 6),
        (2, [1026], 102, 6),
    ]
    assert run_all(scheduler, executor) == {("a", 0): [1008], ("a", 1): [1018], ("a", 2): [1028]}


def test_oracle_of_copy_on_write() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=10)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14, 15], n=2, max_tokens=8))
    run_step(scheduler, executor)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    assert (table(scheduler, 0), table(scheduler, 1)) == ([1, 2], [1, 2])
    assert [blocks[block_id].ref_cnt for block_id in (1, 2)] == [2, 2]
    step, _ = run_step(scheduler, executor)
    assert step.blocks_to_copy == [(2, 3)]
    assert step.cached_seqs.replaced_blocks == [(0, 1, 3)]
    assert (table(scheduler, 0), table(scheduler, 1)) == ([1, 3], [1, 2])
    scheduler.finish_sequence("a", 0)
    assert free_ids(scheduler) == [4, 5, 6, 7, 8, 9, 3]
    assert blocks[1].ref_cnt == 1
    run_all(scheduler, executor)


def test_a_group_counts_n_from_the_start() -> None:
    executor = FakeExecutor(draw=_by_seed, max_num_seqs=4, max_num_batched_tokens=4)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14, 15], n=3, max_tokens=2))
    scheduler.add_request(make_request("b", [20], n=2, max_tokens=1))
    run_step(scheduler, executor)
    run_step(scheduler, executor)  # the budget has room for "b" here, the seats haven't
    assert [group.request_id for group in scheduler.queues.waiting] == ["b"]
    assert set(run_all(scheduler, executor)) == {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)}


def test_a_parent_may_end_with_its_first_draw() -> None:
    executor = FakeExecutor(draw=lambda token_ids, seed: EOS if seed == 100 else _by_seed(token_ids, seed))
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14], n=2, max_tokens=3))
    (output,) = run_step(scheduler, executor)[1]
    assert [(seq.index, seq.finish_reason) for seq in output.sequences] == [(0, "stop"), (1, None)]
    assert not output.finished
    assert run_all(scheduler, executor) == {("a", 1): [1016, 1017]}
    assert len(free_ids(scheduler)) == 63


def test_a_child_that_the_worker_never_saw_is_not_dropped() -> None:
    executor = FakeExecutor(draw=lambda token_ids, seed: EOS if seed == 101 else _by_seed(token_ids, seed))
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14], n=2, max_tokens=3))
    run_all(scheduler, executor)
    assert [step.dropped_seq_ids for step in executor.steps] == [[], [], []]


def test_finish_sequence_ends_one_and_the_other_goes_on() -> None:
    executor = FakeExecutor(draw=_by_seed)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], n=2, max_tokens=3))
    run_step(scheduler, executor)
    for request_id, index in (("a", 1), ("a", 1), ("a", 7), ("unknown", 0)):
        scheduler.finish_sequence(request_id, index)
    scheduler.check_integrity()
    assert run_all(scheduler, executor) == {("a", 0): [1002, 1003]}
    scheduler.add_request(make_request("b", [10], n=2, max_tokens=3))
    run_step(scheduler, executor)
    scheduler.finish_sequence("b", 0)
    scheduler.finish_sequence("b", 1)
    assert not scheduler.has_unfinished_requests()


def test_finish_sequence_while_a_step_runs() -> None:
    executor = FakeExecutor(draw=_by_seed)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], n=2, max_tokens=3))
    run_step(scheduler, executor)
    step = scheduler.schedule(0.0)
    scheduler.finish_sequence("a", 0)
    (output,) = scheduler.update_from_output(step, executor.execute_model(step)).outputs
    assert [seq.index for seq in output.sequences] == [1]


def test_siblings_that_cannot_all_fit_run_one_after_another() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=7, block_size=2)  # 6 usable; each sequence grows to 5
    scheduler = make_scheduler(executor, enable_prefix_caching=False)
    scheduler.add_request(make_request("a", [10, 11, 12], n=3, max_tokens=8))
    tokens = run_all(scheduler, executor)
    assert tokens == {
        ("a", 0): [1003, 1004, 1005, 1006, 1007, 1008, 1009, 1010],
        ("a", 1): [1013, 1014, 1015, 1016, 1017, 1018, 1019, 1020],
        ("a", 2): [1023, 1024, 1025, 1026, 1027, 1028, 1029, 1030],
    }
    assert any(step.dropped_seq_ids for step in executor.steps)


def test_a_displaced_sibling_comes_before_everybody_who_waits() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=7, block_size=2)
    scheduler = make_scheduler(executor, enable_prefix_caching=False)
    scheduler.add_request(make_request("a", [10, 11, 12], n=2, max_tokens=8))
    scheduler.add_request(make_request("late", list(range(20, 31)), max_tokens=1))
    scheduled = []
    while scheduler.has_unfinished_requests():
        scheduled.append(run_step(scheduler, executor)[0].num_scheduled_tokens)
    # Child 1 (id 2) is displaced in the fifth step, when it and its elder both need a fifth block.
    assert scheduled[:4] == [{0: 3}, {0: 1, 2: 1}, {0: 1, 2: 1}, {0: 1, 2: 1}]
    assert scheduled[4:] == [{0: 1}, {0: 1}, {0: 1}, {0: 1}, {2: 7}, {2: 1}, {2: 1}, {2: 1}, {1: 11}]


def test_nobody_comes_in_when_somebody_was_preempted() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=8, block_size=2)  # 7 usable
    scheduler = make_scheduler(executor, enable_prefix_caching=False)
    scheduler.add_request(make_request("old", [50], max_tokens=9))
    scheduler.add_request(make_request("a", [10, 11, 12], n=2, max_tokens=6))
    run_all(scheduler, executor)
    preempting, following = executor.steps[4:6]
    assert (preempting.num_scheduled_tokens, preempting.dropped_seq_ids) == ({0: 1}, [1, 2])
    assert following.num_scheduled_tokens == {0: 1, 1: 7}  # child 0 had room one step earlier already


def test_a_preempted_group_comes_back_sequence_by_sequence_through_the_cache() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=8, block_size=2)  # 7 usable
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("old", [50, 51, 52, 53], max_tokens=7))
    scheduler.add_request(make_request("a", [10, 11, 12], n=2, max_tokens=5))
    tokens = run_all(scheduler, executor)
    assert tokens[("a", 0)] == [1003, 1004, 1005, 1006, 1007]
    assert tokens[("a", 1)] == [1013, 1014, 1015, 1016, 1017]
    # Child 1 gives way to its sibling, then the sibling to "old"; they come back when "old" has ended.
    assert [step.dropped_seq_ids for step in executor.steps] == [[], [], [2], [], [1], [], [], [0], [1], []]
    back = executor.steps[7]
    assert [(new.seq_id, new.token_ids, new.num_computed_tokens) for new in back.new_seqs] == [
        (1, [10, 11, 12, 1003, 1004, 1005, 1006], 4),
        (2, [10, 11, 12, 1013, 1014], 2),
    ]
    assert back.num_scheduled_tokens == {1: 3, 2: 3}
    assert len(free_ids(scheduler)) == 7


def test_prompt_logprobs_of_a_group_come_once() -> None:
    executor = FakeExecutor(draw=_by_seed, num_blocks=7, block_size=2)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12], n=3, max_tokens=8, prompt_logprobs=2))
    positions = []
    while scheduler.has_unfinished_requests():
        for output in run_step(scheduler, executor)[1]:
            positions += [-entry.logprob for entry in output.prompt_logprobs]
    assert positions == [1, 2]
