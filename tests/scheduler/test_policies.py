"""Policies: priority, whole prompts or decodes, thresholds, partial prompts, watermark."""

import pytest

from jaxllm.exceptions import InvalidRequestError
from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import make_request, make_scheduler, run_all, run_step


def test_priority_serves_the_lower_number_then_the_earlier_arrival_then_the_first_added() -> None:
    executor = FakeExecutor(max_num_seqs=1)
    scheduler = make_scheduler(executor, policy="priority")
    for request_id, priority, arrival_time_s in (
        ("late", 1, 5.0),
        ("early", 1, 4.0),
        ("early too", 1, 4.0),
        ("urgent", -1, 9.0),
        ("patient", 7, 0.0),
    ):
        request = make_request(request_id, [10], max_tokens=1, priority=priority, arrival_time_s=arrival_time_s)
        scheduler.add_request(request)
    assert [request_id for request_id, _ in run_all(scheduler, executor)] == [
        "urgent",
        "early",
        "early too",
        "late",
        "patient",
    ]


def test_fcfs_ignores_priority() -> None:
    executor = FakeExecutor(max_num_seqs=1)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], max_tokens=1, priority=1))
    scheduler.add_request(make_request("b", [10], max_tokens=1, priority=0))
    assert [request_id for request_id, _ in run_all(scheduler, executor)] == ["a", "b"]


def test_priority_preempts_the_highest_number_though_it_came_first() -> None:
    executor = FakeExecutor(num_blocks=5, block_size=2)  # 4 usable blocks
    scheduler = make_scheduler(executor, enable_prefix_caching=False, policy="priority")
    scheduler.add_request(make_request("b", [20, 21, 22], max_tokens=4, priority=1))
    run_step(scheduler, executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=5, priority=0))
    assert run_step(scheduler, executor)[0].num_scheduled_tokens == {0: 1, 1: 2}
    step = run_step(scheduler, executor)[0]  # "b" would stand before "a" in order of arrival, and be in the step
    assert (step.num_scheduled_tokens, step.dropped_seq_ids) == ({1: 1}, [0])
    assert scheduler.queues.running.first().request_id == "a"
    assert run_all(scheduler, executor) == {("a", 0): [14, 15, 16], ("b", 0): [25, 26]}


def test_budget_and_entries_are_whole_when_somebody_is_preempted() -> None:
    executor = FakeExecutor(num_blocks=8, block_size=1, max_num_batched_tokens=4)
    scheduler = make_scheduler(executor, enable_prefix_caching=False, policy="priority")
    for number, priority in enumerate((3, 2, 1)):
        scheduler.add_request(make_request(f"r{priority}", [10 * number + 10], max_tokens=6, priority=priority))
    tokens = run_all(scheduler, executor)  # FakeExecutor checks that the entries are the budget's
    assert {key: len(ids) for key, ids in tokens.items()} == {("r1", 0): 6, ("r2", 0): 6, ("r3", 0): 6}
    assert any(step.dropped_seq_ids for step in executor.steps)


def test_without_chunks_a_step_is_all_prompts_or_all_decodes() -> None:
    executor = FakeExecutor(max_num_batched_tokens=16)
    scheduler = make_scheduler(executor, max_model_len=16, enable_chunked_prefill=False)
    scheduler.add_request(make_request("a", list(range(10, 20)), max_tokens=4))
    scheduled = [run_step(scheduler, executor)[0].num_scheduled_tokens for _ in range(2)]
    for number in range(2):  # 10 + 10 tokens don't fit one step
        scheduler.add_request(make_request(f"r{number}", list(range(30, 40)), max_tokens=2))
    scheduled += [run_step(scheduler, executor)[0].num_scheduled_tokens for _ in range(4)]
    assert scheduled == [{0: 10}, {0: 1}, {1: 10}, {2: 10 - 8}, {0: 1, 1: 1, 2: 1}, {0: 1}]


def test_a_threshold_leaves_budget_to_others() -> None:
    executor = FakeExecutor(max_num_batched_tokens=8)
    scheduler = make_scheduler(executor, long_prefill_token_threshold=4)
    scheduler.add_request(make_request("long", list(range(10, 20)), max_tokens=1))
    scheduler.add_request(make_request("short", [50, 51], max_tokens=1))
    scheduler.add_request(make_request("long too", list(range(60, 66)), max_tokens=1))
    scheduled = [run_step(scheduler, executor)[0].num_scheduled_tokens for _ in range(4)]
    assert scheduled == [{0: 4, 1: 2}, {0: 4}, {0: 2, 2: 4}, {2: 2}]


def test_several_prompts_may_be_left_unfinished() -> None:
    executor = FakeExecutor(max_num_batched_tokens=9)
    scheduler = make_scheduler(executor, long_prefill_token_threshold=4, max_num_partial_prefills=2)
    for number in range(3):
        scheduler.add_request(make_request(f"r{number}", [10 + number] * 7, max_tokens=1))
    scheduled = [run_step(scheduler, executor)[0].num_scheduled_tokens for _ in range(3)]
    assert scheduled == [{0: 4, 1: 4}, {0: 3, 1: 3, 2: 3}, {2: 4}]


@pytest.mark.parametrize(("num_held", "expected"), [(0, "OK"), (10, "LATER")])
def test_oracle_of_the_watermark(num_held: int, expected: str) -> None:
    executor = FakeExecutor(num_blocks=101, block_size=16, max_num_batched_tokens=2048)
    scheduler = make_scheduler(executor, max_model_len=2048)  # 100 usable blocks, of which 1 is kept back
    if num_held:
        scheduler.add_request(make_request("held", [5] * 16 * num_held, max_tokens=2))
        run_step(scheduler, executor)
    scheduler.add_request(make_request("a", list(range(10, 1594)), max_tokens=1))  # 99 blocks
    run_step(scheduler, executor)
    assert len(scheduler.queues.waiting) == (expected == "LATER")


def test_oracle_of_the_watermark_never() -> None:
    executor = FakeExecutor(num_blocks=101, block_size=16, max_num_batched_tokens=2048)
    scheduler = make_scheduler(executor, max_model_len=2048)
    with pytest.raises(InvalidRequestError, match=r"\(1600 tokens\) must fit 99 of the KV cache's 100 blocks"):
        scheduler.add_request(make_request("a", list(range(1600)), max_tokens=1))


def test_appended_blocks_may_come_from_below_the_watermark() -> None:
    executor = FakeExecutor(num_blocks=11, block_size=1)  # 10 usable blocks, of which 5 are kept back
    scheduler = make_scheduler(executor, watermark=0.5)
    scheduler.add_request(make_request("a", [10], max_tokens=10))
    scheduler.add_request(make_request("b", [20], max_tokens=10))
    assert {key: len(ids) for key, ids in run_all(scheduler, executor).items()} == {("a", 0): 10, ("b", 0): 10}
