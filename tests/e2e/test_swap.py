"""A model's tokens don't depend on the pool's size, on swapping, recomputing, caching or chunking: tiny and real.

Greedy, seeded, n = 2 and 4, and beams 2 and 4 run in one batch.
"""

from typing import NamedTuple

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and in it lived an old man who told the children",
    "The three primary colours are red, blue and",
    "To bake bread you need flour, water, salt and",
    "My favourite season is",
    "A good way to learn a language is",
]
TINY_PROMPTS = [np.random.default_rng(size).integers(3, 300, size).tolist() for size in (5, 24, 9, 10, 6, 8)]
NUM_TOKENS = 40
ARGS = {"max_num_seqs": 16, "max_model_len": 128, "max_num_batched_tokens": 128, "block_size": 16}
# One sequence takes up to 4 blocks, and a pair or four of them up to 14: nothing runs beside it for long.
SMALL_POOL = {"num_gpu_blocks_override": 18}


def _params(**params):
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)


class LargePool(NamedTuple):
    """A model and what it says where there are blocks for everybody."""

    path: str
    prompts: list
    tokens: list


def _generate(llm, prompts):
    params = [
        _params(temperature=0.0),
        _params(temperature=0.9, seed=3),
        *(_params(n=n, temperature=0.9, seed=11) for n in (2, 4)),
        *(_params(n=n, temperature=0.0, use_beam_search=True) for n in (2, 4)),
    ]
    return [[seq.token_ids for seq in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


def _large_pool(path, prompts):
    with LLM(model=str(path), enable_prefix_caching=False, **ARGS) as llm:
        tokens = _generate(llm, prompts)
        stats = llm.llm_engine.stats
        assert (stats.num_preemptions, stats.num_swapped_out_blocks) == (0, 0)
        assert stats.num_copied_blocks > 0
        return LargePool(str(path), prompts, tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return _large_pool(write_tiny_folder(tmp_path_factory.mktemp("tiny"), tiny_llama()), TINY_PROMPTS)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return _large_pool(smollm2_path, PROMPTS)


# What the engine is told, and whether blocks are swapped then.
VARIANTS = {
    "swap, cache": ({"enable_prefix_caching": True}, True),
    "swap, no cache": ({"enable_prefix_caching": False}, True),
    "recompute, cache": ({"enable_prefix_caching": True, "preemption_mode": "recompute"}, False),
    "no host memory, no cache": ({"enable_prefix_caching": False, "swap_space": 0}, False),
    "swap, whole prompts": ({"enable_chunked_prefill": False}, True),
    "swap, chunks of 16": ({"max_num_batched_tokens": 16}, True),
    "all swap, chunks of 64": ({"max_num_batched_tokens": 64, "preemption_mode": "swap"}, True),
    "swap, chunks of 2048": ({"max_num_batched_tokens": 2048}, True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_small_pool_gives_the_tokens_of_a_large_one(tiny, variant):
    _check_small_pool(tiny, *VARIANTS[variant])


@pytest.mark.parametrize("variant", ["recompute, cache", "swap, chunks of 16"])
def test_a_small_pool_of_the_real_model(smollm2, variant):
    _check_small_pool(smollm2, *VARIANTS[variant])


def _check_small_pool(large_pool, engine_args, swaps):
    with LLM(model=large_pool.path, **{**ARGS, **SMALL_POOL, **engine_args}) as llm:
        assert _generate(llm, large_pool.prompts) == large_pool.tokens
        stats = llm.llm_engine.stats
        assert stats.num_preemptions > 0
        assert stats.num_copied_blocks > 0
        assert (stats.num_swapped_out_blocks > 0) == (stats.num_swapped_in_blocks > 0) == swaps
        assert stats.num_swapped == 0
