"""Runs a golden tiny model through the loader and the real ModelRunner, and keeps every row of logits it computes."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxllm.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from jaxllm.messages import CachedSequences, ModelRunnerOutput, NewSequence, SchedulerOutput
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker import plan, worker
from jaxllm.worker.programs import Program
from jaxllm.worker.worker import Worker
from tests.fakes.seeded_weights import seeded_tensor

FOLDER = Path(__file__).parents[1] / "golden" / "families"
_BLOCK_SIZE, _MAX_LEN, _NUM_SEQS, _SIZE = 4, 32, 4, 24
_ONE_DEVICE = ParallelConfig()
_SHARED: dict[tuple[str, tuple[int, ...]], Any] = {}


class GoldenCase(NamedTuple):
    """One tiny model and what transformers computed with it."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    token_ids: list[int]  # a prompt, then greedy tokens
    logits: np.ndarray  # [len(token_ids) - 1, V] float32


def case_names() -> list[tuple[str, str]]:
    """Returns (family, case) of every golden model."""
    return [(path.stem, name) for path in sorted(FOLDER.glob("*.json")) for name in json.loads(path.read_text())]


def read_case(family: str, name: str) -> GoldenCase:
    case = json.loads((FOLDER / f"{family}.json").read_text())[name]
    tensors = {name: seeded_tensor(name, tuple(shape)) for name, shape in case["tensors"].items()}
    return GoldenCase(case["config"], tensors, case["token_ids"], np.load(FOLDER / f"{family}.npz")[name])


def write_folder(path: Path, case: GoldenCase) -> Path:
    """Writes the model as a Hugging Face folder without a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(case.config))
    save_file(case.tensors, path / "model.safetensors")
    return path


def write_tokenizer(path: Path, case: GoldenCase) -> Path:
    """Writes a tokenizer into the model's folder: a token is a character, from the blank on."""
    characters = {chr(ord(" ") + token_id): token_id for token_id in range(case.config["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=characters, merges=[]))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


class GoldenRunner:
    """A Worker on a model folder, with one rung of 24 tokens, that compiles a program when it is first run.

    Attributes:
      programs: What a real worker would have compiled at start, by name.
      rows: (position, logits [V]) of every row of logits computed so far, padding rows included: they repeat one.
    """

    def __init__(
        self,
        path: Path,
        hf_config: dict[str, Any],
        num_blocks: int = 32,
        parallel: ParallelConfig = _ONE_DEVICE,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        config = EngineConfig(
            model=model_config_from_hf(hf_config),
            model_path=path,
            dtype="float32",
            quantization=quantization,
            cache=CacheConfig(block_size=_BLOCK_SIZE, num_gpu_blocks_override=num_blocks, cache_dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_num_seqs=_NUM_SEQS, max_num_batched_tokens=_SIZE, max_model_len=_MAX_LEN),
            parallel=parallel,
        )
        self.programs: dict[str, Program] = {}
        self.rows: list[tuple[int, np.ndarray]] = []
        self._step_id = 0
        self._positions = np.zeros(0)
        self._worker = Worker(config)
        with (
            patch.object(plan, "token_ladder", lambda *_: (_SIZE,)),
            patch.object(worker, "compile_programs", self._keep),
        ):
            self._worker.initialize()

    def step(
        self, scheduled: dict[int, int], new: tuple[NewSequence, ...] = (), grown: dict[int, list[int]] | None = None
    ) -> ModelRunnerOutput:
        """Runs one step: `grown` names the sequences that ran before, with their new tokens."""
        grown = grown or {}
        cached = CachedSequences(list(grown), list(grown.values()), [[] for _ in grown], [])
        output = SchedulerOutput(self._step_id, scheduled, list(new), cached, {}, [], [])
        self._step_id += 1
        return self._worker.execute_model(output)

    def _keep(self, programs: Sequence[Program]) -> Callable[..., Any]:
        """Stands in for compile_programs, of one stage."""
        by_name = {program.name: program for program in programs}
        self.programs |= by_name
        return partial(self._run, by_name, {})

    def _run(
        self, programs: dict[str, Program], compiled: dict[str, Any], name: str, size: int, *arguments: Any
    ) -> Any:
        """Stands in for CompiledPrograms."""
        if name not in compiled:
            compiled[name] = _compile(programs[name])
        result = compiled[name](*arguments)
        if name == "embed":
            self._positions = np.asarray(arguments[2])
        elif name == "logits":
            indices = np.asarray(arguments[2])
            self.rows += zip(self._positions[indices].tolist(), np.asarray(result), strict=True)
        return result


def new_sequence(seq_id: int, token_ids: list[int], first_block: int) -> NewSequence:
    """A greedy sequence with blocks of its own, in descending order, that scores its prompt."""
    blocks = list(range(first_block + _MAX_LEN // _BLOCK_SIZE - 1, first_block - 1, -1))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    return NewSequence(seq_id, token_ids, len(token_ids), blocks, 0, 0, params)


def _compile(program: Program) -> Any:
    """Compiles a program, or takes it from another model where only the number of tokens matters."""
    is_alone = program.mesh is None or program.mesh.size == 1
    if program.name not in ("sample", "score") or not is_alone:
        return program.compile()
    key = (program.name, program.arguments[0].shape)
    if key not in _SHARED:
        _SHARED[key] = program.compile()
    return _SHARED[key]
