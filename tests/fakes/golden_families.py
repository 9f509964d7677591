"""Runs a golden tiny model through the loader and the real ModelRunner, and keeps every row of logits it computes."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxllm.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxllm.messages import CachedSequences, ModelRunnerOutput, NewSequence, SchedulerOutput
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.loader import load_model
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.cache_engine import CacheEngine
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.programs import CompiledPrograms, Program, ProgramShapes, list_programs
from jaxllm.worker.step_fn import split_model
from sharding.mesh import make_mesh
from tests.fakes.seeded_weights import seeded_tensor

FOLDER = Path(__file__).parents[1] / "golden" / "families"
_BLOCK_SIZE, _MAX_LEN, _NUM_SEQS, _SIZE = 4, 32, 4, 24
_NEEDED = ("embed", "logits", "sample", "score")
_FLOAT32 = jnp.dtype(jnp.float32)


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


class GoldenRunner:
    """A ModelRunner on a model folder, with one rung of 24 tokens.

    Attributes:
      caches: The KV cache before the first step, layer by layer.
      num_layer_programs: How many kinds of layers there are.
      rows: (position, logits [V]) of every row of logits computed so far, padding rows included: they repeat one.
    """

    def __init__(self, path: Path, hf_config: dict[str, Any]) -> None:
        model_config = model_config_from_hf(hf_config)
        config = EngineConfig(
            model=model_config,
            model_path=path,
            dtype="float32",
            cache=CacheConfig(block_size=_BLOCK_SIZE, num_gpu_blocks_override=32),
            scheduler=SchedulerConfig(max_num_seqs=_NUM_SEQS, max_num_batched_tokens=_SIZE, max_model_len=_MAX_LEN),
        )
        mesh = make_mesh(jax.local_devices()[:1])
        model = split_model(load_model(config, mesh, _FLOAT32, _FLOAT32), 1)
        shapes = ProgramShapes(
            ladder=(_SIZE,),
            max_num_seqs=_NUM_SEQS,
            blocks_per_seq=_MAX_LEN // _BLOCK_SIZE,
            vocab_size=model_config.vocab_size,
            hidden_size=model_config.hidden_size,
            dtype=_FLOAT32,
        )
        cache_engine = CacheEngine(config, mesh, _FLOAT32, "cpu")
        input_batch = InputBatch(_NUM_SEQS, _MAX_LEN, _BLOCK_SIZE, (_SIZE,))
        programs = list_programs(model, cache_engine.caches[0], shapes, mesh)
        self.caches = cache_engine.caches
        self.num_layer_programs = sum(program.name.startswith("layers_") for program in programs)
        self._programs = CompiledPrograms({(p.name, p.size): _compile(p) for p in programs if _is_needed(p.name)})
        self._runner = ModelRunner(model, cache_engine, input_batch, self._record, _NUM_SEQS)
        self._step_id = 0
        self._positions = np.zeros(0)
        self.rows: list[tuple[int, np.ndarray]] = []

    def step(
        self, scheduled: dict[int, int], new: tuple[NewSequence, ...] = (), grown: dict[int, list[int]] | None = None
    ) -> ModelRunnerOutput:
        """Runs one step: `grown` names the sequences that ran before, with their new tokens."""
        grown = grown or {}
        cached = CachedSequences(list(grown), list(grown.values()), [[] for _ in grown], [])
        output = SchedulerOutput(self._step_id, scheduled, list(new), cached, {}, [], [])
        self._step_id += 1
        return self._runner.execute_model(output)

    def _record(self, name: str, size: int, *arguments: Any) -> Any:
        """Stands in for CompiledPrograms."""
        result = self._programs(name, size, *arguments)
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


def _is_needed(name: str) -> bool:
    return name in _NEEDED or name.startswith("layers_")


def _compile(program: Program) -> Any:
    is_shared = program.name in ("sample", "score")  # depend on the number of tokens alone
    return (
        _compile_shared(program.name, program.arguments[0].shape, _Hidden(program)) if is_shared else program.compile()
    )


class _Hidden(NamedTuple):
    """A program that takes no part in a cache's key."""

    program: Program

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@cache
def _compile_shared(name: str, shape: tuple[int, ...], hidden: _Hidden) -> Any:
    return hidden.program.compile()
