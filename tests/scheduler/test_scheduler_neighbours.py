"""A request's tokens never depend on its neighbours, on memory, on chunks or on the prefix cache."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import make_request, make_scheduler, run_all

_REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(5, 6), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 12)),
    min_size=1,
    max_size=6,
)  # prompt, n, max_tokens
_Tokens = dict[tuple[str, int], list[int]]


def _draw(token_ids: Sequence[int], seed: int) -> int:
    return 5 + hash((tuple(token_ids), seed)) % 40


def _run(
    requests: list[tuple[list[int], int, int]], num_blocks: int, max_num_batched_tokens: int, caching: bool
) -> _Tokens:
    executor = FakeExecutor(
        draw=_draw,
        num_blocks=num_blocks,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    scheduler = make_scheduler(executor, enable_prefix_caching=caching)
    for position, (prompt, n, max_tokens) in enumerate(requests):
        scheduler.add_request(make_request(f"r{position}", prompt, max_tokens=max_tokens, n=n))
    return run_all(scheduler, executor)


@settings(max_examples=60, deadline=None)
@given(_REQUESTS, st.integers(13, 30), st.integers(1, 16), st.booleans())
def test_tokens_are_those_of_a_large_pool(
    requests: list[tuple[list[int], int, int]], num_blocks: int, max_num_batched_tokens: int, caching: bool
) -> None:
    expected = _run(requests, num_blocks=400, max_num_batched_tokens=200, caching=False)
    assert len(expected) == sum(n for _, n, _ in requests)
    assert _run(requests, num_blocks, max_num_batched_tokens, caching) == expected
