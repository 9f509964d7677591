"""Every family on tiny random models against transformers: prefill, decode and chunked prefill in one batch.

The first model of each family runs with this platform's attention kernel. The others, which are about the family, run
with the reference kernel: it compiles four times faster, and tests/pallas_kernels compare the two.
"""

import importlib

import numpy as np
import pytest

from jaxllm.models.causal_lm import Family
from jaxllm.models.registry import FAMILIES
from tests.fakes.golden_families import GoldenRunner, case_names, new_sequence, read_case, write_folder

CASES = case_names()
FIRST_CASES = {family: (family, name) for family, name in reversed(CASES)}.values()
NUM_PROMPT_TOKENS, NUM_GREEDY_TOKENS = 20, 6
CHUNKS = (7, 9, 4)


@pytest.mark.parametrize("family, name", CASES, ids=["-".join(case) for case in CASES])
def test_logits_and_greedy_tokens(family, name, tmp_path, monkeypatch):
    """Sequence 1 takes its prompt whole and decodes; sequence 2 takes the same prompt in chunks beside it."""
    if (family, name) not in FIRST_CASES:
        monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    case = read_case(family, name)
    runner = GoldenRunner(write_folder(tmp_path, case), case.config)
    prompt = case.token_ids[:NUM_PROMPT_TOKENS]
    drawn: dict[int, list[int]] = {1: [], 2: []}

    def step(*arguments):
        for seq_id, (token,) in runner.step(*arguments).sampled.items():
            drawn[seq_id].append(token.token_id)

    step({1: NUM_PROMPT_TOKENS}, (new_sequence(1, prompt, 1),))
    step({1: 1, 2: CHUNKS[0]}, (new_sequence(2, prompt, 9),), {1: drawn[1][-1:]})
    for chunk in CHUNKS[1:]:
        step({1: 1, 2: chunk}, (), {1: drawn[1][-1:], 2: []})
    while len(drawn[2]) < NUM_GREEDY_TOKENS:
        alive = [seq_id for seq_id in drawn if len(drawn[seq_id]) < NUM_GREEDY_TOKENS]
        step({seq_id: 1 for seq_id in alive}, (), {seq_id: drawn[seq_id][-1:] for seq_id in alive})

    assert drawn[1] == drawn[2] == case.token_ids[NUM_PROMPT_TOKENS:]
    for position in range(len(case.logits)):
        computed = [logits for where, logits in runner.rows if where == position]
        assert len(computed) >= 2, f"position {position} was to be computed by both sequences"
        for logits in computed:
            np.testing.assert_allclose(logits, case.logits[position], atol=1e-4, rtol=0)


def test_every_supported_architecture_has_golden_models():
    covered = {read_case(family, name).config["architectures"][0] for family, name in CASES}
    assert covered == set(FAMILIES)


@pytest.mark.parametrize("module", sorted(set(FAMILIES.values())))
def test_every_module_offers_a_family(module):
    assert isinstance(importlib.import_module(module).FAMILY, Family)
