"""The ladder of padded sizes. Every compiled program stands on one of its rungs."""

from collections.abc import Sequence

# With one row to write, XLA:CPU copies the whole KV cache. A product with 8 rows costs little more than one with 2.
_FIRST_RUNGS_CPU = (2, 8)
_FIRST_RUNGS_ACCELERATOR = (16,)  # smaller matrices don't fill a tile
_MAX_NUM_DRAWS_CPU = 64
_MAX_PASS_TOKENS_CPU = 256  # long before this a CPU's time grows with the tokens; every rung costs start-up


def token_ladder(max_num_batched_tokens: int, platform: str) -> tuple[int, ...]:
    """Returns the padded token counts T of a forward pass: powers of two.

    The last one is at least max_num_batched_tokens, but on CPU no more than 256: there, larger steps take several
    passes, see `pass_lens`.

    >>> token_ladder(100, "cpu")
    (2, 8, 16, 32, 64, 128)
    >>> token_ladder(32, "tpu")
    (16, 32)
    """
    first = _FIRST_RUNGS_CPU if platform == "cpu" else _FIRST_RUNGS_ACCELERATOR
    most = min(max_num_batched_tokens, _MAX_PASS_TOKENS_CPU) if platform == "cpu" else max_num_batched_tokens
    ladder = [rung for rung in first if rung < 2 * most] or [first[0]]
    while ladder[-1] < most:
        ladder.append(1 << ladder[-1].bit_length())  # the next power of two
    return tuple(ladder)


def pass_lens(ladder: Sequence[int], num_tokens: int, num_stages: int = 1) -> list[int]:
    """Returns how many tokens each forward pass of a step computes: full passes, then what is left.

    A pipeline of stages gets as many passes as it can work on at once.

    >>> pass_lens((64, 128), 300)
    [128, 128, 44]
    >>> pass_lens((64, 128), 5, num_stages=2)
    [3, 2]
    """
    full = min(ladder[-1], max(1, -(-num_tokens // num_stages)))
    num_full, left = divmod(num_tokens, full)
    return [full] * num_full + [left] * (left > 0)


def num_seqs_at(num_tokens: int, max_num_seqs: int) -> int:
    """Returns S, the padded sequences of a step of T tokens: each needs a token. The same holds for draws, R."""
    return min(num_tokens, max_num_seqs)


def max_num_draws(max_num_seqs: int, platform: str) -> int:
    """Returns the most draws that are made together; a step with more makes them in several rounds.

    On a CPU larger rounds are no faster, and each padded size R costs start-up and memory.
    """
    return min(max_num_seqs, _MAX_NUM_DRAWS_CPU) if platform == "cpu" else max_num_seqs


def pick_bucket(ladder: Sequence[int], size: int) -> int:
    """Returns the first rung that holds `size`.

    Raises:
      ValueError: `size` is past the last rung.
    """
    for rung in ladder:
        if size <= rung:
            return rung
    raise ValueError(f"{size} is past the last bucket {ladder[-1]}")
