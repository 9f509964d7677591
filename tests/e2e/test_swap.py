"""Tokens don't depend on the pool's size, on swapping, recomputing, caching or chunking: on the real model.

Greedy, seeded, n = 2 and 4, and beams 2 and 4 run in one batch.
"""

import pytest

from jaxllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and in it lived an old man who told the children",
    "The three primary colours are red, blue and",
    "To bake bread you need flour, water, salt and",
    "My favourite season is",
    "A good way to learn a language is",
]
NUM_TOKENS = 40
ARGS = {"max_num_seqs": 16, "max_model_len": 128, "max_num_batched_tokens": 128, "block_size": 16}
# One sequence takes up to 4 blocks, and a pair or four of them up to 14: nothing runs beside it for long.
SMALL_POOL = {"num_gpu_blocks_override": 18}


def _params(**params):
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)


def _generate(llm):
    params = [
        _params(temperature=0.0),
        _params(temperature=0.9, seed=3),
        *(_params(n=n, temperature=0.9, seed=11) for n in (2, 4)),
        *(_params(n=n, temperature=0.0, use_beam_search=True) for n in (2, 4)),
    ]
    return [[seq.token_ids for seq in output.outputs] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def large_pool(smollm2_path):
    with LLM(model=str(smollm2_path), enable_prefix_caching=False, **ARGS) as llm:
        tokens = _generate(llm)
        stats = llm.llm_engine.stats
        assert (stats.num_preemptions, stats.num_swapped_out_blocks) == (0, 0)
        assert stats.num_copied_blocks > 0
        return tokens


@pytest.mark.parametrize(
    ("engine_args", "swaps"),
    [
        pytest.param({"enable_prefix_caching": True}, True, id="swap, cache"),
        pytest.param({"enable_prefix_caching": False}, True, id="swap, no cache"),
        pytest.param({"enable_prefix_caching": True, "preemption_mode": "recompute"}, False, id="recompute, cache"),
        pytest.param({"enable_prefix_caching": False, "swap_space": 0}, False, id="no host memory, no cache"),
        pytest.param({"enable_chunked_prefill": False}, True, id="swap, whole prompts"),
        pytest.param({"max_num_batched_tokens": 16}, True, id="swap, chunks of 16"),
        pytest.param({"max_num_batched_tokens": 64, "preemption_mode": "swap"}, True, id="all swap, chunks of 64"),
        pytest.param({"max_num_batched_tokens": 2048}, True, id="swap, chunks of 2048"),
    ],
)
def test_a_small_pool_gives_the_tokens_of_a_large_one(smollm2_path, large_pool, engine_args, swaps):
    with LLM(model=str(smollm2_path), **{**ARGS, **SMALL_POOL, **engine_args}) as llm:
        assert _generate(llm) == large_pool
        stats = llm.llm_engine.stats
        assert stats.num_preemptions > 0
        assert stats.num_copied_blocks > 0
        assert (stats.num_swapped_out_blocks > 0) == (stats.num_swapped_in_blocks > 0) == swaps
        assert stats.num_swapped == 0
