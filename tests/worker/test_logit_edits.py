"""Edits that are too many for one call: later calls see what earlier ones did, and the logits stay as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.layers import sampler
from jaxllm.layers.forward_batch import LogitEdits
from jaxllm.worker.pipeline import Stage, _edited
from jaxllm.worker.programs import EDITS_PER_ROW, CompiledPrograms
from sharding.mesh import make_mesh

V = 1500


def test_edits_come_in_as_many_calls_as_they_need() -> None:
    calls = []

    def edit_logits(logits: Any, edited: Any, edits: LogitEdits) -> Any:
        assert len(edits.rows) == 2 * EDITS_PER_ROW
        calls.append(edits)
        return sampler.edit_logits(logits, edited, edits)

    programs = CompiledPrograms({("edit_logits", 2): edit_logits})
    not_asked: Any = None
    stage = Stage(make_mesh(jax.devices()[:1]), not_asked, not_asked, programs)
    before = np.random.default_rng(0).standard_normal((2, V)).astype(np.float32)
    logits = jnp.asarray(before)
    rows = np.repeat(np.array([0, 1], np.int32), [900, 400])  # row 0 in two calls, row 1 in two as well
    token_ids = np.concatenate([np.arange(900), np.arange(0, 800, 2)]).astype(np.int32)
    ones = np.ones(1300, np.float32)
    edits = LogitEdits(rows, token_ids, 2 * ones, ones, 0.5 * ones, np.array([False, True]))
    edited = np.asarray(_edited(stage, logits, edits))
    expected = before.copy()
    expected[0, :900] += 1.5
    expected[1] = -np.inf
    expected[1, :800:2] = before[1, :800:2] + 1.5
    np.testing.assert_allclose(edited, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits, before)
    assert len(calls) == 3
    assert _edited(stage, logits, None) is logits
