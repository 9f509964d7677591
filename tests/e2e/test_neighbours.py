"""A prompt's tokens don't depend on what else runs, on chunking, on preemption or on the cache: on the real model."""

import json
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct-q4_1.json").read_text(encoding="utf-8")
)
PROMPTS = [case["prompt"] for case in reversed(GOLDEN["cases"])]  # the longest, which fills a small pool, first
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
# With penalties that count tokens, which a sequence that was preempted must count again.
SEEDED = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    seed=7,
    max_tokens=16,
    ignore_eos=True,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    bad_words=["the", "of a"],
)


def _generate(llm, params):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(smollm2_path):
    """Greedy and seeded tokens of each prompt by itself, without prefix cache."""
    with LLM(
        model=str(smollm2_path),
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        return {"greedy": _generate(llm, GREEDY), "seeded": _generate(llm, SEEDED)}


@pytest.mark.parametrize(
    ("engine_args", "preempts"),
    [
        pytest.param({"max_num_seqs": 16, "max_num_batched_tokens": 512}, False, id="all at once"),
        pytest.param({"max_num_seqs": 16, "max_num_batched_tokens": 32}, False, id="chunks of 32"),
        pytest.param(
            {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16, "num_gpu_blocks_override": 28},
            True,
            id="a pool that preempts",
        ),
    ],
)
def test_tokens_are_those_of_the_prompt_alone(smollm2_path, alone, engine_args, preempts):
    with LLM(model=str(smollm2_path), max_model_len=1024, **engine_args) as llm:
        assert _generate(llm, GREEDY) == alone["greedy"]
        assert _generate(llm, SEEDED) == alone["seeded"]
        assert (llm.llm_engine.stats.num_preemptions > 0) == preempts
        if not preempts:  # a pool that small has evicted them
            assert llm.llm_engine.stats.prefix_cache_hits > 0, "the second run finds the first one's prompts"


def test_n_sequences_are_those_of_their_own_seeds(smollm2_path):
    prompt = PROMPTS[-1]
    with LLM(model=str(smollm2_path), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256) as llm:
        together = SamplingParams(n=4, temperature=1.0, seed=100, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate(prompt, together, use_tqdm=False)
        assert llm.llm_engine.stats.num_copied_blocks > 0, "the prompt's last block is shared, then copied"
        single = [SamplingParams(temperature=1.0, seed=100 + i, max_tokens=20, ignore_eos=True) for i in range(4)]
        outputs = llm.generate([prompt] * 4, single, use_tqdm=False)
        assert [sequence.token_ids for sequence in output.outputs] == [o.outputs[0].token_ids for o in outputs]
        assert len({tuple(sequence.token_ids) for sequence in output.outputs}) == 4
