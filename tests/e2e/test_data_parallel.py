"""Data parallel replicas of a real model, each on a virtual CPU device of its own: the answers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import LLM
from jaxllm.exceptions import ConfigError
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

ROOT = Path(__file__).parents[2]
ENGINE_ARGS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_gpu_blocks_override": 12}

# In a process of its own: the number of virtual devices is settled before JAX starts.
_SCRIPT = """
import collections, json, sys
from jaxllm import LLM, SamplingParams
from jaxllm.sampling_params import BeamSearchParams

model, engine_args = sys.argv[1], json.loads(sys.argv[2])
prompts = ["the capital of France is", "one two three four five six seven", "a", "the capital of Italy"] * 2
params = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(n=3, seed=7, max_tokens=9),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=3, max_tokens=20, stop=["e"]),
    SamplingParams(max_tokens=20, ignore_eos=True),
] * 2
for size, place in ((1, "inproc"), (2, "inproc"), (2, "mp")):
    with LLM(model, place, data_parallel_size=size, seed=5, **engine_args) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        beams = llm.beam_search(prompts[:3], BeamSearchParams(beam_width=3, max_tokens=6))
        stats = llm.llm_engine._client.get_stats()
        assert len(stats) == size and all(one.prefix_cache_queries for one in stats)
        assert all(one.num_free_blocks == 11 for one in stats)
        if (size, place) == (2, "inproc"):
            import jax

            bytes_on = collections.Counter()
            for array in jax.live_arrays():
                for shard in array.addressable_shards:
                    bytes_on[shard.device.id] += shard.data.nbytes
            assert bytes_on[0] == bytes_on[1] > 200_000 and set(bytes_on) == {0, 1}, bytes_on
    answers = [[(one.token_ids, str(one.logprobs)) for one in output.outputs] for output in outputs]
    print(json.dumps([answers, [[one.tokens for one in output.sequences] for output in beams]]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), tiny_llama())


def test_answers_do_not_depend_on_the_replica(model: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8", "JAXLLM_ATTENTION": "reference"}
    command = [sys.executable, "-c", _SCRIPT, str(model), json.dumps(ENGINE_ARGS)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    alone, threads, process = done.stdout.splitlines()
    assert alone == threads == process


def test_more_replicas_than_devices_are_refused_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with pytest.raises(ConfigError, match="data_parallel_size=3 needs 3 devices, there are 2"):
        LLM(str(model), data_parallel_size=3, **ENGINE_ARGS)
