"""The ladder of padded sizes. Every compiled program stands on one of its rungs."""

from collections.abc import Sequence

# With one row to write, XLA:CPU copies the whole KV cache. A product with 8 rows costs little more than one with 2.
_FIRST_RUNGS_CPU = (2, 8)
_FIRST_RUNGS_ACCELERATOR = (16,)  # smaller matrices don't fill a tile
_MAX_NUM_DRAWS_CPU = 64
_HALF_STEPS_FROM_CPU = 256  # from here on a CPU's time grows with the tokens


def token_ladder(max_num_batched_tokens: int, platform: str) -> tuple[int, ...]:
    """Returns the padded token counts T: powers of two, the last one at least max_num_batched_tokens.

    On CPU, where padding costs as much as real tokens do, large rungs also have one half-way between.

    >>> token_ladder(700, "cpu")
    (2, 8, 16, 32, 64, 128, 256, 384, 512, 768)
    >>> token_ladder(32, "tpu")
    (16, 32)
    """
    first = _FIRST_RUNGS_CPU if platform == "cpu" else _FIRST_RUNGS_ACCELERATOR
    ladder = [rung for rung in first if rung < 2 * max_num_batched_tokens] or [first[0]]
    while ladder[-1] < max_num_batched_tokens:
        rung = 1 << ladder[-1].bit_length()  # the next power of two
        if platform == "cpu" and ladder[-1] >= _HALF_STEPS_FROM_CPU and ladder[-1] == rung // 2:
            rung = rung * 3 // 4
        ladder.append(rung)
    return tuple(ladder)


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
