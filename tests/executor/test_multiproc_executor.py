"""Worker processes: how they fail, what is said about it, and that nothing of them is left."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.llm_engine import LLMEngine, make_client
from jaxllm.exceptions import ConfigError, EngineDeadError
from jaxllm.executor.multiproc_executor import MultiprocExecutor
from jaxllm.sampling_params import SamplingParams
from tests.fakes.fake_cores import fake_front_end
from tests.fakes.fake_workers import mp_executor, worker_config

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, descriptor or shared memory more than before."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    shm = set(os.listdir("/dev/shm"))
    yield
    wait_until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before)
    assert set(os.listdir("/dev/shm")) == shm


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it didn't happen"
        time.sleep(0.02)


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    executor = mp_executor(worker_config(), "AlphabetWorker")
    executor.initialize()
    yield executor
    executor.shutdown()


def engine_of(name: str) -> LLMEngine:
    """Returns an engine whose core, in a process of its own, has two worker processes."""
    config, tokenizer, eos_token_ids = fake_front_end(worker_config(name))
    return LLMEngine(config, tokenizer, make_client(config, "mp"), eos_token_ids)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "jaxllm.executor.worker_proc" in child.cmdline()]


def run_to_the_end(engine: LLMEngine) -> str:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0].text


def test_forty_megabytes_pass_unchanged_and_calls_go_on(executor: MultiprocExecutor) -> None:
    payload = np.random.default_rng(1).bytes(40_000_000)
    assert executor.collective_rpc("echo", (payload,), bytes, PATIENCE_S) == [payload, payload]
    assert executor.collective_rpc("echo", (b"small",), bytes, PATIENCE_S) == [b"small"] * 2


def test_a_late_answer_is_not_taken_for_the_next_ones(executor: MultiprocExecutor) -> None:
    with pytest.raises(TimeoutError, match="the workers haven't answered nap: nothing came within 0.05 s"):
        executor.collective_rpc("nap", (0.5, 1), timeout_s=0.05)
    assert executor.collective_rpc("echo", (b"x",), bytes, PATIENCE_S) == [b"x", b"x"]


def test_idle_workers_take_no_time(executor: MultiprocExecutor) -> None:
    workers = workers_of(psutil.Process())
    assert len(workers) == 2
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    time.sleep(2)
    assert all(sum(worker.cpu_times()[:2]) - start < 0.04 for worker, start in zip(workers, before, strict=True))


def test_a_long_call_is_no_death(executor: MultiprocExecutor) -> None:
    assert len(executor.collective_rpc("nap", (4.5, -1))) == 2
    executor.check_health()


def test_descriptors_are_given_back() -> None:
    def open_and_close() -> int:
        executor = mp_executor(worker_config(), "AlphabetWorker")
        executor.initialize()
        executor.shutdown()
        return len(os.listdir("/proc/self/fd"))

    assert open_and_close() == open_and_close()


def test_workers_go_when_nobody_has_the_executor_any_more() -> None:
    executor = mp_executor(worker_config(), "AlphabetWorker")
    executor.initialize()
    (first, second) = workers_of(psutil.Process())
    del executor
    wait_until(lambda: not first.is_running() and not second.is_running())
    assert not psutil.pid_exists(first.pid) and not psutil.pid_exists(second.pid)


def test_a_death_while_loading_gives_its_last_words_in_one_line() -> None:
    executor = mp_executor(worker_config(), "DiesAtStart")
    with pytest.raises(EngineDeadError) as caught:
        executor.initialize()
    says = str(caught.value)
    assert says.startswith("worker 1 (process ") and says.endswith(
        ") ended with exit code 7: no more memory on this planet"
    )
    assert "\n" not in says


def test_different_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have the same KV cache, got 4097, 4098 blocks"):
        mp_executor(worker_config(), "Unequal").initialize()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("aK", r"worker 1 \(process [0-9]+\) was ended by SIGKILL"),
        ("aF", r"worker 1 \(process [0-9]+\) stands still: no heartbeat for 3 s"),
        ("aE", "worker 1 failed at execute_model: ValueError: rank 1 can't"),
    ],
    ids=["killed", "frozen", "raises"],
)
def test_a_worker_that_fails_in_a_step_ends_the_engine(prompt: str, says: str) -> None:
    """It is another worker whose reply is waited for, and which waits for the one that has failed."""
    engine = engine_of("step_killer_mp")
    core = psutil.Process(engine._client._link.pid)  # type: ignore[attr-defined]
    family = [core, *workers_of(core)]
    assert len(family) == 3
    engine.add_request("good", "a", GREEDY)
    assert run_to_the_end(engine) == "bcdef"
    engine.add_request("bad", prompt, GREEDY)
    with pytest.raises(EngineDeadError, match=f"^{says}$"):
        run_to_the_end(engine)
    wait_until(lambda: not any(process.is_running() for process in family))


def test_a_death_between_steps_is_told_without_asking() -> None:
    engine = engine_of("alphabet_mp")
    core = psutil.Process(engine._client._link.pid)  # type: ignore[attr-defined]
    workers_of(core)[0].kill()
    wait_until(lambda: not core.is_running())
    with pytest.raises(EngineDeadError, match="worker 0 .* was ended by SIGKILL"):
        engine.get_stats()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_a_whole_group_leave_the_workers_alone(executor: MultiprocExecutor, signal_number: int) -> None:
    for worker in workers_of(psutil.Process()):
        worker.send_signal(signal_number)
    assert executor.collective_rpc("echo", (b"x",), bytes, PATIENCE_S) == [b"x", b"x"]


_PARENT = """
import os, sys, time
from tests.fakes.fake_workers import mp_executor, worker_config
executor = mp_executor(worker_config(), "AlphabetWorker")
executor.initialize()
print(*executor.collective_rpc("pid", (), int), flush=True)
time.sleep(3600)
"""


def test_kill_9_of_the_parent_ends_even_a_frozen_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        workers[1].suspend()
        parent.kill()
    wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))


def test_replicas_have_jobs_of_their_own() -> None:
    config: EngineConfig = worker_config()
    parallel = dataclasses.replace(config.parallel, data_parallel_size=3, data_parallel_rank=2)
    start = MultiprocExecutor(dataclasses.replace(config, parallel=parallel))._start_message()
    assert start.first_device == 4  # behind the two replicas of two devices before it
    assert (start.config.parallel.data_parallel_size, start.config.parallel.data_parallel_rank) == (1, None)
