"""Quantized models against transformers' logits in float32: how far they may drift, and that they do.

A model of 32 hidden elements suffers more than a real one; `python -m jaxllm.bench quality` measures those.
"""

import numpy as np
import pytest

from tests.fakes.golden_families import GoldenRunner, new_sequence, read_case, write_folder

NUM_PROMPT_TOKENS = 20
# Of the logits' standard deviation, a root mean square error over all positions.
_BOUNDS = {"int8": 0.03, "int8_wo": 0.03, "int4_wo": 0.35, "fp8": 0.15}


def _error(folder, case, **options):
    """Returns the root mean square error of the prompt's logits, relative to their standard deviation."""
    runner = GoldenRunner(folder, case.config, **options)
    runner.step({1: NUM_PROMPT_TOKENS}, (new_sequence(1, case.token_ids[:NUM_PROMPT_TOKENS], 1),))
    errors = [logits - case.logits[position] for position, logits in runner.rows]
    return float(np.sqrt(np.mean(np.square(errors))) / case.logits.std())


@pytest.mark.parametrize("scheme", _BOUNDS)
@pytest.mark.parametrize("family, name", [("llama", "gqa"), ("mixtral", "top_2"), ("gemma3", "pattern")])
def test_logits_drift_a_little(family, name, scheme, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    case = read_case(family, name)
    error = _error(write_folder(tmp_path, case), case, quantization=scheme)
    assert 1e-4 < error < _BOUNDS[scheme]


@pytest.mark.parametrize("family, name", [("deepseek_v3", "groups"), ("opt", "plain"), ("gpt_oss", "top_3_mqa")])
def test_other_families_run_in_int8(family, name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    case = read_case(family, name)
    error = _error(write_folder(tmp_path, case), case, quantization="int8")
    assert 1e-4 < error < 0.1
