"""Scheduler, requests of one sequence: budget, seats, order, preemption, prefix hits, stop rules, abort."""

from typing import Any

import pytest

from jaxllm.exceptions import InvalidRequestError
from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import EOS, free_ids, make_request, make_scheduler, run_all, run_step, table


def test_tokens_follow_the_model() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=3))
    assert run_all(scheduler, executor) == {("a", 0): [12, 13, 14]}


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    executor = FakeExecutor(max_num_batched_tokens=6)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=6))
    run_step(scheduler, executor)
    scheduler.add_request(make_request("b", list(range(20, 33)), max_tokens=2))
    scheduled = [run_step(scheduler, executor)[0].num_scheduled_tokens for _ in range(4)]
    assert scheduled == [{0: 1, 1: 5}, {0: 1, 1: 5}, {0: 1, 1: 3}, {0: 1, 1: 1}]


def test_a_half_computed_prompt_brings_no_news() -> None:
    executor = FakeExecutor(max_num_batched_tokens=4)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11, 12, 13, 14], max_tokens=1))
    assert run_step(scheduler, executor)[1] == []
    (output,) = run_step(scheduler, executor)[1]
    assert [token.token_id for token in output.sequences[0].new_tokens] == [15]
    assert output.finished and output.sequences[0].finish_reason == "length"


def test_the_worker_is_told_each_thing_once() -> None:
    executor = FakeExecutor(block_size=2)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=4))
    first, second, third, fourth = (run_step(scheduler, executor)[0] for _ in range(4))
    assert [(new.seq_id, new.token_ids, new.block_ids, new.seed) for new in first.new_seqs] == [(0, [10, 11], [1], 100)]
    assert (second.new_seqs, second.cached_seqs.seq_ids) == ([], [0])
    assert (second.cached_seqs.new_token_ids, second.cached_seqs.new_block_ids) == ([[12]], [(2,)])
    assert (third.cached_seqs.new_token_ids, third.cached_seqs.new_block_ids) == ([[13]], [()])
    assert fourth.dropped_seq_ids == []
    scheduler.add_request(make_request("b", [5]))
    assert scheduler.schedule(0.0).dropped_seq_ids == [0]
    assert [step.step_id for step in executor.steps] == [0, 1, 2, 3]


def test_max_num_seqs_is_never_exceeded_and_order_is_kept() -> None:
    executor = FakeExecutor(max_num_seqs=2)
    scheduler = make_scheduler(executor)
    for seq_id in range(4):
        scheduler.add_request(make_request(f"r{seq_id}", [10 * seq_id + 10], max_tokens=seq_id + 1))
    scheduled = []
    while scheduler.has_unfinished_requests():
        scheduled.append(sorted(run_step(scheduler, executor)[0].num_scheduled_tokens))
    assert scheduled == [[0, 1], [1, 2], [2, 3], [2, 3], [3], [3]]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    executor = FakeExecutor(num_blocks=5)  # 4 usable blocks of 4 tokens
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", list(range(10, 19)), max_tokens=3))
    scheduler.add_request(make_request("big", list(range(30, 38)), max_tokens=1))
    scheduler.add_request(make_request("small", [50], max_tokens=1))
    assert run_step(scheduler, executor)[0].num_scheduled_tokens == {0: 9}
    assert run_step(scheduler, executor)[0].num_scheduled_tokens == {0: 1}
    assert [group.request_id for group in scheduler.queues.waiting] == ["big", "small"]
    run_all(scheduler, executor)


def test_the_newest_is_preempted_and_computed_again() -> None:
    executor = FakeExecutor(num_blocks=5, block_size=2)  # 4 usable blocks
    scheduler = make_scheduler(executor, enable_prefix_caching=False)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=4))
    scheduler.add_request(make_request("b", [20, 21, 22], max_tokens=4))
    assert run_step(scheduler, executor)[0].num_scheduled_tokens == {0: 2, 1: 3}
    assert run_step(scheduler, executor)[0].num_scheduled_tokens == {0: 1, 1: 1}
    scheduler.add_request(make_request("late", [40], max_tokens=1))
    step = run_step(scheduler, executor)[0]
    assert (step.num_scheduled_tokens, step.dropped_seq_ids) == ({0: 1}, [1])
    assert [group.request_id for group in scheduler.queues.waiting] == ["b", "late"]
    run_step(scheduler, executor)  # "a" ends here
    again = run_step(scheduler, executor)[0]
    assert [(new.token_ids, new.num_prompt_tokens) for new in again.new_seqs] == [
        ([20, 21, 22, 23, 24], 3),
        ([40], 1),
    ]
    assert again.num_scheduled_tokens == {1: 5, 2: 1}
    last = run_all(scheduler, executor)
    assert last == {("b", 0): [26]}  # 23 and 24 before, 25 in the step above: max_tokens didn't restart


def test_two_requests_of_60_percent_of_the_pool_both_finish() -> None:
    executor = FakeExecutor(num_blocks=11)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], max_tokens=24))
    scheduler.add_request(make_request("b", [50], max_tokens=24))
    tokens = run_all(scheduler, executor)
    assert tokens == {("a", 0): list(range(11, 35)), ("b", 0): list(range(51, 75))}
    assert sorted(free_ids(scheduler)) == list(range(1, 11))


def test_a_prefix_is_found_once_its_step_has_finished() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    prompt = list(range(10, 19))
    scheduler.add_request(make_request("a", prompt))
    scheduler.add_request(make_request("twin", prompt))
    step, _ = run_step(scheduler, executor)
    assert step.num_scheduled_tokens == {0: 9, 1: 9}  # nothing may be read that this step writes
    scheduler.add_request(make_request("later", prompt))
    step, outputs = run_step(scheduler, executor)
    assert step.num_scheduled_tokens == {0: 1, 1: 1, 2: 1}
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 8]
    assert table(scheduler, 2)[:2] == table(scheduler, 0)[:2]
    run_all(scheduler, executor)


def test_a_half_computed_prompt_leaves_only_what_it_computed() -> None:
    executor = FakeExecutor(max_num_batched_tokens=6)
    scheduler = make_scheduler(executor)
    prompt = list(range(10, 19))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    run_step(scheduler, executor)
    scheduler.add_request(make_request("twin", prompt, max_tokens=1))
    step, _ = run_step(scheduler, executor)  # completes the second block, which the twin mustn't read yet
    assert step.num_scheduled_tokens == {0: 3, 1: 3}
    assert [new.num_computed_tokens for new in step.new_seqs] == [4]
    scheduler.abort_request("twin")
    scheduler.add_request(make_request("other", list(range(30, 39)), max_tokens=1))
    run_step(scheduler, executor)
    scheduler.abort_request("other")
    scheduler.add_request(make_request("again", list(range(30, 39)), max_tokens=1))
    assert [new.num_computed_tokens for new in run_step(scheduler, executor)[0].new_seqs] == [4]


def test_an_exact_multiple_computes_its_last_block_again() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    prompt = list(range(10, 18))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    run_all(scheduler, executor)
    scheduler.add_request(make_request("b", prompt, max_tokens=1))
    step, (output,) = run_step(scheduler, executor)
    assert (step.num_scheduled_tokens, output.num_cached_tokens) == ({1: 4}, 4)
    kv = scheduler.kv_cache_manager
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (16, 4)


def test_a_preempted_request_is_not_counted_again() -> None:
    executor = FakeExecutor(num_blocks=5, block_size=2)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=4))
    scheduler.add_request(make_request("b", [20, 21, 22], max_tokens=4))
    run_all(scheduler, executor)
    assert len([new for step in executor.steps for new in step.new_seqs]) == 3  # "b" came twice
    assert scheduler.kv_cache_manager.num_queried_tokens == 5


def test_prompt_logprobs_do_not_read_the_cache_but_feed_it() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    prompt = list(range(10, 19))
    for request_id, expected in (("a", 0), ("b", 0)):
        scheduler.add_request(make_request(request_id, prompt, max_tokens=1, prompt_logprobs=0))
        (output,) = run_step(scheduler, executor)[1]
        assert output.num_cached_tokens == expected
        assert [-entry.logprob for entry in output.prompt_logprobs] == [1, 2, 3, 4, 5, 6, 7, 8]
    scheduler.add_request(make_request("c", prompt, max_tokens=1))
    assert run_step(scheduler, executor)[1][0].num_cached_tokens == 8


@pytest.mark.parametrize("max_num_batched_tokens", [3, 4, 64])
def test_each_prompt_logprob_comes_once_in_order_in_spite_of_chunks_and_preemption(
    max_num_batched_tokens: int,
) -> None:
    executor = FakeExecutor(num_blocks=8, block_size=2, max_num_batched_tokens=max_num_batched_tokens)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10, 11], max_tokens=9))
    scheduler.add_request(make_request("b", list(range(20, 28)), max_tokens=5, prompt_logprobs=0))
    positions = []
    while scheduler.has_unfinished_requests():
        for output in run_step(scheduler, executor)[1]:
            positions += [-entry.logprob for entry in output.prompt_logprobs]
    assert positions == [1, 2, 3, 4, 5, 6, 7]
    assert max(len(step.dropped_seq_ids) for step in executor.steps) > 0


@pytest.mark.parametrize(
    "max_tokens, params, expected",
    [
        (4, {}, ([8, 7, 6, 5], "length", None)),
        (7, {}, ([8, 7, 6, 5, 4, 3, 2], "stop", None)),  # end-of-sequence on the last allowed token is a stop
        (8, {"ignore_eos": True}, ([8, 7, 6, 5, 4, 3, 2, 1], "length", None)),
        (8, {"stop_token_ids": [6]}, ([8, 7, 6], "stop", 6)),
        (8, {"stop_token_ids": [EOS]}, ([8, 7, 6, 5, 4, 3, 2], "stop", None)),
        # B53: before token number min_tokens nothing ends it but its length; that one may.
        (8, {"stop_token_ids": [6], "min_tokens": 3}, ([8, 7, 6], "stop", 6)),
        (8, {"stop_token_ids": [6], "min_tokens": 4}, ([8, 7, 6, 5, 4, 3, 2], "stop", None)),
        (8, {"stop_token_ids": [6], "min_tokens": 8}, ([8, 7, 6, 5, 4, 3, 2, 1], "length", None)),
        (8, {"stop_token_ids": [EOS], "ignore_eos": True}, ([8, 7, 6, 5, 4, 3, 2], "stop", EOS)),
    ],
)
def test_stop_rules(max_tokens: int, params: dict[str, Any], expected: tuple[list[int], str, int | None]) -> None:
    executor = FakeExecutor(lambda token_ids: token_ids[-1] - 1)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [9], max_tokens=max_tokens, **params))
    tokens: list[int] = []
    while scheduler.has_unfinished_requests():
        (output,) = run_step(scheduler, executor)[1]
        tokens += [token.token_id for token in output.sequences[0].new_tokens]
    last = output.sequences[0]
    assert (tokens, last.finish_reason, last.stop_reason) == expected


def test_max_model_len_ends_a_sequence() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor, max_model_len=6)
    scheduler.add_request(make_request("a", [10, 11, 12], max_tokens=9))
    assert run_all(scheduler, executor) == {("a", 0): [13, 14, 15]}


@pytest.mark.parametrize(
    "prompt, max_tokens, params, words",
    [
        ([], 1, {}, "at least 1 token"),
        ([1, 2**63], 1, {}, r"token ids must be in \[0, 2147483647\]"),
        ([-1], 1, {}, "token ids"),
        (list(range(32)), 1, {}, "max_model_len=32 tokens to leave room for an answer, got 32"),
        (list(range(20)), 2, {"n": 9}, "max_num_seqs=8, got 9"),
        (list(range(20)), 10, {}, "KV cache of 7 blocks of 4 tokens, got 8 blocks"),
    ],
)
def test_what_can_never_run_is_refused_and_the_queue_moves(
    prompt: list[int], max_tokens: int, params: dict[str, Any], words: str
) -> None:
    executor = FakeExecutor(num_blocks=8)
    scheduler = make_scheduler(executor, max_model_len=32)
    with pytest.raises(InvalidRequestError, match=words):
        scheduler.add_request(make_request("bad", prompt, max_tokens=max_tokens, **params))
    scheduler.check_integrity()
    scheduler.add_request(make_request("bad", [10], max_tokens=1))
    assert run_all(scheduler, executor) == {("bad", 0): [11]}


def test_what_just_fits_the_pool_runs() -> None:
    executor = FakeExecutor(num_blocks=8)
    scheduler = make_scheduler(executor, max_model_len=40)
    scheduler.add_request(make_request("a", list(range(10, 30)), max_tokens=9))  # 28 tokens need room: 7 blocks
    assert run_all(scheduler, executor) == {("a", 0): list(range(30, 39))}


def test_a_live_request_id_is_refused_and_free_again_afterwards() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], max_tokens=1))
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        scheduler.add_request(make_request("a", [20], max_tokens=1))
    assert run_all(scheduler, executor) == {("a", 0): [11]}
    scheduler.add_request(make_request("a", [20], max_tokens=1))
    assert run_all(scheduler, executor) == {("a", 0): [21]}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])  # waiting, half a prompt, decoding, ...
def test_abort_at_every_phase_frees_everything(num_steps: int) -> None:
    executor = FakeExecutor(max_num_batched_tokens=5)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", list(range(10, 18)), n=2, max_tokens=8))
    scheduler.add_request(make_request("b", [50], max_tokens=2))
    for _ in range(num_steps):
        run_step(scheduler, executor)
    scheduler.abort_request("a")
    scheduler.abort_request("a")
    scheduler.abort_request("unknown")
    scheduler.check_integrity()
    run_all(scheduler, executor)
    assert sorted(free_ids(scheduler)) == list(range(1, 64))


def test_abort_while_a_step_runs() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", list(range(10, 18))))
    scheduler.add_request(make_request("b", [50], max_tokens=2))
    step = scheduler.schedule(0.0)
    scheduler.abort_request("a")
    outputs = scheduler.update_from_output(step, executor.execute_model(step)).outputs
    scheduler.check_integrity()
    assert [output.request_id for output in outputs] == ["b"]
    assert scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block == {}  # never written to its end
    assert run_all(scheduler, executor) == {("b", 0): [52]}


def test_salts_part_the_cache() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    cached = []
    for request_id, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        scheduler.add_request(make_request(request_id, list(range(10, 19)), max_tokens=1, cache_salt=salt))
        cached.append(run_step(scheduler, executor)[1][0].num_cached_tokens)
    assert cached == [0, 0, 0, 8]


def test_first_scheduled_time_is_the_clock_of_the_first_step() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", [10], max_tokens=2))
    times = []
    for now_s in (5.0, 6.0):
        step = scheduler.schedule(now_s)
        (output,) = scheduler.update_from_output(step, executor.execute_model(step)).outputs
        times.append(output.first_scheduled_time_s)
    assert times == [5.0, 5.0]
