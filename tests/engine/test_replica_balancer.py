"""Where requests go: hand-computed loads, and a random life of many requests whose loads are counted anew."""

import hypothesis.strategies as st
from hypothesis import given, settings

from jaxllm.engine.replica_balancer import ReplicaBalancer
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RefusedRequest,
    SampledToken,
    SchedulerStats,
    SequenceOutput,
)
from jaxllm.sampling_params import SamplingParams

STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0)


def request(
    request_id: str, prompt: list[int] | int, n: int = 1, max_tokens: int = 1000, salt: str | None = None
) -> EngineCoreRequest:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    return EngineCoreRequest(request_id, ids, SamplingParams(n=n), [], 0.0, 0, max_tokens=max_tokens, cache_salt=salt)


def news(request_id: str, *sequences: SequenceOutput, finished: bool = False) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(request_id, list(sequences), [], 0, 0.0, finished)], STATS)


def token(index: int, finish_reason: str | None = None) -> SequenceOutput:
    return SequenceOutput(index, [SampledToken(5)], finish_reason)


def test_equal_requests_go_round() -> None:
    balancer = ReplicaBalancer(3, 16, enable_affinity=False)
    assert [balancer.place(request(str(number), 10)) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert balancer.loads == [3 * 266, 2 * 266, 2 * 266]


def test_the_least_loaded_is_next_and_a_long_prompt_weighs_until_its_first_token() -> None:
    balancer = ReplicaBalancer(2, 16, enable_affinity=False)
    assert balancer.place(request("long", 1000)) == 0
    assert [balancer.place(request(str(number), 44)) for number in range(4)] == [1, 1, 1, 1]
    assert balancer.loads == [1256, 1200]
    balancer.update(news("long", token(0)))
    assert balancer.loads == [256, 1200]
    assert [balancer.place(request(f"next{number}", 44)) for number in range(3)] == [0, 0, 0]


def test_a_request_counts_by_its_sequences_and_by_what_they_may_generate() -> None:
    balancer = ReplicaBalancer(2, 16, enable_affinity=False)
    balancer.place(request("a", 10, n=4, max_tokens=100))
    balancer.place(request("b", 10, max_tokens=1))
    assert balancer.loads == [410, 11]


def test_a_request_is_known_until_it_ends_in_whatever_way() -> None:
    balancer = ReplicaBalancer(2, 16, enable_affinity=False)
    for name in ("finishes", "is refused", "is aborted", "stops"):
        balancer.place(request(name, 4, n=2))
    assert [balancer.engine_of(name) for name in ("finishes", "is refused", "is aborted", "stops")] == [0, 1, 0, 1]
    balancer.update(news("finishes", token(0, "length"), token(1)))
    assert balancer.loads[0] == 256 + 516
    balancer.update(news("finishes", token(1, "length"), finished=True))
    balancer.update(EngineCoreOutputs([], STATS, [RefusedRequest("is refused", "no")]))
    balancer.remove("is aborted")
    balancer.finish_sequence("stops", 1)
    balancer.finish_sequence("stops", 1)  # said twice
    assert balancer.engine_of("stops") == 1
    balancer.finish_sequence("stops", 0)  # the core will say nothing more about it
    assert balancer.loads == [0, 0]
    for name in ("finishes", "is refused", "is aborted", "stops", "unknown"):
        assert balancer.engine_of(name) is None
        balancer.remove(name)
        balancer.update(news(name, token(0), finished=True))
    assert balancer.loads == [0, 0]


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    balancer = ReplicaBalancer(4, 16)
    first = list(range(100))
    assert balancer.place(request("other", [7] * 100)) == 0
    assert balancer.place(request("first", first)) == 1
    for name in ("other", "first"):
        balancer.remove(name)
    # 64 of its tokens are the longest beginning that is remembered: 16, 32, 64, ...
    assert balancer.place(request("again", [*first, 1, 2, 3])) == 1
    assert balancer.loads == [0, 103 - 64 + 256, 0, 0]
    balancer.remove("again")
    assert balancer.place(request("a block in common", [*first[:16], 1, 2, 3])) == 1
    assert balancer.place(request("not a block", [*first[:15], 1, 2, 3])) == 2


def test_the_same_prompt_again_still_has_one_token_to_compute() -> None:
    balancer = ReplicaBalancer(1, 16)
    balancer.place(request("a", list(range(32))))
    balancer.remove("a")
    balancer.place(request("b", list(range(32)), max_tokens=1))
    assert balancer.loads == [2]


def test_affinity_ends_where_waiting_would_cost_more_than_computing_again() -> None:
    balancer = ReplicaBalancer(2, 16)
    prefix = list(range(1024))
    places = [balancer.place(request(str(number), [*prefix, number])) for number in range(12)]
    # The first waits with 1025 + 256 tokens of work, each further one adds 1 + 256 there; elsewhere it costs 1025.
    assert places[0] == 0 and places[1] == 1
    balancer = ReplicaBalancer(2, 16)
    balancer.place(request("first", [*prefix, 0]))
    balancer.update(news("first", token(0)))
    places = [balancer.place(request(str(number), [*prefix, number], max_tokens=255)) for number in range(4)]
    assert places == [0, 0, 0, 1]  # loads there: 256, 512, 768 and 1024, which is no longer less than 1024 saved


def test_salts_part_prefixes_and_no_prefix_cache_means_no_affinity() -> None:
    prompt = list(range(64))
    for affinity, salt, expected in ((True, None, 0), (True, "other", 1), (False, None, 1)):
        balancer = ReplicaBalancer(2, 16, enable_affinity=affinity)
        balancer.place(request("first", prompt))
        balancer.remove("first")
        assert balancer.place(request("second", prompt, salt=salt)) == expected


def test_forgotten_prefixes_draw_nobody() -> None:
    balancer = ReplicaBalancer(2, 16)
    balancer.place(request("first", list(range(64))))
    balancer.remove("first")
    balancer.forget_prefixes()
    assert balancer.place(request("second", list(range(64)))) == 1


def test_the_oldest_prefixes_are_forgotten() -> None:
    balancer = ReplicaBalancer(1, 1)
    for number in range(9000):
        balancer.place(request("r", [number, 0]))
        balancer.remove("r")
    assert len(balancer._replicas[0].prefixes) == 8192
    balancer.place(request("old", [0, 0], max_tokens=1))
    balancer.place(request("new", [8999, 0], max_tokens=1))
    assert balancer.loads == [3 + 2]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "token", "end", "abort", "stop", "refuse"]), st.integers(0, 5), st.integers(1, 3)
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_the_loads_are_those_of_the_requests_that_live(events: list[tuple[str, int, int]]) -> None:
    balancer = ReplicaBalancer(2, 4, enable_affinity=False)
    live: dict[str, tuple[int, int, set[int]]] = {}  # replica, waiting tokens, live sequences
    for kind, number, count in events:
        name = str(number)
        index = count - 1
        if kind == "place" and name not in live:
            index = balancer.place(request(name, [1] * (10 * count), n=count))
            live[name] = (index, 10 * count, set(range(count)))
        elif kind == "token":
            balancer.update(news(name, token(index)))
            if name in live:
                live[name] = (live[name][0], 0, live[name][2])
        elif kind == "end":
            balancer.update(news(name, token(0, "stop"), finished=True))
            live.pop(name, None)
        elif kind == "abort":
            balancer.remove(name)
            live.pop(name, None)
        elif kind == "refuse":
            balancer.update(EngineCoreOutputs([], STATS, [RefusedRequest(name, "no")]))
            live.pop(name, None)
        elif kind == "stop":
            balancer.finish_sequence(name, index)
            if name in live:
                live[name][2].discard(index)
                if not live[name][2]:
                    del live[name]
        expected = [0, 0]
        for replica, waiting, sequences in live.values():
            expected[replica] += waiting + 256 * len(sequences)
        assert balancer.loads == expected
        assert {name for name in "012345" if balancer.engine_of(name) is not None} == live.keys()
