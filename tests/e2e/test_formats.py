"""The real models from safetensors and from Orbax: what test_golden.py compares with transformers from GGUF.

All weights are the same bit by bit, so the rest of the golden comparison holds for them too; a few of its prompts are
answered all the same, by the rule that test_golden.py states.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.model_loader import demo_models
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.converter import convert
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from tests.fakes.exported_folder import export_folder
from tests.fakes.loaded_weights import assert_equal, load_weights

pytestmark = pytest.mark.slow
GOLDEN_FILES = {"smollm2": "smollm2-135m-instruct-q4_1.json", "gemma3-270m": "gemma-3-270m-q4_k_m.json"}
MIN_GAP = 0.02  # of the reference's two largest logits: below it, rounding may decide
NUM_PROMPTS, NUM_TOKENS = 3, 8


class Formats(NamedTuple):
    golden: dict[str, Any]
    weights: dict[str, np.ndarray]  # as they come from the GGUF file
    paths: dict[str, Path]


@pytest.fixture(scope="module", params=GOLDEN_FILES)
def formats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Formats]:
    golden = json.loads((Path(__file__).parents[1] / "golden" / GOLDEN_FILES[request.param]).read_text("utf-8"))
    folder, gguf = tmp_path_factory.mktemp(request.param), demo_models.fetch(request.param)
    checkpoint = open_checkpoint(str(gguf))
    assert isinstance(checkpoint, GGUFCheckpoint)
    paths = {"safetensors": folder / "safetensors", "orbax": folder / "orbax"}
    export_folder(paths["safetensors"], checkpoint, num_shards=3)
    convert(str(gguf), paths["orbax"])
    yield Formats(golden, load_weights(gguf), paths)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["safetensors", "orbax"])
def test_all_weights_are_those_of_the_gguf_file(formats: Formats, name: str) -> None:
    assert_equal(load_weights(formats.paths[name], load_format=name), formats.weights)


@pytest.mark.parametrize("name", ["safetensors", "orbax"])
def test_golden_greedy_tokens(formats: Formats, name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    cases = _surest_cases(formats.golden["cases"])
    sizes = {"max_num_seqs": NUM_PROMPTS, "max_num_batched_tokens": 32, "max_model_len": 64}
    with LLM(str(formats.paths[name]), kv_cache_memory_bytes=1 << 28, **sizes) as llm:
        outputs = llm.generate([case["prompt_token_ids"] for case in cases], params, use_tqdm=False)
        # The converted file brings its vocabulary; the folder's is SentencePiece's alone, or complete.
        assert name == "safetensors" or llm.get_tokenizer().encode(cases[0]["prompt"]) == cases[0]["prompt_token_ids"]
    num_compared = 0
    for case, output in zip(cases, outputs, strict=True):
        num_sure = _num_sure(case)
        assert output.outputs[0].token_ids[:num_sure] == case["greedy_token_ids"][:num_sure]
        num_compared += num_sure
    assert num_compared >= NUM_TOKENS * NUM_PROMPTS / 2


def _surest_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns those short prompts of the golden file whose first tokens are surest."""
    short = [case for case in cases if len(case["prompt_token_ids"]) + NUM_TOKENS <= 64]
    return sorted(short, key=_num_sure, reverse=True)[:NUM_PROMPTS]


def _num_sure(case: dict[str, Any]) -> int:
    """Returns how many of the first tokens the reference is sure of."""
    gaps = case["greedy_top1_top2_logit_gap"][:NUM_TOKENS]
    return next((index for index, gap in enumerate(gaps) if gap <= MIN_GAP), NUM_TOKENS)
