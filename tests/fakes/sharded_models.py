"""Runs models on eight virtual CPU devices, in a process of its own: JAX counts its devices once.

    python -m tests.fakes.sharded_models families FOLDER TPxPP,... FAMILY/CASE[/QUANTIZATION/KV_CACHE_DTYPE] ...
    python -m tests.fakes.sharded_models smollm2 FOLDER TP PP [BACKEND]
    python -m tests.fakes.sharded_models tiny FOLDER TP PP [BACKEND [QUANTIZATION KV_CACHE_DTYPE]]

prints one JSON object. `run` starts it; `run_ranks` starts as many as the external launcher would.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
_PROMPTS = [
    "Once upon a time there was a small village by the sea, and in it lived an old man",
    "Once upon a time there was a small village by the sea, and its children",
    "The three primary colours are red, blue and",
    "The capital of France is",
]
_TINY_PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(9, 27)], [*range(9, 23), 5], [*range(30, 40)], [7, 8])]
_NUM_PROMPT_TOKENS = 20  # of the golden cases


def run(*arguments: object) -> Any:
    """Returns what this module printed for these arguments."""
    return _result(_start({}, *arguments))


def run_ranks(num_ranks: int, *arguments: object) -> list[Any]:
    """Returns what each rank printed that an external launcher started with these arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        _start({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}, *arguments, "external_launcher")
        for rank in range(num_ranks)
    ]
    return [_result(rank) for rank in ranks]


def _start(environment: Mapping[str, str], *arguments: object) -> "subprocess.Popen[str]":
    usual = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.sharded_models", *map(str, arguments)],
        cwd=ROOT,
        env={"RAY_ADDRESS": "local", **os.environ, **usual, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _result(process: "subprocess.Popen[str]") -> Any:
    output, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


def _families(folder: Path, meshes: str, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """For each case and mesh: greedy tokens on one device and on it, and the most that scores of the prompt differ."""
    results: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        alone_tokens, alone = _golden(folder, case, 1, 1)
        results[case] = []
        for mesh in meshes.split(","):
            tokens, scores = _golden(folder, case, *map(int, mesh.split("x")))
            difference = float(np.abs(scores - alone).max())
            results[case].append({"alone": alone_tokens, "shared": tokens, "difference": difference})
    return results


def _golden(folder: Path, case_id: str, num_tensor: int, num_stages: int) -> tuple[list[int], np.ndarray]:
    """Returns the greedy tokens of a golden model, and [n, 2] log probabilities: the prompt's tokens, the likeliest."""
    from jaxllm.config import ParallelConfig
    from tests.fakes.golden_families import GoldenRunner, new_sequence, read_case, write_folder, write_tokenizer

    family, name, *formats = case_id.split("/")
    case = read_case(family, name)
    options = dict(zip(("quantization", "kv_cache_dtype"), (part or None for part in formats), strict=False))
    parallel = ParallelConfig(tensor_parallel_size=num_tensor, pipeline_parallel_size=num_stages)
    path = write_tokenizer(write_folder(folder / case_id, case), case)
    runner = GoldenRunner(path, case.config, parallel=parallel, **options)
    prompt = case.token_ids[:_NUM_PROMPT_TOKENS]
    output = runner.step({1: len(prompt)}, (new_sequence(1, prompt, 1),))
    scores = [[score.logprob, *score.top_logprobs] for score in output.prompt_logprobs[1]]
    tokens = [output.sampled[1][0].token_id]
    while len(tokens) < len(case.token_ids) - len(prompt):
        output = runner.step({1: 1}, (), {1: tokens[-1:]})
        tokens.append(output.sampled[1][0].token_id)
    return tokens, np.array(scores)


def _smollm2(folder: Path, num_tensor: int, num_stages: int, backend: str = "uni") -> dict[str, Any]:
    return _answers("smollm2", _PROMPTS, num_tensor, num_stages, backend)


def _tiny(folder: Path, num_tensor: int, num_stages: int, *how: str) -> dict[str, Any]:
    return _answers(str(folder), _TINY_PROMPTS, num_tensor, num_stages, *how)


def _answers(
    model: str,
    prompts: list[Any],
    num_tensor: int,
    num_stages: int,
    backend: str = "uni",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Returns tokens of requests that share prefixes, fork, are swapped out and search beams."""
    from jaxllm import LLM, SamplingParams

    llm = LLM(
        model,
        distributed_executor_backend=backend,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        engine_process="inproc",
        tensor_parallel_size=num_tensor,
        pipeline_parallel_size=num_stages,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_model_len=64,
        block_size=4,
        num_gpu_blocks_override=18,
        preemption_mode="swap",
        seed=0,
    )
    common: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, **common),
        SamplingParams(n=2, temperature=0.9, seed=11, allowed_token_ids=[*range(5, 290, 3)], **common),
        SamplingParams(n=2, temperature=0.0, use_beam_search=True, **common),
    ]
    with llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]
        for _ in range(2):  # the second time its prompt is still in the cache
            again = llm.generate(prompts[:1], params[:1], use_tqdm=False)[0]
        stats = llm.llm_engine.stats
        return {
            "greedy": [*tokens[:2], [list(again.outputs[0].token_ids)]],
            "forks": tokens[2],
            "beams": tokens[3],
            "num_cached_tokens": again.num_cached_tokens,
            "num_swapped_out_blocks": stats.num_swapped_out_blocks,
            "num_copied_blocks": stats.num_copied_blocks,
        }


if __name__ == "__main__":
    _kind, _folder, *_rest = sys.argv[1:]
    if _kind == "families":
        _printed = _families(Path(_folder), *_rest)
    else:
        _num_tensor, _num_stages, *_how = _rest
        _function = {"smollm2": _smollm2, "tiny": _tiny}[_kind]
        _printed = _function(Path(_folder), int(_num_tensor), int(_num_stages), *_how)
    print(json.dumps(_printed))
