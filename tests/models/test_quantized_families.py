"""Quantized models against transformers' logits, and against themselves with the floats that their numbers mean.

A model of 32 hidden elements suffers more than a real one; `python -m jaxllm.bench quality` measures those.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm.model_loader.loader import load_model
from jaxllm.quantization import SCHEMES
from jaxllm.worker import worker
from tests.fakes.golden_families import GoldenRunner, new_sequence, read_case, write_folder

NUM_PROMPT_TOKENS = 20
_MOST_LOST = {"int8": 0.05, "int8_wo": 0.02, "int4_wo": 0.3, "fp8": 0.2}  # of the logits' deviation


def _logits(folder, case, **options):
    """Returns the prompt's logits: [T, V]."""
    runner = GoldenRunner(folder, case.config, **options)
    runner.step({1: NUM_PROMPT_TOKENS}, (new_sequence(1, case.token_ids[:NUM_PROMPT_TOKENS], 1),))
    rows = dict(runner.rows)
    return np.stack([rows[position] for position in range(NUM_PROMPT_TOKENS)])


@pytest.mark.parametrize("family, name", [("llama", "gqa"), ("gemma3", "pattern"), ("gpt_oss", "top_3_mqa")])
def test_logits_drift_a_little_in_int8(family, name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    case = read_case(family, name)
    errors = _logits(write_folder(tmp_path, case), case, quantization="int8") - case.logits[:NUM_PROMPT_TOKENS]
    assert 1e-4 < np.sqrt(np.mean(np.square(errors))) / case.logits.std() < 0.1


@pytest.mark.parametrize(
    "family, name, scheme",
    [
        ("llama", "gqa", "int8"),
        ("opt", "plain", "int8_wo"),
        ("mixtral", "top_2", "int4_wo"),
        ("deepseek_v3", "groups", "fp8"),
    ],
)
def test_logits_are_those_of_what_the_numbers_mean(family, name, scheme, tmp_path, monkeypatch):
    """With activations as they are: then nothing is lost but what rounding the weights loses."""
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    group_size = 16 if scheme == "int4_wo" else None  # the models are too small for several groups of 128
    changed = replace(SCHEMES[scheme], quantizes_activations=False, group_size=group_size)
    monkeypatch.setitem(SCHEMES, scheme, changed)
    case = read_case(family, name)
    folder = write_folder(tmp_path, case)
    quantized = _logits(folder, case, quantization=scheme)

    def load_meant(config, *arguments):
        numbers = load_model(replace(config, quantization=scheme), *arguments)
        return _with_floats(load_model(config, *arguments), dict(nnx.to_flat_state(nnx.state(numbers))))

    monkeypatch.setattr(worker, "load_model", load_meant)
    meant = _logits(folder, case)
    assert np.abs(quantized - meant).max() / meant.std() < 1e-5
    lost = np.sqrt(np.mean(np.square(meant - case.logits[:NUM_PROMPT_TOKENS]))) / meant.std()
    assert 1e-4 < lost < _MOST_LOST[scheme]


def _with_floats(model, numbers):
    """Returns a model of floats with the weights that are among the numbers replaced by what those mean."""
    graph_def, state = nnx.split(model)
    parameters, num_replaced = dict(nnx.to_flat_state(state)), 0
    for path, parameter in parameters.items():
        scales = numbers.get((*path[:-1], f"{path[-1]}_scale"))
        if scales is not None:
            scheme = numbers[path].get_metadata("scheme")
            meant = _meant(np.asarray(numbers[path][...], np.float32), np.asarray(scales[...]), scheme.rotated)
            parameters[path], num_replaced = parameter.replace(jax.device_put(meant)), num_replaced + 1
    assert num_replaced > 4
    return nnx.merge(graph_def, nnx.from_flat_state(parameters))


def _meant(values, scales, num_rotated):
    """Multiplies values: [O, I] or [E, I, O] with their groups' scales, and turns blocks of inputs back."""
    floats = np.empty_like(values)
    for place in np.ndindex(values.shape):
        row, column = place[-2:]
        if values.ndim == 3:
            scale = scales[place[0], row * scales.shape[1] // values.shape[1], column]
        else:
            scale = scales[column * len(scales) // values.shape[1], row]
        floats[place] = values[place] * scale
    if num_rotated == 1 or values.ndim == 3:
        return floats
    # Walsh's matrix: -1 where the bits that a row and a column have in common are odd in number.
    signs = [[(-1) ** (i & j).bit_count() for j in range(num_rotated)] for i in range(num_rotated)]
    blocks = floats.astype(np.float64).reshape(-1, num_rotated) @ (np.array(signs) / num_rotated**0.5)
    return blocks.reshape(floats.shape).astype(np.float32)
