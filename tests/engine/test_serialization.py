"""Every message through bytes and back; arrays beside them; and what becomes of bytes that nobody of ours has made."""

import pickle
from pathlib import Path
from typing import Any, get_args

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm import messages
from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.engine import core_messages
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishSequence,
    FromCore,
    Hello,
    LoadProgress,
    Pulse,
    Ready,
    ShutDown,
    StartEngine,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from jaxllm.engine.serialization import DecodeError, MessageDecoder, MessageEncoder
from jaxllm.messages import (
    BeamCandidates,
    CachedSequences,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    ModelRunnerOutput,
    NewSequence,
    RefusedRequest,
    SampledToken,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    StepInfo,
    TokenLogprobs,
)
from jaxllm.sampling_params import SamplingParams

PARAMS = SamplingParams(
    n=3,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=-(2**63),
    stop=["a", "é\n"],
    stop_token_ids=[1, 2],
    ignore_eos=True,
    logit_bias={0: -1.5, 259: 100.0},
    max_tokens=None,
    logprobs=0,
    prompt_logprobs=20,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    min_tokens=3,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    allowed_token_ids=[5, 6],
    bad_words=["a b"],
)
BEAMS = SamplingParams(
    n=2, best_of=4, temperature=0.0, use_beam_search=True, early_stopping="never", length_penalty=-1.5
)
REQUEST = EngineCoreRequest("r-0", [1, 2**31 - 1], PARAMS, [257], 1.25, 2**63 - 1, 7, -3, "salt", [[5], [6, 7]])
STATS = SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
INFO = KVCacheInfo(65, 16, 8, 64, 9)
LOGPROBS = TokenLogprobs(float("-inf"), 3, [5, 6], [-0.5, -0.25])
OUTPUT = EngineCoreOutput(
    "r-0",
    [
        SequenceOutput(0, [SampledToken(5, LOGPROBS), SampledToken(6)], "stop", "é", -1.5),
        SequenceOutput(1, [], "stop", 9),
    ],
    [LOGPROBS],
    16,
    0.125,
    True,
)
CONFIG = EngineConfig(
    model=ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=260,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=128,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1},
        eos_token_ids=(2, 3),
        extra={"layer_types": ["full", "sliding"], "sliding_window": 4096, "nested": {"a": None}},
    ),
    model_path=Path("/models/é.gguf"),
    seed=3,
    cache=CacheConfig(block_size=16, swap_space=0.5),
    scheduler=SchedulerConfig(max_model_len=128, policy="priority"),
    executor_class="package.module:Class",
)
MESSAGES = [
    StartEngine(CONFIG),
    AddRequest(REQUEST),
    AddRequest(EngineCoreRequest("b", [1], BEAMS, [], 0.0, 0, 1)),
    AbortRequests(["a", "b"], 1),
    FinishSequence("a", 2),
    UtilityCall(1, "reset_prefix_cache"),
    UtilityCall(2, "get_stats"),
    ShutDown(),
    Hello(123),
    LoadProgress("loading weights", 12.5, None),
    LoadProgress("compiling"),
    Ready([INFO]),
    EngineCoreOutputs([OUTPUT], STATS),
    EngineCoreOutputs([], STATS, [], StepInfo("mixed", 0.5, 3, 8, 1)),
    EngineCoreOutputs(
        [], STATS, [RefusedRequest("r-1", "too long", "prompt"), RefusedRequest("r-2", "no", None, True)]
    ),
    Pulse(1.5, 1),
    UtilityResult(1, True),
    UtilityResult(2, [STATS, STATS], 1),
    EngineFailed("DeviceError", "no such device"),
    INFO,
    SchedulerOutput(
        step_id=7,
        num_scheduled_tokens={3: 4, 1: 1},
        new_seqs=[NewSequence(3, [1, 2, 3, 4], 4, [9], 0, -1, PARAMS, [257], [[5], [6, 7]])],
        cached_seqs=CachedSequences([1], [[5]], [()], [(1, 0, 8)]),
        num_samples={3: 2},
        blocks_to_copy=[(7, 8)],
        dropped_seq_ids=[2],
        blocks_to_swap_in=[(1, 2)],
    ),
    ModelRunnerOutput({3: [SampledToken(1, LOGPROBS)]}, {3: [LOGPROBS]}, {4: BeamCandidates([1, 2], [-0.5, -1.0])}),
]


class WithArrays(msgspec.Struct, array_like=True):
    name: str
    first: np.ndarray
    others: list[np.ndarray]


def through_bytes(message: Any, message_type: Any) -> Any:
    return MessageDecoder(message_type).decode([bytes(frame) for frame in MessageEncoder().encode(message)])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Any) -> None:
    kinds = [union for union in (ToCore, FromCore) if isinstance(message, union)] or [type(message)]
    back = through_bytes(message, kinds[0])
    assert type(back) is type(message) and back == message
    frames = MessageEncoder().encode(message)
    assert len(frames) == 1 and MessageEncoder().encode(back) == frames


def test_every_message_type_is_among_them() -> None:
    seen = {type(message) for message in MESSAGES}
    assert {*get_args(ToCore), *get_args(FromCore)} <= seen
    structs = {kind for module in (messages, core_messages) for kind in vars(module).values() if _is_struct(kind)}
    parts = {
        CachedSequences, NewSequence, EngineCoreRequest, TokenLogprobs, SampledToken, BeamCandidates, SequenceOutput,
        EngineCoreOutput, SchedulerStats, RefusedRequest, SamplingParams, StepInfo,
    }  # fmt: skip
    assert structs == seen | parts


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_numpys_numbers_arrive_as_plain_ones(field: str) -> None:
    params = SamplingParams(**{field: np.float64(0.5)})
    back = through_bytes(params, SamplingParams)
    assert back == SamplingParams(**{field: 0.5}) and type(getattr(back, field)) is float


@given(
    arrays=st.lists(
        hnp.arrays(
            hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(),
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        ),
        min_size=1,
        max_size=4,
    ),
    is_transposed=st.booleans(),
)
def test_arrays_are_raw_frames_and_come_back_bit_for_bit(arrays: list[np.ndarray], is_transposed: bool) -> None:
    if is_transposed:
        arrays = [array.T for array in arrays]
    frames = MessageEncoder().encode(WithArrays("x", arrays[0], arrays[1:]))
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [array.nbytes for array in arrays]
    decoder: MessageDecoder[WithArrays] = MessageDecoder(WithArrays)
    back = decoder.decode([bytes(frame) for frame in frames])
    for sent, got in zip(arrays, [back.first, *back.others], strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
        assert not got.flags.writeable


def test_numpys_numbers_arrive_as_plain_ones_in_logit_bias() -> None:
    back = through_bytes(SamplingParams(logit_bias={5: np.float64(1.5)}), SamplingParams)
    assert back.logit_bias == {5: 1.5} and type(back.logit_bias[5]) is float


def test_a_large_array_is_not_copied() -> None:
    array = np.arange(1000)
    frame = MessageEncoder().encode(WithArrays("x", array, []))[1]
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)


def test_arrays_of_objects_are_not_sent() -> None:
    with pytest.raises(TypeError, match="arrays of dtype object can't be sent"):
        MessageEncoder().encode(WithArrays("x", np.array([{}]), []))


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        (("<f8", (2,), 1), "isn't 8 bytes"),
        (("<f8", (2**60, 2**60), 1), "isn't 8 bytes"),
        (("<f8", (-1, -1), 1), "has no frame"),
        (("<f8", (1,), 2), "has no frame"),
        (("<f8", (1,), 0), "has no frame"),
        (("<f8", (1,), -1), "has no frame"),
        (("|O", (1,), 1), "dtype |O can't be received"),
        (("no dtype", (1,), 1), "."),
        (("<f8", (1,)), "."),
        ("text", "."),
        (7, "."),
    ],
)
def test_a_false_description_of_an_array_is_refused(described: Any, problem: str) -> None:
    frames = [msgspec.msgpack.encode(("x", described, [])), b"12345678"]
    with pytest.raises(DecodeError, match=problem.replace("|", r"\|")):
        MessageDecoder(WithArrays).decode(frames)


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("jaxllm-bomb"),)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\xdb\x80\x00\x00\x00text",  # a text of two GiB
        b"\x91" * 100_000,
        pickle.dumps(Bomb()),
        msgspec.msgpack.encode(["add", ["r"]]),
        msgspec.msgpack.encode(["nobody knows"]),
        msgspec.msgpack.encode(["call", 1, "__reduce__"]),
        msgspec.msgpack.encode({"type": "shutdown"}),
        msgspec.msgpack.encode(AddRequest(REQUEST)).replace(b"\xcb\x3f\xe0\0\0\0\0\0\0", b"\xcb\x7f\xf8\0\0\0\0\0\0"),
    ],
)
def test_hostile_frames_are_decode_errors(frame: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DecodeError):
        MessageDecoder(ToCore).decode([frame])
    assert not list(tmp_path.iterdir())


@given(st.binary(max_size=200), st.sampled_from([ToCore, FromCore]))
def test_random_bytes_are_a_message_or_a_decode_error(frame: bytes, kind: Any) -> None:
    try:
        message = MessageDecoder[Any](kind).decode([frame])
    except DecodeError:
        return
    assert isinstance(message, kind)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_messages_or_decode_errors(message: Any, data: st.DataObject) -> None:
    frame = bytearray(MessageEncoder().encode(message)[0])
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (frame, frame[:cut]):
        try:
            back = MessageDecoder[Any](ToCore | FromCore).decode([damaged])
        except DecodeError:
            continue
        assert isinstance(back, ToCore | FromCore)
