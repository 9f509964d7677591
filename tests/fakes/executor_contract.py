"""What every executor promises, checked on one of them: `python -m tests.fakes.executor_contract BACKEND`.

In a process of its own, since executors start processes and join jobs; under the external launcher every rank runs it.
Prints one line a check, and ends with code 1 if one fails.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import psutil

from jaxllm.exceptions import ConfigError, EngineDeadError
from jaxllm.executor.executor import Executor
from jaxllm.messages import CachedSequences, KVCacheInfo, NewSequence, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.fake_workers import FAKES, mp_executor, worker_config

_PATIENCE_S = 300.0
_NO_CACHED = CachedSequences([], [], [], [])


def make(backend: str) -> tuple[Executor, list[int]]:
    """Returns an executor of two workers (uni: one), and the ranks whose values it returns."""
    config = worker_config()
    match backend:
        case "uni":
            from jaxllm.executor.uniproc_executor import UniProcExecutor

            os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
            return UniProcExecutor(config, f"{FAKES}:AlphabetWorker"), [0]
        case "mp":
            return mp_executor(config, "AlphabetWorker"), [0, 1]
        case "ray":
            from jaxllm.executor.ray_distributed_executor import RayDistributedExecutor

            return RayDistributedExecutor(config, f"{FAKES}:AlphabetWorker", forms_job=False), [0, 1]
        case "external_launcher":
            from jaxllm.executor.external_launcher import ExecutorWithExternalLauncher

            return ExecutorWithExternalLauncher(config, f"{FAKES}:AlphabetWorker"), [int(os.environ["RANK"])]
    raise AssertionError(backend)


def steps_give_tokens(executor: Executor, ranks: Sequence[int]) -> None:
    new = NewSequence(7, [ord("a"), ord("b")], 2, [1], 0, 0, SamplingParams(temperature=0))
    first = executor.execute_model(SchedulerOutput(0, {7: 2}, [new], _NO_CACHED, {}, [], []))
    assert first.sampled[7][0].token_id == ord("c")
    cached = CachedSequences([7], [[ord("c")]], [[]], [])
    second = executor.execute_model(SchedulerOutput(1, {7: 1}, [], cached, {}, [], []))
    assert second.sampled[7][0].token_id == ord("d")


def every_worker_answers_in_order(executor: Executor, ranks: Sequence[int]) -> None:
    answers = executor.collective_rpc("whoami", ("rank ", 10), tuple[str, int, int], _PATIENCE_S)
    world_size = int(os.environ.get("WORLD_SIZE", len(ranks)))
    assert answers == [(f"rank {rank}", 10 + rank, world_size) for rank in ranks]


def large_payloads_pass_unchanged(executor: Executor, ranks: Sequence[int]) -> None:
    payload = np.random.default_rng(0).bytes(3 << 20)
    assert executor.collective_rpc("echo", (payload,), bytes) == [payload] * len(ranks)
    for array in executor.collective_rpc("negated", (np.arange(6, dtype=np.float32).reshape(2, 3),), np.ndarray):
        assert array.dtype == np.float32 and array.tolist() == [[0, -1, -2], [-3, -4, -5]]


def our_errors_arrive_as_they_are(executor: Executor, ranks: Sequence[int]) -> None:
    assert _error(ConfigError, lambda: executor.collective_rpc("fail", (ranks[-1], "config"), str)) == (
        "so it was asked"
    )


def other_errors_are_one_line_and_leave_the_workers_alive(executor: Executor, ranks: Sequence[int]) -> None:
    message = _error(EngineDeadError, lambda: executor.collective_rpc("fail", (ranks[-1], "value"), str))
    assert message.endswith("failed at fail: ValueError: so it was asked"), message
    assert executor.collective_rpc("fail", (-1, "value"), str) == ["fine"] * len(ranks)


def unknown_and_private_methods_are_refused(executor: Executor, ranks: Sequence[int]) -> None:
    for name in ("no_such_method", "_draw_token"):
        message = _error(EngineDeadError, lambda name=name: executor.collective_rpc(name, (), str))
        assert f"failed at {name}: LookupError" in message, message


def they_are_healthy(executor: Executor, ranks: Sequence[int]) -> None:
    executor.check_health()


def a_death_is_told(executor: Executor, ranks: Sequence[int]) -> None:
    """Only where the workers are other processes."""
    told = threading.Event()
    reasons: list[str] = []
    executor.register_failure_callback(lambda reason: (reasons.append(reason), told.set()))
    message = _error(EngineDeadError, lambda: executor.collective_rpc("kill_rank", (1, signal.SIGKILL)))
    assert told.wait(_PATIENCE_S)
    assert reasons == [message] and "worker 1" in message, (reasons, message)
    assert _error(EngineDeadError, executor.check_health) == message
    assert _error(EngineDeadError, lambda: executor.collective_rpc("pid", (), int)) == message


def nothing_is_left(executor: Executor, ranks: Sequence[int]) -> None:
    executor.shutdown()
    executor.shutdown()
    _error(EngineDeadError, executor.check_health)
    _error(EngineDeadError, lambda: executor.collective_rpc("pid", (), int))
    gone, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_PATIENCE_S)
    assert not alive, alive


def _error(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        value = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}: {value!r:.200}")


CHECKS = [
    steps_give_tokens,
    every_worker_answers_in_order,
    large_payloads_pass_unchanged,
    our_errors_arrive_as_they_are,
    other_errors_are_one_line_and_leave_the_workers_alive,
    unknown_and_private_methods_are_refused,
    they_are_healthy,
    a_death_is_told,
    nothing_is_left,
]


def main(backend: str) -> int:
    executor, ranks = make(backend)
    info = executor.initialize()
    assert isinstance(info, KVCacheInfo) and info.num_device_blocks == 4097
    num_failed = 0
    for check in CHECKS:
        if check is a_death_is_told and backend in ("uni", "external_launcher"):
            continue
        try:
            check(executor, ranks)
            print(f"ok {check.__name__}", flush=True)
        except Exception as error:
            num_failed += 1
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", flush=True)
    with contextlib.suppress(Exception):
        executor.shutdown()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
