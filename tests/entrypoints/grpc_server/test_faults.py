"""What happens when the engine's process is killed, when clients leave, and when they send nonsense."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.core_process import CoreProcess
from jaxllm.entrypoints.grpc_server import descriptors
from tests.fakes.grpc_servers import LONG, RunningServer, Stub, running_server, stub_of

ENDLESS = {"temperature": 0, "max_tokens": LONG}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: RunningServer) -> Iterator[Stub]:
    with stub_of(server) as made:
        yield made


def core_pid() -> int:
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for child in children for pid in child.read_text().split()]
    (pid,) = [pid for pid in pids if b"engine_core_proc" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


@pytest.mark.slow
def test_when_the_engines_process_is_killed_every_client_is_told() -> None:
    with running_server(connect=CoreProcess) as server, stub_of(server) as stub:
        with stub_of(server, descriptors.HEALTH) as health:
            watch = health.Watch()
            next(watch)
            streams = [stub.GenerateStream(text="a", sampling_params=ENDLESS) for _ in range(32)]
            for stream in streams:
                next(stream)
            killed_s = time.monotonic()
            os.kill(core_pid(), signal.SIGKILL)
            assert next(watch).status == 2
            for stream in streams:
                with pytest.raises(grpc.RpcError) as caught:
                    for _ in stream:
                        pass
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            # Two seconds are the promise; a shared machine may be slow.
            assert time.monotonic() - killed_s < 20
            assert stub.GetStatus().phase == "dead"


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: RunningServer, stub: Stub) -> None:
    for number in range(150):
        stream = stub.GenerateStream(text="a", sampling_params={"n": 1 + number % 3, "max_tokens": LONG})
        for _ in range(number % 4):  # 0: before anything has come back
            next(stream)
        stream.cancel()
    server.wait_until_idle()
    assert server.engine.kv_cache_infos is not None
    (info,) = server.engine.kv_cache_infos
    assert server.run(server.engine.get_stats()).num_free_blocks == info.num_device_blocks - 1
    assert server.settings.admission.num_requests == server.settings.admission.num_waiting == 0


NUMBERS = st.one_of(st.floats(width=32), st.integers(-3, 3), st.just(float("nan")))
SIZES = st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1))
FIELDS = {
    "n": st.one_of(st.integers(0, 3), SIZES),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "top_k": st.integers(-(2**31), 2**31 - 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text(max_size=4), max_size=3),
    "stop_token_ids": st.lists(SIZES, max_size=3),
    "logprobs": SIZES,
    "prompt_logprobs": SIZES,
    "logit_bias": st.dictionaries(SIZES, NUMBERS, max_size=3),
    "min_tokens": SIZES,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "allowed_token_ids": st.lists(SIZES, max_size=3),
    "bad_words": st.lists(st.text(st.characters(codec="utf-8"), max_size=4), max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
# Few fields at once: a request that is refused for one tells nothing of the others.
PARAMS = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({"max_tokens": st.integers(1, 4), **{name: FIELDS[name] for name in names}})
)
NAMES = st.one_of(st.just(""), st.text(st.characters(codec="utf-8"), max_size=5))
# The fake's device fails at "!" and hangs at "?".
TEXTS = st.text(st.characters(exclude_characters="!?", codec="utf-8"), max_size=20)
IDS = st.lists(SIZES.filter(lambda token_id: token_id not in (33, 63)), max_size=20)
PROMPTS = st.one_of(
    st.builds(lambda text: {"text": text}, TEXTS), st.builds(lambda ids: {"token_ids": {"ids": ids}}, IDS)
)


def test_whatever_is_asked_is_answered_or_refused(stub: Stub) -> None:
    num_answers = 0

    @settings(max_examples=200)
    @given(PROMPTS, PARAMS, NAMES, st.sampled_from([0, 0, 0, -1]))
    def ask(prompt: dict[str, Any], params: dict[str, Any], request_id: str, priority: int) -> None:
        nonlocal num_answers
        try:
            reply = stub.Generate(**prompt, sampling_params=params, request_id=request_id, priority=priority)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        else:
            num_answers += 1
            assert len(reply.completions) == (params.get("n") or 1)
            assert all(part.finish_reason in ("stop", "length") for part in reply.completions)

    ask()
    assert num_answers > 10


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_are_survived(server: RunningServer, stub: Stub, data: bytes) -> None:
    for service_name in (descriptors.INFERENCE, descriptors.VLLM_ENGINE):
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_stream(f"/{service_name}/Generate")(data, timeout=60)
            try:
                next(call, None)
                call.cancel()
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stub.GetStatus().phase == "ready"
