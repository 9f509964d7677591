"""bench quality: what it measures is what numpy computes of the same weights, and how it is said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.quality import cut, to_text
from jaxllm.exceptions import ConfigError
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.quantization import SCHEMES, dequantize, quantize
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.worker.quality import Quality
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.dense_llama import dense_logits
from tests.fakes.tiny_models import TinyModel, tiny_llama, write_tiny_folder

_TEXT = "the capital of Spain is Madrid, said one of them; two times three is six. "


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_llama(intermediate_size=64)


@pytest.fixture(scope="module")
def folder(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_folder(tmp_path_factory.mktemp("model"), model)
    (path / "text.txt").write_text(_TEXT * 5)
    return path


def _logprobs(model: TinyModel, token_ids: list[int]) -> np.ndarray:
    logits = dense_logits(model, token_ids)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _rounded(model: TinyModel) -> TinyModel:
    """Returns the model with the weights that int4_wo makes of its own."""
    layers = SCHEMES["int4_wo"]
    tensors = {}
    for name, value in model.tensors.items():
        scheme = layers.of_table() if "embed" in name else layers
        tensors[name] = value if value.ndim == 1 else dequantize(quantize(value, scheme), scheme)
    return replace(model, tensors=tensors)


def test_weights_of_int4_cost_what_numpy_says(
    model: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    flags = f"--model {folder} --quantization int4_wo --text-file {folder / 'text.txt'} --num-tokens 100"
    assert main(["quality", *flags.split(), "--max-model-len", "41", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    ids = open_tokenizer(open_checkpoint(str(folder))).encode(_TEXT * 5)
    rounded = _rounded(model)
    kl, losses = 0.0, np.zeros(2)
    for text in (ids[:40], ids[40:80]):
        expected, got = (_logprobs(each, text)[:-1] for each in (model, rounded))
        kl += (np.exp(expected) * (expected - got)).sum()
        losses += [-logprobs[np.arange(39), text[1:]].sum() for logprobs in (expected, got)]
    assert measured["num_tokens"] == 78
    assert kl / 78 > 1e-3
    assert measured["mean_kl"] == pytest.approx(kl / 78, rel=1e-3)
    assert measured["reference_perplexity"] == pytest.approx(np.exp(losses[0] / 78), rel=1e-5)
    assert measured["perplexity"] == pytest.approx(np.exp(losses[1] / 78), rel=1e-5)
    matrices = [value for value in model.tensors.values() if value.ndim == 2]
    # The CPU holds int4 as int8; 64 inputs share a scale.
    num_numbers, num_scales = sum(matrix.size for matrix in matrices), sum(len(matrix) for matrix in matrices)
    norms = 5 * 64
    assert measured["float32_bytes"] == 4 * (num_numbers + norms) == 2 * measured["bfloat16_bytes"]
    assert measured["weight_bytes"] == num_numbers + 4 * (num_scales + norms)


def test_pieces_of_a_text_each_after_its_beginning() -> None:
    assert cut(ByteTokenizer(), "abcdefgh", num_tokens=7, text_len=3) == ([[97, 98, 99], [100, 101, 102]], 1)
    assert cut(BeginningTokenizer(), "abc", num_tokens=2, text_len=5) == ([[256, 97, 98]], 1)
    with pytest.raises(ConfigError, match="^the text must have 9 tokens, got 8; set --num-tokens or --text-file$"):
        cut(ByteTokenizer(), "abcdefgh", num_tokens=9, text_len=3)


class BeginningTokenizer(ByteTokenizer):
    """Begins every text, as most models' tokenizers do."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + super().encode(text)


def test_the_lines() -> None:
    quality = Quality(
        num_tokens=3992,
        mean_kl=0.0123456,
        reference_perplexity=20.0,
        perplexity=20.1,
        float32_bytes=400,
        bfloat16_bytes=200,
        weight_bytes=101,
    )
    assert to_text(quality) == (
        "3992 tokens predicted\n"
        "mean KL divergence from float32: 0.01235 nats\n"
        "perplexity: 20.1000, in float32 20.0000 (+0.50%)\n"
        "weights: 101 bytes, in bfloat16 200 (50.5% of it), in float32 400"
    )


def test_what_can_t_be_measured_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = folder / "none.txt"
    assert main(["quality", "--model", str(folder), "--text-file", str(missing)]) == 2
    assert capsys.readouterr().err == f"error: [Errno 2] No such file or directory: '{missing}'\n"
