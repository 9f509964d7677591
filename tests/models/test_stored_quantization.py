"""Models of quantized checkpoints against the same models with the floats that their numbers mean."""

import json

import numpy as np
import pytest

from tests.fakes.golden_families import GoldenRunner, new_sequence, read_case
from tests.fakes.packed_weights import WAYS, write_packed

_NUM_TOKENS = 20


def _logits(folder, config, token_ids):
    runner = GoldenRunner(folder, config)
    runner.step({1: _NUM_TOKENS}, (new_sequence(1, token_ids[:_NUM_TOKENS], 1),))
    rows = dict(runner.rows)
    return np.stack([rows[position] for position in range(_NUM_TOKENS)])


@pytest.mark.parametrize("way, is_exact", [("awq", True), ("int8", False)])
def test_logits_are_those_of_the_floats(way, is_exact, tmp_path, monkeypatch):
    """int8 quantizes activations too: then the floats are made numbers again by ours, which are the same."""
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    case = read_case("llama", "gqa")
    packed, floats = write_packed(tmp_path, case.config, case.tensors, WAYS[way])
    config = json.loads((packed / "config.json").read_text())
    expected = _logits(floats, case.config if is_exact else config, case.token_ids)
    error = np.abs(_logits(packed, config, case.token_ids) - expected).max() / expected.std()
    assert error < 1e-5
    if not is_exact:
        lost = np.abs(expected - case.logits[:_NUM_TOKENS]).max() / expected.std()
        assert 1e-3 < lost < 0.5
