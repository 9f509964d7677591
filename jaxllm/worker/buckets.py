"""The ladder of padded sizes. Every compiled program stands on one of its rungs."""

from collections.abc import Sequence

from jaxllm.intmath import next_power_of_2

_FIRST_RUNG_ACCELERATOR = 16  # smaller matrices don't fill a tile


def token_ladder(max_num_batched_tokens: int, platform: str) -> tuple[int, ...]:
    """Returns the padded token counts T: powers of two, the last one at least max_num_batched_tokens.

    >>> token_ladder(5, "cpu")
    (1, 2, 4, 8)
    >>> token_ladder(32, "tpu")
    (16, 32)
    """
    first = 1 if platform == "cpu" else _FIRST_RUNG_ACCELERATOR
    last = max(next_power_of_2(max_num_batched_tokens), first)
    return tuple(1 << exponent for exponent in range(first.bit_length() - 1, last.bit_length()))


def num_seqs_at(num_tokens: int, max_num_seqs: int) -> int:
    """Returns S (and R), the padded sequences and draws of a step of T tokens: each needs a token."""
    return min(num_tokens, max_num_seqs)


def pick_bucket(ladder: Sequence[int], size: int) -> int:
    """Returns the first rung that holds `size`.

    Raises:
      ValueError: `size` is past the last rung.
    """
    for rung in ladder:
        if size <= rung:
            return rung
    raise ValueError(f"{size} is past the last bucket {ladder[-1]}")
