"""An EngineCore in a process of its own: the handshake, deaths in both directions, and what nobody may leave behind."""

import functools
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from jaxllm.engine.core_messages import EngineFailed, FromCore, LoadProgress, Ready
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.engine_core_client import EngineCoreClient
from jaxllm.engine.llm_engine import LLMEngine, make_client
from jaxllm.engine.sync_mp_client import SyncMPClient
from jaxllm.entrypoints.offline_runner import OfflineRunner
from jaxllm.exceptions import (
    ConfigError,
    DeviceError,
    EngineDeadError,
    InvalidRequestError,
    JaxllmError,
    ModelLoadError,
    RequestFailedError,
)
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from tests.fakes.fake_cores import FAKES, fake_config, fake_front_end

ROOT = Path(__file__).parents[2]
# No test may wait for less than a machine may take that does other things as well.
PATIENCE_S = 300.0
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where socket folders are made; empty again after each test, as is the list of children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children()}
    yield tmp_path
    wait_until(lambda: {child.pid for child in psutil.Process().children()} <= before)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    config, tokenizer, eos_token_ids = fake_front_end()
    engine = LLMEngine(config, tokenizer, make_client(config, "mp"), eos_token_ids)
    yield engine
    engine.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it didn't happen"
        time.sleep(0.02)


def core_pid(client: EngineCoreClient) -> int:
    assert isinstance(client, SyncMPClient) and isinstance(client._link, CoreProcess)
    return client._link.pid


@functools.cache
def runner_of(engine: LLMEngine) -> OfflineRunner:
    return OfflineRunner(engine)


def texts(engine: LLMEngine, prompts: list[str], params: SamplingParams = GREEDY) -> list[str]:
    outputs = runner_of(engine).run(prompts, [params] * len(prompts), lambda outputs: None)
    return [output.outputs[0].text for output in outputs]


def test_b123_outputs_come_in_input_order(engine: LLMEngine) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (9, 2, 17, 1, 5)]
    outputs = OfflineRunner(engine).run(list("abcde"), params, lambda outputs: None)
    assert [output.outputs[0].text for output in outputs] == ["bcdefghij", "cd", "defghijklmnopqrst", "e", "fghij"]


def test_everything_works_as_in_this_process(engine: LLMEngine) -> None:
    config, tokenizer, eos_token_ids = fake_front_end()
    here = LLMEngine(config, tokenizer, make_client(config, "inproc"), eos_token_ids)
    params = [
        SamplingParams(n=3, seed=5, max_tokens=9, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, stop="xyz", prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[ord("q")], include_stop_str_in_output=True),
    ]
    prompts = ["hello", "s", "abc"]
    results = [OfflineRunner(one).run(prompts, params, lambda outputs: None) for one in (engine, here)]
    for there, expected in zip(*results, strict=True):
        assert [_facts(one) for one in there.outputs] == [_facts(one) for one in expected.outputs]
        assert there.prompt_logprobs == expected.prompt_logprobs


def _facts(output: Any) -> tuple[Any, ...]:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason, output.logprobs


def test_utility_calls_come_between_steps(engine: LLMEngine) -> None:
    engine.add_request("r", "a", SamplingParams(temperature=0, max_tokens=100))
    engine.step()
    assert engine.reset_prefix_cache() is False
    assert engine.get_stats().num_running == 1
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 100  # no output was lost to the calls
    assert engine.reset_prefix_cache() is True


def test_a_failed_batch_leaves_nothing_behind(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 3 of 4"):
        texts(engine, ["a", "b", "", "c"])
    wait_until(lambda: engine.get_stats().num_running == 0)
    stats = engine.get_stats()
    assert (stats.num_waiting, stats.num_free_blocks) == (0, 4096)
    assert texts(engine, ["a", "x"]) == ["bcdef", "yzabc"]


def test_an_id_may_be_used_again_at_once(engine: LLMEngine) -> None:
    # News of the first request may still be on their way: they aren't the second one's.
    for _ in range(20):
        engine.add_request("r", "a", SamplingParams(temperature=0, max_tokens=50))
        engine.step()
        engine.abort_request("r")
        engine.add_request("r", "k", GREEDY)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.outputs[0].finish_reason != "abort"]
        assert outputs[-1].outputs[0].text == "lmnop"


def test_b122_an_idle_core_takes_no_time(engine: LLMEngine) -> None:
    assert texts(engine, ["a"]) == ["bcdef"]
    core = psutil.Process(core_pid(engine._client))
    before = sum(core.cpu_times()[:2])
    time.sleep(2)
    assert sum(core.cpu_times()[:2]) - before < 0.2


def test_a_step_that_raises_ends_the_engine_for_everybody(engine: LLMEngine) -> None:
    engine.add_request("good", "a", SamplingParams(temperature=0, max_tokens=100))
    engine.step()
    engine.add_request("bad", "!", GREEDY)
    with pytest.raises(EngineDeadError, match="RuntimeError: the device is on fire"):
        while True:
            engine.step()
    with pytest.raises(EngineDeadError, match="on fire"):
        engine.step()
    with pytest.raises(EngineDeadError, match="on fire"):
        engine.reset_prefix_cache()


def test_kill_9_of_the_core_is_told_at_once(engine: LLMEngine) -> None:
    engine.add_request("r", "a", SamplingParams(temperature=0, max_tokens=100))
    engine.step()
    engine.add_request("s", "?", GREEDY)  # a step that never ends
    os.kill(core_pid(engine._client), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the engine process was ended by SIGKILL"):
        while True:
            engine.step()
    engine.abort_request(["r", "s"])  # nobody to tell
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort", "abort"]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_a_whole_group_of_processes_leave_the_core_alone(engine: LLMEngine, signal_number: int) -> None:
    os.kill(core_pid(engine._client), signal_number)
    assert texts(engine, ["a"]) == ["bcdef"]


def test_shutdown_does_not_wait_for_a_step_that_never_ends(engine: LLMEngine) -> None:
    pid = core_pid(engine._client)
    engine.add_request("r", "?", GREEDY)
    engine.shutdown()
    engine.shutdown()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("error", [ConfigError, ModelLoadError, DeviceError])
def test_what_stops_the_core_from_starting_arrives_as_it_is(error: type[JaxllmError]) -> None:
    with pytest.raises(error, match=f"^the test wants a {error.__name__}$"):
        make_client(fake_config(f"{FAKES}:Fails{error.__name__}"), "mp")


@pytest.mark.parametrize("executor_class", [f"{FAKES}:FailsKeyError", f"{FAKES}:FailsSystemExit", "no_module:Executor"])
def test_whatever_else_stops_it_is_an_engine_dead_error(executor_class: str) -> None:
    with pytest.raises(EngineDeadError):
        make_client(fake_config(executor_class), "mp")


def test_loading_is_told_step_by_step() -> None:
    messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
    core = CoreProcess(fake_config(f"{FAKES}:SlowToLoad"), messages.put)
    seen: list[FromCore] = [messages.get(timeout=PATIENCE_S)]
    while not isinstance(seen[-1], Ready):
        seen.append(messages.get(timeout=PATIENCE_S))
    core.shutdown()
    progress = [message for message in seen if isinstance(message, LoadProgress)]
    assert progress[0] == LoadProgress("loading weights", 0.0, None)
    percents = [message.percent for message in progress]
    assert percents == sorted(percents) and percents[-1] == 100
    assert all(message.eta_s is not None and message.eta_s >= 0 for message in progress[1:])
    assert seen[-1].kv_cache_infos[0].num_device_blocks == 4097


def test_shutdown_while_loading_does_not_wait_for_it() -> None:
    messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
    core = CoreProcess(fake_config(f"{FAKES}:NeverLoads"), messages.put)
    assert isinstance(messages.get(timeout=PATIENCE_S), LoadProgress)
    core.shutdown()
    assert isinstance(messages.get(timeout=0), EngineFailed)


def test_the_socket_files_are_gone_once_both_ends_are_connected(sockets: Path) -> None:
    client = SyncMPClient(fake_config(), CoreProcess)
    assert list(sockets.iterdir()) == []
    client.shutdown()


def test_only_this_user_can_enter_the_socket_folder(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    bind = zmq.Socket.bind

    def seen(self: Any, address: str) -> Any:
        result = bind(self, address)
        modes.append(Path(address.removeprefix("ipc://")).parent.stat().st_mode & 0o777)
        return result

    monkeypatch.setattr(zmq.Socket, "bind", seen)
    SyncMPClient(fake_config(), CoreProcess).shutdown()
    assert modes == [0o700, 0o700]


def test_it_goes_when_nobody_has_it_any_more() -> None:
    client = SyncMPClient(fake_config(), CoreProcess)
    pid = core_pid(client)
    assert psutil.pid_exists(pid)
    del client
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_message_that_cannot_be_sent_is_the_requests_own_fault() -> None:
    client = SyncMPClient(fake_config(), CoreProcess)
    with pytest.raises(InvalidRequestError, match="can't be sent to the engine"):
        client.add_request(EngineCoreRequest("r", [2**70], GREEDY, [], 0.0, 0, 5))
    client.add_request(EngineCoreRequest("s", [97], GREEDY, [], 0.0, 0, 1))
    assert [output.request_id for output in client.get_output().outputs] == ["s"]
    client.shutdown()


def test_one_request_that_cannot_be_added_fails_alone() -> None:
    config, tokenizer, eos_token_ids = fake_front_end(fake_config(max_model_len=64))
    client = SyncMPClient(config, CoreProcess)
    engine = LLMEngine(config, tokenizer, client, eos_token_ids)
    engine.add_request("good", "a", SamplingParams(temperature=0, max_tokens=50))
    # One that no front end of ours lets through.
    bad = EngineCoreRequest("bad-0", [97] * 100, GREEDY, [], 0.0, 0, 5)
    engine._output_processor.add_request("bad", bad, None)
    client.add_request(bad)
    with pytest.raises(RequestFailedError, match="must be shorter than max_model_len=64"):
        while True:
            engine.step()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 50
    engine.shutdown()


def test_hostile_frames_are_dropped_and_the_core_lives(tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    client = SyncMPClient(fake_config(), CoreProcess)
    link = client._link
    assert isinstance(link, CoreProcess)
    frames = [os.urandom(size) for size in range(0, 200)]
    frames += [b"\xdd\xff\xff\xff\xff", b"\x91" * 10_000, pickle.dumps(_Touch(marker))]
    for frame in frames:
        link._input.send(frame)
        link._input.send_multipart([frame, frame])
    # An unreadable request is at least refused by its id.
    link._input.send(b"\x92\xa3add\x92\xa3bad\xc0")
    client.add_request(EngineCoreRequest("good", [97], GREEDY, [], 0.0, 0, 5))
    outputs: list[EngineCoreOutputs] = []
    while not any(output.finished for one in outputs for output in one.outputs):
        outputs.append(client.get_output())
    assert [refused.request_id for one in outputs for refused in one.refused] == ["bad"]
    assert not marker.exists()
    client.shutdown()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


_FRONT_END = """
import sys, time
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.sync_mp_client import SyncMPClient
from tests.fakes.fake_cores import FAKES, fake_config

def on_message(message):
    print(type(message).__name__, core.pid, flush=True)

if sys.argv[1] == "ctrl-c":
    print("spawning 0", flush=True)
    SyncMPClient(fake_config(f"{FAKES}:NeverLoads"), CoreProcess)
core = CoreProcess(fake_config(FAKES + ":" + sys.argv[1]), on_message)
time.sleep(3600)
"""


def _start_front_end(argument: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _FRONT_END, argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
        cwd=ROOT,
        start_new_session=True,
    )


@pytest.mark.parametrize(("executor", "moment"), [("NeverLoads", "LoadProgress"), ("AlphabetExecutor", "Ready")])
def test_b120_kill_9_of_the_front_end_ends_the_core(sockets: Path, executor: str, moment: str) -> None:
    with _start_front_end(executor, sockets) as front_end:
        assert front_end.stdout is not None
        words = front_end.stdout.readline().split()
        assert words[0] == moment
        pid = int(words[1])
        front_end.kill()
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_kill_9_of_the_front_end_ends_a_core_whose_threads_are_all_held_up(sockets: Path) -> None:
    with _start_front_end("HoldsEveryThread", sockets) as front_end:
        assert front_end.stdout is not None
        pid = int(front_end.stdout.readline().split()[1])
        time.sleep(2)  # now the thread that reads the pipe can't
        front_end.kill()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_core_whose_threads_are_all_held_up_prints_their_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    config = fake_config(f"{FAKES}:HoldsEveryThreadInAStep")
    client = make_client(config, "mp")
    client.add_request(EngineCoreRequest("r", [97], GREEDY, [], 0.0, 0, 5))
    printed: list[str] = []

    def has_told() -> bool:
        printed.append(capfd.readouterr().err)
        return "core_loop.py" in "".join(printed)

    wait_until(has_told)
    assert "in execute_model" in "".join(printed)
    os.kill(core_pid(client), signal.SIGKILL)
    client.shutdown()


def test_kill_9_of_the_front_end_before_they_have_met_leaves_nothing(sockets: Path) -> None:
    with _start_front_end("AlphabetExecutor", sockets) as front_end:
        wait_until(lambda: bool(list(sockets.iterdir())))
        wait_until(lambda: bool(psutil.Process(front_end.pid).children()))
        (child,) = psutil.Process(front_end.pid).children()
        assert child.is_running()
        front_end.kill()
    wait_until(lambda: not child.is_running())


def test_ctrl_c_while_loading_is_clean(sockets: Path) -> None:
    with _start_front_end("ctrl-c", sockets) as front_end:
        assert front_end.stdout is not None and front_end.stderr is not None
        front_end.stdout.readline()
        wait_until(lambda: bool(psutil.Process(front_end.pid).children()))
        (child,) = psutil.Process(front_end.pid).children()
        os.killpg(front_end.pid, signal.SIGINT)  # as a terminal does
        errors = front_end.stderr.read()
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")  # ours alone
    assert not child.is_running()


def test_where_no_socket_can_be_made_the_way_out_is_told(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sockets / ("x" * 100)  # longer than a socket's name may be
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(EngineDeadError, match="with sockets in .*, can't be started: .*; TMPDIR names another place"):
        make_client(fake_config(), "mp")
    folder.rmdir()  # empty


def test_what_the_core_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    make_client(fake_config(f"{FAKES}:PrintsAWord"), "mp").shutdown()
    assert capfd.readouterr() == ("", "word\n")
