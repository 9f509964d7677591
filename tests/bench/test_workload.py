"""The prompts of a benchmark."""

from jaxllm.bench.workload import random_prompts, repeat


def test_repeat_goes_round() -> None:
    assert repeat(["a", [1, 2]], 5) == ["a", [1, 2], "a", [1, 2], "a"]
    assert repeat(["a", "b", "c"], 2) == ["a", "b"]


def test_random_prompts_have_the_asked_size_and_avoid_excluded_ids() -> None:
    prompts = random_prompts(num_prompts=50, input_len=7, vocab_size=5, excluded={0, 3}, seed=1)
    assert [len(prompt) for prompt in prompts] == [7] * 50
    assert {token_id for prompt in prompts for token_id in prompt} == {1, 2, 4}


def test_random_prompts_depend_on_the_seed_alone() -> None:
    first = random_prompts(2, 8, 1000, (), seed=1)
    assert random_prompts(2, 8, 1000, (), seed=1) == first
    assert random_prompts(2, 8, 1000, (), seed=2) != first
    assert first[0] != first[1]
