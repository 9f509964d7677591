"""vllm.grpc.engine.VllmEngine: what a gateway asks, and what it gets."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxllm.engine.front_end import FrontEnd
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.tokenizer_archive import build_archive
from jaxllm.entrypoints.grpc_server.vllm_convert import to_sampling_params
from jaxllm.sampling_params import SamplingParams
from jaxllm.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.fakes.fake_cores import fake_config
from tests.fakes.grpc_servers import LONG, RunningServer, Stub, running_server, stub_of

_SamplingParams = descriptors.message_class("vllm.grpc.engine.SamplingParams")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def stub(server: RunningServer) -> Iterator[Stub]:
    with stub_of(server, descriptors.VLLM_ENGINE) as made:
        yield made


def ids(text: str) -> dict[str, Any]:
    return {"input_ids": [*text.encode()]}


def test_without_streaming_only_completes_come(stub: Stub) -> None:
    params = {"seed": 3, "n": 2, "max_tokens": 4}
    responses = list(stub.Generate(tokenized=ids("abc"), sampling_params=params))
    assert [response.WhichOneof("response") for response in responses] == ["complete"] * 2
    completes = sorted((response.complete for response in responses), key=lambda complete: complete.index)
    # The fake goes seed letters at a time; sequence i draws from seed + i.
    assert [bytes(complete.output_ids) for complete in completes] == [b"filo", b"gkos"]
    for complete in completes:
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 4)
        assert complete.WhichOneof("matched_stop") is None


def test_chunks_come_before_the_complete_of_their_sequence(stub: Stub) -> None:
    params = {"seed": 3, "n": 2, "max_tokens": 50, "logprobs": 1, "prompt_logprobs": 0}
    request = {"tokenized": ids("abc"), "sampling_params": params, "stream": True}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    scores: dict[int, list[float]] = {0: [], 1: []}
    completes = {}
    for response in stub.Generate(**request):
        if response.WhichOneof("response") == "complete":
            completes[response.complete.index] = response.complete
            continue
        chunk = response.chunk
        assert chunk.index not in completes
        assert chunk.HasField("input_logprobs") == (not tokens[chunk.index])
        assert chunk.completion_tokens == len(chunk.token_ids) and chunk.prompt_tokens == 3
        tokens[chunk.index] += chunk.token_ids
        scores[chunk.index] += chunk.output_logprobs.token_logprobs
    assert sorted(completes) == [0, 1]
    for index, complete in completes.items():
        assert tokens[index] == list(complete.output_ids) and len(complete.output_ids) == 50
        assert scores[index] == list(complete.output_logprobs.token_logprobs) == [-1.0] * 50
        assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
        assert [list(top.values) for top in complete.output_logprobs.top_logprobs] == [[-1.0]] * 50
        # The first prompt token has no probability; the fake's others tell their position.
        prompt = complete.input_logprobs
        assert [score.HasField("value") for score in prompt.token_logprobs] == [False, True, True]
        assert [score.value for score in prompt.token_logprobs] == [0, -1, -2]
        assert bytes(prompt.token_ids) == b"abc" and not prompt.top_logprobs


def test_stop_strings_and_stop_ids(stub: Stub) -> None:
    greedy = {"temperature": 0, "max_tokens": 20}
    (by_string,) = stub.Generate(text="a", sampling_params={**greedy, "stop": ["de"]})
    assert bytes(by_string.complete.output_ids) == b"bcde"
    assert (by_string.complete.finish_reason, by_string.complete.matched_stop_str) == ("stop", "de")
    (by_id,) = stub.Generate(text="a", sampling_params={**greedy, "stop_token_ids": [ord("d")]})
    assert bytes(by_id.complete.output_ids) == b"bcd"
    assert (by_id.complete.finish_reason, by_id.complete.matched_token_id) == ("stop", ord("d"))


def test_zeros_mean_the_default() -> None:
    expected = SamplingParams(max_tokens=None, detokenize=False, skip_special_tokens=False)
    assert to_sampling_params(_SamplingParams()) == expected
    zeros = _SamplingParams(
        top_p=0, top_k=0, min_p=0, frequency_penalty=0, presence_penalty=0, repetition_penalty=0, min_tokens=0, n=0
    )
    assert to_sampling_params(zeros) == expected
    assert to_sampling_params(_SamplingParams(repetition_penalty=1, spaces_between_special_tokens=True)) == expected
    assert to_sampling_params(_SamplingParams(temperature=0)).is_greedy
    assert to_sampling_params(_SamplingParams(seed=0)).seed == 0
    assert to_sampling_params(_SamplingParams(logit_bias={7: -0.5})).logit_bias == {7: -0.5}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 3}
    assert to_sampling_params(_SamplingParams(**penalties)) == msgspec.structs.replace(expected, **penalties)
    assert to_sampling_params(_SamplingParams(stop=["a"])).detokenize


UNSUPPORTED = [
    ("truncate_prompt_tokens", {"sampling_params": {"truncate_prompt_tokens": 0}}),
    ("regex", {"sampling_params": {"regex": ""}}),
    ("choice", {"sampling_params": {"choice": {"choices": ["a"]}}}),
    ("json_object", {"sampling_params": {"json_object": False}}),
    ("kv_transfer_params", {"kv_transfer_params": {}}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
    ("mm_inputs", {"mm_inputs": {}}),
    ("extra_mm_inputs", {"extra_mm_inputs": [{}]}),
    ("media_refs", {"media_refs": {}}),
    ("data_parallel_rank", {"data_parallel_rank": 1}),
]


@pytest.mark.parametrize(("name", "fields"), UNSUPPORTED)
def test_what_isnt_supported_is_refused_by_name(stub: Stub, name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(tokenized=ids("a"), **fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"{name} isn't supported by this server; leave it out"


@pytest.mark.parametrize("fields", [{}, {"tokenized": {}}, {"text": ""}, {"tokenized": ids("a" * (LONG + 100))}])
def test_bad_inputs(stub: Stub, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(data_parallel_rank=0, **fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_abort_by_the_gateways_name(server: RunningServer, stub: Stub) -> None:
    stream = stub.Generate(request_id="chatcmpl-1", tokenized=ids("a"), sampling_params={"temperature": 0}, stream=True)
    next(stream)
    stub.Abort(request_ids=["chatcmpl-1", "unknown"])
    assert list(stream)[-1].complete.finish_reason == "abort"
    server.wait_until_idle()


def test_health_model_and_server(server: RunningServer, stub: Stub) -> None:
    assert stub.HealthCheck().healthy
    info = stub.GetModelInfo()
    assert (info.served_model_name, info.model_path, info.is_generation) == ("fake", "fake.gguf", True)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (LONG + 100, LONG + 99, 260)
    assert (list(info.eos_token_ids), info.bos_token_id) == ([257], 256)
    assert list(info.architectures) == ["LlamaForCausalLM"]
    before = stub.GetServerInfo()
    stream = stub.Generate(tokenized=ids("a"), sampling_params={"temperature": 0}, stream=True)
    next(stream)
    during = stub.GetServerInfo()
    assert (before.active_requests, during.active_requests, during.data_parallel_size) == (0, 1, 1)
    assert during.last_receive_timestamp > 0 and during.uptime_seconds > 0 and during.max_num_seqs == 256
    (load,) = stub.GetLoads().loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
    assert 0 < load.token_usage < 1 and load.num_used_tokens % 16 == 0 and load.max_total_num_tokens == 4096 * 16
    assert not stub.FlushCache().success
    stream.cancel()
    server.wait_until_idle()
    assert stub.FlushCache(timeout_s=5).success


def test_an_engine_that_loads_is_not_healthy() -> None:
    def load() -> FrontEnd:
        raise OSError("no such disk")

    with running_server(load, is_ready=False) as server, stub_of(server, descriptors.VLLM_ENGINE) as stub:
        assert not stub.HealthCheck().healthy
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelInfo()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def real_tokenizer() -> HuggingFaceTokenizer:
    """A word tokenizer of the tokenizers library; large, so that its archive takes more than one chunk."""
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(4000)]
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "hello", "world", *digests])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    return HuggingFaceTokenizer(backend, bos_token_id=1, eos_token_ids=(2,), chat_template="{{ messages }}")


def test_the_tokenizer_comes_as_a_zip_archive() -> None:
    tokenizer = real_tokenizer()
    with running_server(lambda: FrontEnd(fake_config(), tokenizer, [2])) as server:
        with stub_of(server, descriptors.VLLM_ENGINE) as stub:
            chunks = list(stub.GetTokenizer())
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) > 1 and all(len(chunk.data) == 64 << 10 for chunk in chunks[:-1])
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == ["tokenizer.json", "tokenizer_config.json"]
        loaded = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        config = json.loads(archive.read("tokenizer_config.json"))
    assert loaded.encode("hello world").ids == tokenizer.encode("hello world") == [3, 4]
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == ("<s>", "</s>", "{{ messages }}")
    assert data == build_archive(real_tokenizer())
