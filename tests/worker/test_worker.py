"""The whole device side on a tiny model, against the dense reference: chunks, decode, mixtures, copies."""

import jax
import msgspec
import numpy as np
import pytest

from jaxllm.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxllm.exceptions import DeviceError
from jaxllm.messages import CachedSequences, NewSequence, SchedulerOutput
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker import buckets
from jaxllm.worker import worker as worker_module
from jaxllm.worker.worker import Worker
from tests.fakes.dense_llama import dense_logits
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

_BLOCK_SIZE = 4
_NOTHING_CACHED = CachedSequences([], [], [], [])


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request):
    return tiny_llama(tie_word_embeddings=request.param == "tied", num_attention_heads=6, num_key_value_heads=2)


def _start(model, path, dtype):
    """Starts a worker; the tests keep its step counter and live sequences on it."""
    config = EngineConfig(
        model=model_config_from_hf(model.config),
        model_path=write_tiny_folder(path, model),
        dtype=dtype,
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_gpu_blocks_override=32),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
    )
    worker = Worker(config)
    info = worker.initialize()
    assert (info.num_device_blocks, info.block_size) == (32, _BLOCK_SIZE)
    worker.next_step_id = 0
    worker.live = []
    return worker


@pytest.fixture(scope="module")
def worker(model, tmp_path_factory):
    return _start(model, tmp_path_factory.mktemp("model"), "float32")


def _run(worker, scheduled, new=(), cached=_NOTHING_CACHED, copies=(), forget=False, **swaps):
    """Runs one step. `forget` drops every sequence of the steps before."""
    dropped, worker.live = (worker.live, []) if forget else ([], worker.live)
    worker.live = worker.live + [sequence.seq_id for sequence in new]
    step = SchedulerOutput(worker.next_step_id, scheduled, list(new), cached, {}, list(copies), dropped, **swaps)
    worker.next_step_id += 1
    return worker.execute_model(step)


def _new(seq_id, token_ids, blocks, **params):
    params = {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2, **params}
    return NewSequence(seq_id, token_ids, len(token_ids), blocks, 0, seq_id, SamplingParams(**params))


def _log_softmax(logits):
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def _assert_sampled(model, output, seq_id, token_ids):
    """The draw after token_ids is the dense model's, with its log probabilities."""
    expected = _log_softmax(dense_logits(model, token_ids))[-1]
    (token,) = output.sampled[seq_id]
    order = np.argsort(-expected)[:5]
    assert token.token_id == order[0]
    assert token.logprobs.rank == 1
    assert token.logprobs.top_token_ids == order.tolist()
    np.testing.assert_allclose(token.logprobs.top_logprobs, expected[order], atol=1e-5)
    assert token.logprobs.logprob == pytest.approx(expected[order[0]], abs=1e-5)


def _assert_prompt_scores(model, scores, token_ids):
    expected = _log_softmax(dense_logits(model, token_ids))[np.arange(len(token_ids) - 1), token_ids[1:]]
    np.testing.assert_allclose([score.logprob for score in scores], expected, atol=1e-5)
    assert all(len(score.top_token_ids) == 2 for score in scores)


def test_prompt_in_scattered_blocks_then_decode(worker, model):
    token_ids = [int(t) for t in np.random.default_rng(1).integers(3, 300, 13)]
    output = _run(worker, {1: 13}, [_new(1, token_ids, [9, 2, 30, 5])], forget=True)
    _assert_prompt_scores(model, output.prompt_logprobs[1], token_ids)
    for _ in range(3):
        _assert_sampled(model, output, 1, token_ids)
        token_ids = [*token_ids, output.sampled[1][0].token_id]
        output = _run(worker, {1: 1}, cached=CachedSequences([1], [token_ids[-1:]], [[]], []))
        assert 1 not in output.prompt_logprobs


def test_chunked_prompt_beside_a_decoding_sequence(worker, model):
    rng = np.random.default_rng(2)
    first, second = ([int(t) for t in rng.integers(3, 300, n)] for n in (6, 21))
    output = _run(worker, {1: 6}, [_new(1, first, [3, 4, 7])], forget=True)
    scores = []
    for count in (9, 10, 2):
        first = [*first, output.sampled[1][0].token_id]
        new = [_new(2, second, [11, 1, 20, 6, 8, 14])] if count == 9 else []
        seq_ids = [1] if new else [1, 2]
        cached = CachedSequences(seq_ids, [first[-1:], []][: len(seq_ids)], [[], []][: len(seq_ids)], [])
        output = _run(worker, {1: 1, 2: count}, new, cached)
        _assert_sampled(model, output, 1, first)
        scores += output.prompt_logprobs[2]
        assert (2 in output.sampled) == (count == 2)
    _assert_sampled(model, output, 2, second)
    _assert_prompt_scores(model, scores, second)


def test_a_copied_block_is_as_good_as_the_original(worker, model):
    token_ids = [int(t) for t in np.random.default_rng(3).integers(3, 300, 6)]
    output = _run(worker, {1: 6}, [_new(1, token_ids, [3, 4])], forget=True)
    token_ids = [*token_ids, output.sampled[1][0].token_id]
    cached = CachedSequences([1], [token_ids[-1:]], [[]], [(1, 1, 17)])
    _assert_sampled(model, _run(worker, {1: 1}, cached=cached, copies=[(4, 17)]), 1, token_ids)


def test_swapped_blocks_come_back_elsewhere_and_may_be_copied_at_once(worker, model):
    rng = np.random.default_rng(4)
    token_ids, other = ([int(t) for t in rng.integers(3, 300, n)] for n in (18, 19))
    output = _run(worker, {1: 16}, [_new(1, token_ids, [3, 4, 5, 6, 7])], forget=True)
    output = _run(worker, {1: 2}, cached=CachedSequences([1], [[]], [[]], []))
    token_ids = [*token_ids, output.sampled[1][0].token_id]
    out = [(block, block - 2) for block in (3, 4, 5, 6, 7)]
    # The other one writes the very blocks that are being swapped out.
    _run(worker, {2: 16}, [_new(2, other, [7, 6, 5, 4, 3])], forget=True, blocks_to_swap_out=out)
    back = [(host_id, host_id + 20) for _, host_id in out]
    new = [_new(3, token_ids, [21, 22, 23, 24, 30])]
    new = [msgspec.structs.replace(new[0], num_computed_tokens=18)]
    output = _run(worker, {3: 1}, new, forget=True, blocks_to_swap_in=back, copies=[(25, 30)])
    _assert_sampled(model, output, 3, token_ids)


def test_draws_without_logprobs_carry_none(worker):
    output = _run(worker, {1: 2}, [_new(1, [5, 6], [3], logprobs=None, prompt_logprobs=None)], forget=True)
    assert output.sampled[1][0].logprobs is None
    assert output.prompt_logprobs == {}


def test_bfloat16_weights_agree_to_their_precision(tmp_path):
    model = tiny_llama()
    token_ids = [int(t) for t in np.random.default_rng(4).integers(3, 300, 13)]
    output = _run(_start(model, tmp_path, "bfloat16"), {1: 13}, [_new(1, token_ids, [9, 2, 30, 5])])
    expected = _log_softmax(dense_logits(model, token_ids))[np.arange(12), token_ids[1:]]
    difference = np.abs([score.logprob for score in output.prompt_logprobs[1]] - expected)
    assert 1e-5 < difference.max() < 0.05


def test_a_beam_gets_its_candidates_and_no_draw(worker, model):
    token_ids = [int(t) for t in np.random.default_rng(4).integers(3, 300, 6)]
    beam = {"use_beam_search": True, "n": 2, "best_of": 3, "logprobs": None, "prompt_logprobs": None}
    news = [_new(1, token_ids, [3, 4], **beam), _new(2, token_ids, [5, 6], prompt_logprobs=None)]
    output = _run(worker, {1: 6, 2: 6}, news, forget=True)
    expected = _log_softmax(dense_logits(model, token_ids))[-1]
    order = np.argsort(-expected)[:6]
    assert output.beam_candidates.keys() == {1} and output.sampled.keys() == {2}
    assert output.beam_candidates[1].token_ids == order.tolist()
    np.testing.assert_allclose(output.beam_candidates[1].logprobs, expected[order], atol=1e-5)
    _assert_sampled(model, output, 2, token_ids)


def test_a_device_that_cannot_be_had_or_used_is_a_device_error(model, tmp_path, monkeypatch):
    def fail(error):
        def raise_it(*args):
            raise error

        return raise_it

    monkeypatch.setattr(jax, "default_backend", fail(RuntimeError("Unable to initialize backend 'tpu': held\nmore")))
    with pytest.raises(DeviceError, match="^no device can be used.*: Unable to initialize backend 'tpu': held$"):
        _start(model, tmp_path, "float32")
    monkeypatch.undo()
    monkeypatch.setattr(worker_module, "load_model", fail(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")))
    with pytest.raises(DeviceError, match="^the device failed while the model was loaded: RESOURCE_EXHAUSTED: 9 GiB$"):
        _start(model, tmp_path, "float32")


def test_a_logit_bias_moves_its_own_draw_alone_and_no_log_probability(worker, model):
    token_ids = [int(t) for t in np.random.default_rng(6).integers(3, 300, 6)]
    logits = dense_logits(model, token_ids)[-1]
    # More entries than one call of the program takes, and a draw that they decide by a hair.
    other = int(np.argsort(-logits)[100])
    many = {token_id: -50.0 for token_id in range(model.config["vocab_size"]) if token_id != other}
    bias = {other: float(logits.max() - logits[other]) + 0.01}
    short = {other: float(logits.max() - logits[other]) - 0.01}
    news = [
        _new(1, token_ids, [3, 4], logit_bias=bias),
        _new(2, token_ids, [5, 6], prompt_logprobs=None),
        _new(3, token_ids, [7, 8], logit_bias=many, logprobs=None, prompt_logprobs=None),
        _new(4, token_ids, [9, 10], logit_bias=short),
    ]
    output = _run(worker, {1: 6}, news[:1], forget=True)
    # Sequences 2 to 4 come in a step of their own: at most 16 tokens each.
    assert output.sampled[1][0].token_id == other
    log_probs = _log_softmax(dense_logits(model, token_ids))[-1]
    assert output.sampled[1][0].logprobs.logprob == pytest.approx(log_probs[other], abs=1e-5)
    assert output.sampled[1][0].logprobs.rank == 101
    first = [*token_ids, other]
    cached = CachedSequences([1], [[other]], [[]], [])
    output = _run(worker, {1: 1, 2: 6, 3: 6}, news[1:3], cached)
    _assert_sampled(model, output, 2, token_ids)
    assert output.sampled[3][0].token_id == other
    biased = dense_logits(model, first)[-1]
    biased[other] += bias[other]
    assert output.sampled[1][0].token_id == int(np.argmax(biased))
    output = _run(worker, {4: 6}, news[3:], forget=True)
    _assert_sampled(model, output, 4, token_ids)


def test_a_step_says_how_much_of_it_is_padding_and_nothing_compiles(worker):
    output = _run(worker, {1: 3}, [_new(1, [5, 6, 7], [3])], forget=True)
    assert (output.num_padded_tokens, output.num_compiles) == (8, 0)


def test_draws_in_rounds_are_the_draws_of_one_round(model, tmp_path, monkeypatch):
    news = [_new(i, [3 + i, 9, 5 + i], [i], prompt_logprobs=None, temperature=1.0) for i in (1, 2, 3)]

    def draw_all():
        output = _run(_start(model, tmp_path, "float32"), {1: 3, 2: 3, 3: 3}, news)
        return {seq_id: [token.token_id for token in tokens] for seq_id, tokens in output.sampled.items()}

    at_once = draw_all()
    monkeypatch.setattr(buckets, "_MAX_NUM_DRAWS_CPU", 2)
    assert draw_all() == at_once and len(at_once) == 3


def test_what_may_not_come_is_not_drawn_and_what_must_is(worker, model):
    """B46, B8: one allowed token is every token; all tokens that would end it are banned before min_tokens."""
    token_ids = [int(t) for t in np.random.default_rng(7).integers(3, 300, 6)]
    logits = dense_logits(model, token_ids)[-1]
    best = np.argsort(-logits).tolist()
    short = {"logprobs": None, "prompt_logprobs": None}
    allowed = _new(1, token_ids, [3, 4], allowed_token_ids=[best[250]], temperature=1.0, prompt_logprobs=None)
    ending = _new(2, token_ids, [5, 6], min_tokens=1, stop_token_ids=best[2:4], **short)
    ending = msgspec.structs.replace(ending, eos_token_ids=best[:2])
    wordy = _new(3, token_ids, [7, 8], **short)
    wordy = msgspec.structs.replace(wordy, bad_words_token_ids=[[best[0]], [best[1], 9]])
    output = _run(worker, {1: 6}, [allowed], forget=True)
    assert output.sampled[1][0].token_id == best[250]
    log_probs = _log_softmax(logits)
    assert output.sampled[1][0].logprobs.logprob == pytest.approx(log_probs[best[250]], abs=1e-5)
    cached = CachedSequences([1], [[best[250]]], [[]], [])
    output = _run(worker, {1: 1, 2: 6, 3: 6}, [ending, wordy], cached)
    assert output.sampled[1][0].token_id == best[250]
    assert output.sampled[2][0].token_id == best[4]
    assert output.sampled[3][0].token_id == best[1]


def test_a_repeated_token_is_penalized(worker, model):
    token_ids = [int(t) for t in np.random.default_rng(8).integers(3, 300, 6)]
    params = {"logprobs": None, "prompt_logprobs": None, "repetition_penalty": 1.5, "frequency_penalty": 0.1}
    seen, output = list(token_ids), _run(worker, {1: 6}, [_new(1, token_ids, [3, 4, 5], **params)], forget=True)
    for _ in range(4):
        logits = dense_logits(model, seen)[-1].astype(np.float64)
        for token_id in set(seen):
            logits[token_id] *= 1 / 1.5 if logits[token_id] > 0 else 1.5
            logits[token_id] -= 0.1 * seen[6:].count(token_id)
        token_id = output.sampled[1][0].token_id
        assert token_id == int(np.argmax(logits))
        seen.append(token_id)
        output = _run(worker, {1: 1}, cached=CachedSequences([1], [[token_id]], [[]], []))
