"""Beam search: its rules by hand, and whole searches against references that are too simple to be wrong."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import EngineCoreOutput, SequenceOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.beam_search import is_over, score
from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import EOS, free_ids, make_request, make_scheduler, run_step, table
from tests.scheduler.builders import beam_params as _beams

PROMPT = [5, 6, 7, 8, 9]


def _search(executor: FakeExecutor, max_tokens: int = 4, **params) -> list[SequenceOutput]:
    """Runs one beam search to its end, the ledger and the content checked at each step."""
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", PROMPT, max_tokens, **_beams(**params)))
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_unfinished_requests():
        assert not outputs, "something was said before the end"
        outputs = run_step(scheduler, executor)[1]
    (output,) = outputs
    assert output.finished
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_usable_blocks
    return output.sequences


def _ids(output: SequenceOutput) -> list[int]:
    return [token.token_id for token in output.new_tokens]


def _table_model(logits: dict[tuple[int, ...], dict[int, float]]):
    """A model given by probabilities: generated tokens -> {next token: probability}."""

    def candidates(token_ids: Sequence[int]) -> dict[int, float]:
        probs = logits[tuple(token_ids[len(PROMPT) :])]
        return {token_id: math.log(prob) for token_id, prob in probs.items()}

    return candidates


def _random_model(seed: int, vocab: int):
    """Every history has its own distribution over the tokens 0 .. vocab-1, EOS (2) among them."""

    def candidates(token_ids: Sequence[int]) -> dict[int, float]:
        weights = [((hash((seed, *token_ids, token_id)) >> 7) % 1000 + 1) / 100 for token_id in range(vocab)]
        total = math.log(sum(math.exp(weight) for weight in weights))
        return {token_id: weight - total for token_id, weight in enumerate(weights)}

    return candidates


# Greedy takes 10 (0.6) and then at best 0.3; the better sequence begins with 11.
GARDEN_PATH = {
    (): {10: 0.6, 11: 0.4},
    (10,): {10: 0.3, 11: 0.25, 12: 0.45 / 2, 13: 0.45 / 2},
    (11,): {10: 0.9, 11: 0.1},
}


def test_two_beams_find_what_greedy_misses() -> None:
    first, second = _search(FakeExecutor(candidates=_table_model(GARDEN_PATH)), max_tokens=2, n=2)
    assert (_ids(first), first.index, first.finish_reason) == ([11, 10], 0, "length")
    assert (_ids(second), second.index, second.finish_reason) == ([10, 10], 1, "length")
    assert first.cumulative_logprob == pytest.approx(math.log(0.36))
    assert second.cumulative_logprob == pytest.approx(math.log(0.18))


def test_width_one_is_greedy() -> None:
    (only,) = _search(FakeExecutor(candidates=_table_model(GARDEN_PATH)), max_tokens=2)
    assert _ids(only) == [10, 10]


def test_best_of_is_the_width_and_n_the_number_returned() -> None:
    (only,) = _search(FakeExecutor(candidates=_table_model(GARDEN_PATH)), max_tokens=2, n=1, best_of=2)
    assert _ids(only) == [11, 10]


SHORT_OR_LONG = {
    (): {EOS: 0.5, 10: 0.4, 11: 0.1},
    (10,): {10: 0.8, EOS: 0.15, 11: 0.05},
    (11,): {10: 0.5, EOS: 0.3, 11: 0.2},
    (10, 10): {EOS: 0.9, 10: 0.1},
    (10, 11): {EOS: 0.9, 10: 0.1},
    (11, 10): {EOS: 0.9, 10: 0.1},
}


@pytest.mark.parametrize(
    ("length_penalty", "best"),
    # Sums: EOS alone ln 0.5 = -0.693; 10 10 EOS ln 0.288 = -1.245, which by 3 tokens is -0.415.
    [(0.0, [EOS]), (1.0, [10, 10, EOS]), (-1.0, [EOS]), (0.5, [EOS]), (0.6, [10, 10, EOS])],
)
def test_b103_length_counts_generated_tokens_only(length_penalty: float, best: list[int]) -> None:
    executor = FakeExecutor(candidates=_table_model(SHORT_OR_LONG))
    first, second = _search(executor, max_tokens=3, n=2, length_penalty=length_penalty, early_stopping="never")
    assert (_ids(first), first.finish_reason, first.stop_reason) == (best, "stop", None)
    by_hand = {1: -0.6931 / 1**length_penalty, 3: -1.2448 / 3**length_penalty}
    assert by_hand[len(best)] == max(by_hand.values())


def test_an_ending_candidate_below_the_width_is_dropped() -> None:
    """EOS ranks third: not among the first two. It fills no place among the hypotheses."""
    model = {(): {10: 0.5, 11: 0.3, EOS: 0.2}, (10,): {10: 0.9, 11: 0.1}, (11,): {10: 0.9, 11: 0.1}}
    outputs = _search(FakeExecutor(candidates=_table_model(model)), max_tokens=2, n=2)
    assert [_ids(output) for output in outputs] == [[10, 10], [11, 10]]


def test_ignore_eos_goes_on_after_it() -> None:
    model = {(): {EOS: 0.9, 10: 0.1}, (EOS,): {EOS: 0.9, 10: 0.1}, (10,): {EOS: 0.9, 10: 0.1}}
    outputs = _search(FakeExecutor(candidates=_table_model(model)), max_tokens=2, n=2, ignore_eos=True)
    assert [(_ids(output), output.finish_reason) for output in outputs] == [
        ([EOS, EOS], "length"),
        ([EOS, 10], "length"),
    ]


def test_a_stop_token_ends_a_beam_and_is_its_reason() -> None:
    model = {(): {10: 0.9, 11: 0.1}, (11,): {10: 0.9, 11: 0.1}, (11, 11): {10: 0.9, 11: 0.1}}
    outputs = _search(FakeExecutor(candidates=_table_model(model)), max_tokens=3, n=2, stop_token_ids=[10])
    assert [(_ids(output), output.stop_reason) for output in outputs][0] == ([10], 10)


def test_logprobs_come_with_the_tokens() -> None:
    first, _ = _search(FakeExecutor(candidates=_table_model(GARDEN_PATH)), max_tokens=2, n=2, logprobs=1)
    logprobs = [token.logprobs for token in first.new_tokens]
    assert [(entry.rank, entry.top_token_ids) for entry in logprobs] == [(2, [10]), (1, [10])]
    assert [entry.logprob for entry in logprobs] == pytest.approx([math.log(0.4), math.log(0.9)])
    assert [entry.top_logprobs[0] for entry in logprobs] == pytest.approx([math.log(0.6), math.log(0.9)])


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best_running", "expected"),
    [
        # Two have ended, the worse one at -1.0; live beams have 4 tokens and may have 8.
        (True, 1.0, -0.1, True),
        (False, 1.0, -3.9, False),  # -3.9 / 4 beats -1.0
        (False, 1.0, -4.0, True),
        (False, 1.0, -4.1, True),
        ("never", 1.0, -4.1, False),  # -4.1 / 8 could still beat it
        ("never", 1.0, -8.0, True),
        ("never", 0.0, -1.1, True),
        ("never", -1.0, -0.2, False),  # -0.2 * 4: longer is only worse
        ("never", -1.0, -0.3, True),
    ],
)
def test_when_the_search_is_over(
    early_stopping: bool | str, length_penalty: float, best_running: float, expected: bool
) -> None:
    params = SamplingParams(**_beams(n=2, early_stopping=early_stopping, length_penalty=length_penalty))
    assert is_over(params, [-0.5, -1.0], best_running, 4, 8) is expected
    assert is_over(params, [-0.5], best_running, 4, 8) is False, "only once as many have ended as there are beams"


def test_only_the_best_that_have_ended_are_compared_with() -> None:
    """EOS alone scores ln 0.35 = -1.05, then 10 EOS with -0.886 takes its place.

    10 10 has ln 0.0544 = -2.91: at 3 tokens that would be -0.970, which beats the first and not the second.
    """
    model = {(): {EOS: 0.35, 10: 0.34, 11: 0.31}, (10,): {EOS: 0.5, 10: 0.16, 11: 0.15}}
    executor = FakeExecutor(candidates=_table_model(model))
    (only,) = _search(executor, max_tokens=3, n=1, early_stopping="never")
    assert _ids(only) == [10, EOS]
    assert len(executor.steps) == 2


def _reference(model, width: int, max_tokens: int, length_penalty: float, early_stopping: bool | str):
    """Beam search on plain tuples: (score, tokens, cumulative log probability), best first; and the number of steps."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...], float]] = []
    for length in range(1, max_tokens + 1):
        options = [
            (total + logprob, (*tokens, token_id))
            for total, tokens in live
            for token_id, logprob in model([*PROMPT, *tokens]).items()
        ]
        options.sort(key=lambda option: -option[0])
        for total, tokens in options[:width]:
            if tokens[-1] == EOS or length == max_tokens:
                ended.append((total / length**length_penalty, tokens, total))
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        live = [(total, tokens) for total, tokens in options if tokens[-1] != EOS][:width]
        if len(ended) == width and live:
            reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or live[0][0] / reach**length_penalty <= ended[-1][0]:
                break
    return ended, length


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(3, 6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.sampled_from([12, 14, 20, 64]),
    max_num_batched_tokens=st.sampled_from([5, 6, 64]),
)
def test_equals_the_plain_reference(
    seed, vocab, width, max_tokens, length_penalty, early_stopping, block_size, num_blocks, max_num_batched_tokens
) -> None:
    """Also in pools and token budgets too small for all beams at once."""
    model = _random_model(seed, vocab)
    executor = FakeExecutor(
        candidates=model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    outputs = _search(executor, max_tokens, n=width, length_penalty=length_penalty, early_stopping=early_stopping)
    expected, num_steps = _reference(model, width, max_tokens, length_penalty, early_stopping)
    assert [tuple(_ids(output)) for output in outputs] == [tokens for _, tokens, _ in expected]
    assert [output.cumulative_logprob for output in outputs] == pytest.approx([total for _, _, total in expected])
    if num_blocks == max_num_batched_tokens == 64:
        assert len(executor.steps) == num_steps


@given(seed=st.integers(0, 10**6), vocab=st.integers(3, 4), length_penalty=st.sampled_from([0.0, 1.0]))
def test_a_width_that_covers_everything_finds_the_best_of_all(seed: int, vocab: int, length_penalty: float) -> None:
    model, max_tokens = _random_model(seed, vocab), 3

    def all_of(tokens: tuple[int, ...], total: float):
        if tokens and (tokens[-1] == EOS or len(tokens) == max_tokens):
            yield score(total, len(tokens), length_penalty), tokens
            return
        for token_id, logprob in model([*PROMPT, *tokens]).items():
            yield from all_of((*tokens, token_id), total + logprob)

    best = max(all_of((), 0.0))
    # At most 3 * 3 histories of two tokens live: width 12 keeps them all, and with it each one's best ending.
    executor = FakeExecutor(candidates=model, max_num_seqs=12, num_blocks=128)
    outputs = _search(executor, max_tokens, n=1, best_of=12, length_penalty=length_penalty, early_stopping="never")
    assert tuple(_ids(outputs[0])) == best[1]


def test_oracle_of_shared_and_copied_blocks() -> None:
    """The prompt's 5 tokens fill block 1 and begin block 2; both beams share them, then one copies block 2."""
    scheduler = make_scheduler(executor := FakeExecutor(candidates=_table_model(GARDEN_PATH), num_blocks=10))
    scheduler.add_request(make_request("a", PROMPT, 2, **_beams(n=2)))
    run_step(scheduler, executor)
    (group,) = scheduler.queues.running
    assert [beam.token_ids[5:] for beam in group.seqs] == [[10], [11]]
    assert (table(scheduler, 0), table(scheduler, 1)) == ([1, 2], [1, 2])
    step = scheduler.schedule(0.0)
    assert step.blocks_to_copy == [(2, 3)]
    assert (table(scheduler, 0), table(scheduler, 1)) == ([1, 3], [1, 2])
    scheduler.update_from_output(step, executor.execute_model(step))
    assert len(free_ids(scheduler)) == 9


def test_children_are_forked_before_their_parent_is_freed() -> None:
    """Both beams of the second step come from 11; 10's own blocks go back, the shared ones stay."""
    model = {
        (): {10: 0.6, 11: 0.4},
        (10,): {10: 0.2, 11: 0.2, 12: 0.2, 13: 0.4 / 2, 14: 0.4 / 2},
        (11,): {10: 0.5, 11: 0.5},
        (11, 10): {10: 1.0},
        (11, 11): {10: 1.0},
    }
    scheduler = make_scheduler(executor := FakeExecutor(candidates=_table_model(model), num_blocks=10))
    scheduler.add_request(make_request("a", PROMPT, 3, **_beams(n=2)))
    run_step(scheduler, executor)
    run_step(scheduler, executor)
    (group,) = scheduler.queues.running
    assert [(beam.seq_id, beam.token_ids[5:]) for beam in group.seqs] == [(1, [11, 10]), (2, [11, 11])]
    assert [table(scheduler, beam.seq_id)[0] for beam in group.seqs] == [1, 1]
    run_step(scheduler, executor)
    assert not scheduler.has_unfinished_requests()


def test_beams_that_cannot_all_fit_take_turns() -> None:
    """7 usable blocks of one token: at the end a single beam needs all of them."""
    model = _random_model(1, 5)
    large = _search(FakeExecutor(candidates=model), 3, n=3)
    executor = FakeExecutor(candidates=model, num_blocks=8, block_size=1)
    scheduler = make_scheduler(executor)
    scheduler.add_request(make_request("a", PROMPT, 3, **_beams(n=3)))
    scheduled, outputs = [], []
    while scheduler.has_unfinished_requests():
        step, outputs = run_step(scheduler, executor)
        scheduled.append(list(step.num_scheduled_tokens.values()))
    assert outputs[0].sequences == large
    assert scheduler.stats().num_preemptions > 0
    assert scheduler.stats().prefix_cache_queries == len(PROMPT), "a beam that comes back is no new lookup"
    assert len(scheduled) > 3 and all(scheduled), "beams took turns, and no step was empty"


def test_a_neighbour_is_left_alone_and_lets_the_beams_back_in() -> None:
    model = _random_model(3, 6)
    expected = _search(FakeExecutor(candidates=model), 6, n=3)
    executor = FakeExecutor(candidates=model, num_blocks=12, block_size=2)
    scheduler = make_scheduler(executor, enable_prefix_caching=False)
    scheduler.add_request(make_request("old", [50, 51], 15))
    scheduler.add_request(make_request("a", PROMPT, 6, **_beams(n=3)))
    scheduler.add_request(make_request("b", PROMPT, 6, **_beams(n=3)))
    found: dict[str, list[SequenceOutput]] = {}
    while scheduler.has_unfinished_requests():
        for output in run_step(scheduler, executor)[1]:
            found.setdefault(output.request_id, []).extend(output.sequences)
    assert [seq.new_tokens[0].token_id for seq in found["old"]] == list(range(52, 67))
    assert found["a"] == found["b"] == expected
    assert scheduler.stats().num_preemptions > 0


def test_an_abort_frees_every_beam() -> None:
    scheduler = make_scheduler(executor := FakeExecutor(candidates=_random_model(1, 6)))
    scheduler.add_request(make_request("a", PROMPT, 6, **_beams(n=4)))
    run_step(scheduler, executor)
    run_step(scheduler, executor)
    step = scheduler.schedule(0.0)
    scheduler.abort_request("a")
    scheduler.update_from_output(step, executor.execute_model(step))
    scheduler.check_integrity()
    assert not scheduler.has_unfinished_requests() and len(free_ids(scheduler)) == 63


def test_a_vocabulary_smaller_than_the_width_gives_what_there_is() -> None:
    outputs = _search(FakeExecutor(candidates=lambda token_ids: {4: 0.0}), 3, n=4)
    assert [_ids(output) for output in outputs] == [[4, 4, 4]]


def test_impossible_and_broken_candidates_come_last_and_break_nothing() -> None:
    model = {(): {10: math.nan, 11: -math.inf, 12: -0.1}}
    executor = FakeExecutor(candidates=lambda token_ids: model[()])
    outputs = _search(executor, 2, n=2)
    assert _ids(outputs[0]) == [12, 12]
    assert all(math.isfinite(output.cumulative_logprob) for output in outputs)


def test_a_search_counts_its_width_against_the_seats() -> None:
    scheduler = make_scheduler(executor := FakeExecutor(candidates=_random_model(1, 6), max_num_seqs=4))
    scheduler.add_request(make_request("a", PROMPT, 2, **_beams(n=1, best_of=3)))
    scheduler.add_request(make_request("b", PROMPT, 2, **_beams(n=2)))
    run_step(scheduler, executor)
    assert [group.request_id for group in scheduler.queues.waiting] == ["b"]
    with pytest.raises(InvalidRequestError, match="best_of must be at most max_num_seqs=4, got 5"):
        scheduler.add_request(make_request("c", PROMPT, 2, **_beams(n=1, best_of=5)))
