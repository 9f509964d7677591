"""What a sequence's parameters do to its logits, against a slow reference that looks at every token."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.messages import NewSequence
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.logit_rules import Adjustments, LogitRules, rules_for

V = 12
LOGITS = np.linspace(-2, 2.4, V).astype(np.float32)  # both signs, and a zero: -2.0, -1.6, ..., 2.4


def sequence(tokens: Sequence[int], num_prompt: int, bad_words=(), eos=(), **params) -> NewSequence:
    bad = [list(word) for word in bad_words]
    return NewSequence(1, list(tokens), num_prompt, [], 0, 0, SamplingParams(**params), list(eos), bad)


def applied(changes: Adjustments | None, logits: np.ndarray) -> list[float]:
    """Returns the logits after the adjustments, one by one."""
    if changes is None:
        return logits.tolist()
    edited = [-math.inf] * V if changes.is_restricted else logits.tolist()
    for token_id, bias, divisor, penalty in zip(*changes[:4], strict=True):
        value = logits[token_id] + bias
        edited[token_id] = float((value / divisor if value > 0 else value * divisor) - penalty)
    return edited


def slow_reference(new: NewSequence, logits: np.ndarray) -> list[float]:
    """The rules as they are told: allowed tokens, bad words, min_tokens, logit_bias, then penalties."""
    params, output = new.sampling_params, new.token_ids[new.num_prompt_tokens :]
    ending = [*new.eos_token_ids, *(params.stop_token_ids or [])] if len(output) < params.min_tokens else []
    allowed = range(V) if params.allowed_token_ids is None else params.allowed_token_ids
    bad = [word[-1] for word in new.bad_words_token_ids if word[:-1] == output[len(output) - len(word) + 1 :]]
    if params.allowed_token_ids is not None and all(token_id in ending + bad for token_id in allowed):
        bad = []
    edited = []
    for token_id in range(V):
        if token_id not in allowed or token_id in ending + bad:
            edited.append(-math.inf)
            continue
        value = float(logits[token_id]) + (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in new.token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.presence_penalty * (token_id in output) + params.frequency_penalty * output.count(token_id)
        edited.append(value)
    return edited


IDS = st.integers(0, V - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.25, 2.0]),
        "repetition_penalty": st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, -1.0, 3.5, 100.0]), max_size=4),
        "stop_token_ids": st.lists(IDS, max_size=2),
        "min_tokens": st.integers(0, 6),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=5),
        "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4),
        "eos": st.lists(IDS, max_size=2),
    },
)


@given(PARAMS, st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, max_size=8), st.integers(0, 8))
def test_equals_the_slow_reference_after_every_token_and_after_preemption(params, prompt, output, cut) -> None:
    given_params = {name: value for name, value in params.items() if name not in ("bad_words", "eos")}
    words, eos = params.get("bad_words", []), params.get("eos", [])

    def at(num_output: int) -> NewSequence:
        return sequence([*prompt, *output[:num_output]], len(prompt), words, eos, max_tokens=None, **given_params)

    ending = {*eos, *params.get("stop_token_ids", [])} if params.get("min_tokens") else set()
    if ending.issuperset(params.get("allowed_token_ids", [-1])):
        return  # the front end refuses it
    rules = LogitRules(at(0), 20)
    for num_output in range(len(output) + 1):
        if num_output == cut:  # it was preempted, and comes back with what it has
            rules = LogitRules(at(num_output), 20)
        tokens = np.array([*prompt, *output[:num_output]], np.int32)
        expected = slow_reference(at(num_output), LOGITS)
        for _ in range(2):  # n draws of one sequence ask twice
            changes = rules.adjustments(tokens)
            assert changes is None or len(set(changes.token_ids.tolist())) == len(changes.token_ids)
            assert applied(changes, LOGITS) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_penalties_by_hand() -> None:
    logits = np.zeros(V, np.float32)
    logits[:4] = [4.0, -1.0, 2.0, 3.0]
    new = sequence([0, 1, 2, 2], 2, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    changes = rules_for(new, 20)
    assert changes is not None
    # 0 and 1 stand in the prompt, 2 was generated twice: 2 / 2 - 0.5 - 2 * 0.25.
    assert applied(changes.adjustments(np.array([0, 1, 2, 2], np.int32)), logits)[:4] == [2.0, -2.0, 0.0, 3.0]


def test_bad_words_are_not_completed() -> None:
    rules = rules_for(sequence([3, 4], 2, bad_words=[[5], [3, 4, 6], [7, 8]]), 20)
    assert rules is not None

    def banned(*output: int) -> set[int]:
        edited = applied(rules.adjustments(np.array([3, 4, *output], np.int32)), LOGITS)
        return {token_id for token_id, value in enumerate(edited) if value == -math.inf}

    assert banned() == {5}  # the prompt isn't searched
    assert banned(7) == {5, 8}
    assert banned(7, 3, 4) == {5, 6}
    assert banned(4, 3) == {5}


def test_bad_words_give_way_where_nothing_else_may_come() -> None:
    rules = rules_for(sequence([1], 1, bad_words=[[5], [6]], allowed_token_ids=[5, 6]), 20)
    assert rules is not None
    edited = applied(rules.adjustments(np.array([1], np.int32)), LOGITS)
    assert [token_id for token_id, value in enumerate(edited) if value > -math.inf] == [5, 6]


def test_min_tokens_costs_nothing_once_they_are_there() -> None:
    rules = rules_for(sequence([1], 1, eos=[2, 3], min_tokens=2, stop_token_ids=[4]), 20)
    assert rules is not None
    for output in ([], [5]):
        changes = rules.adjustments(np.array([1, *output], np.int32))
        assert changes is not None and changes.token_ids.tolist() == [2, 3, 4]
        assert changes.biases.tolist() == [-math.inf] * 3
    assert rules.adjustments(np.array([1, 5, 6], np.int32)) is None


def test_most_sequences_have_no_rules() -> None:
    assert (
        rules_for(sequence([1], 1, temperature=0.5, top_k=3, stop_token_ids=[4], logit_bias={}, bad_words=[]), 9)
        is None
    )
