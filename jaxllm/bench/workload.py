"""The prompts of a benchmark. Knows nothing of engines or clocks."""

import random
from collections.abc import Collection, Sequence

from jaxllm.engine.input_processor import Prompt


def repeat(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Returns the first num_prompts of an endless repetition: repeat(["a", "b"], 3) is ["a", "b", "a"]."""
    return [prompts[idx % len(prompts)] for idx in range(num_prompts)]


def random_prompts(
    num_prompts: int, input_len: int, vocab_size: int, excluded: Collection[int], seed: int
) -> list[Prompt]:
    """Returns num_prompts lists of input_len token ids below vocab_size, none of them in `excluded`.

    The same seed gives the same prompts.
    """
    allowed = [token_id for token_id in range(vocab_size) if token_id not in excluded]
    draw = random.Random(seed)
    return [draw.choices(allowed, k=input_len) for _ in range(num_prompts)]
