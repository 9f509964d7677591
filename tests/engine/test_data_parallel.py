"""Replicas that run: on threads of this process, in one process of their own, in a process each."""

import asyncio
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest

from jaxllm.config import EngineConfig, ParallelConfig
from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_messages import EngineFailed, FromCore
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.data_parallel_link import DataParallelLink, connect_core, connect_replica_threads
from jaxllm.engine.llm_engine import LLMEngine, make_client
from jaxllm.engine.sync_mp_client import SyncMPClient
from jaxllm.entrypoints.offline_runner import OfflineRunner
from jaxllm.exceptions import DeviceError, EngineDeadError, InvalidRequestError
from jaxllm.messages import EngineCoreRequest, KVCacheInfo
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.async_engines import PATIENCE_S, collect, greedy, last, wait_for
from tests.fakes.fake_cores import AlphabetExecutor, fake_config, fake_front_end

# Executors of names that are given leave the choice of processes to the backend's name.
PLACES: dict[str, tuple[Connect, str | None]] = {
    "threads": (connect_replica_threads, None),
    "one process": (connect_core, None),
    "a process each": (connect_core, "mp"),
}
HERE = "tests.engine.test_data_parallel"


class FailsInReplica1(AlphabetExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._rank = config.parallel.data_parallel_rank

    def initialize(self) -> KVCacheInfo:
        if self._rank == 1:
            raise DeviceError("no device for replica 1")
        return super().initialize()


class ExitsInReplica1(FailsInReplica1):
    def initialize(self) -> KVCacheInfo:
        if self._rank == 1:
            raise SystemExit(3)
        return super().initialize()


def config_of(size: int, backend: str | None = None, executor: str | None = None) -> EngineConfig:
    config = fake_config() if executor is None else fake_config(executor)
    parallel = ParallelConfig(data_parallel_size=size, distributed_executor_backend=backend)
    return dataclasses.replace(config, parallel=parallel)


def answers(engine: LLMEngine) -> list[RequestOutput]:
    params = [
        SamplingParams(n=3, seed=5, max_tokens=9, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, stop="xyz", prompt_logprobs=0),
        SamplingParams(seed=11, max_tokens=30, stop_token_ids=[ord("q")]),
        SamplingParams(max_tokens=20),  # its seed is drawn by the front end
    ] * 3
    return OfflineRunner(engine).run([f"{letter}s" for letter in "abcdefghijkl"], params, lambda outputs: None)


def facts(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]


@pytest.mark.parametrize("place", PLACES)
def test_answers_do_not_depend_on_the_replica(place: str) -> None:
    connect, backend = PLACES[place]
    alone, tokenizer, eos_token_ids = fake_front_end(config_of(1))
    expected = answers(LLMEngine(alone, tokenizer, make_client(alone, "inproc"), eos_token_ids))
    config = config_of(3, backend)
    client = SyncMPClient(config, connect)
    assert [info.num_device_blocks for info in client.kv_cache_infos] == [4097] * 3
    engine = LLMEngine(config, tokenizer, client, eos_token_ids)
    found = answers(engine)
    assert [facts(one) for one in found] == [facts(one) for one in expected]
    stats = client.get_stats()
    assert all(one.prefix_cache_queries >= 3 for one in stats)  # nobody was left out
    assert [one.num_free_blocks for one in stats] == [4096] * 3
    assert engine.reset_prefix_cache() is True
    engine.shutdown()
    engine.shutdown()


def test_where_replicas_run_is_chosen_by_the_backend() -> None:
    for backend, num_links in ((None, 1), ("uni", 1), ("mp", 2)):
        messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        link = connect_core(config_of(2, backend), messages.put)
        assert isinstance(link, DataParallelLink)
        processes = set(link._links)
        assert len(processes) == num_links and all(isinstance(process, CoreProcess) for process in processes)
        link.shutdown()
    assert isinstance(make_client(config_of(2), "inproc"), SyncMPClient)


def run(
    scenario: Callable[[AsyncLLMEngine], Coroutine[Any, Any, None]], connect: Connect, config: EngineConfig
) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(lambda: fake_front_end(config), connect)
        try:
            await engine.wait_ready()
            await asyncio.wait_for(scenario(engine), PATIENCE_S)
        finally:
            await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("place", PLACES)
def test_aborts_and_closed_streams_free_every_replicas_blocks(place: str) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        tasks = [asyncio.create_task(last(engine.generate("a", greedy(100), str(number)))) for number in range(40)]
        await asyncio.sleep(0.05)
        await engine.abort([str(number) for number in range(0, 40, 4)])
        for task in tasks[1::4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results):
            if number % 4 > 1:
                assert isinstance(result, RequestOutput) and len(result.outputs[0].token_ids) == 100
        deadline_s = time.monotonic() + PATIENCE_S
        while [(one.num_running, one.num_free_blocks) for one in await engine.get_stats_by_engine()] != [(0, 4096)] * 2:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert (await engine.get_stats()).num_free_blocks == 8192

    connect, backend = PLACES[place]
    run(scenario, connect, config_of(2, backend))


@pytest.mark.parametrize("place", PLACES)
def test_one_dead_replica_ends_every_stream(place: str) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate("a", greedy(100), str(number)))) for number in range(6)]
        tasks.append(asyncio.create_task(collect(engine.generate("!", greedy(100), "fire"))))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "the device is on fire" in str(result)
        assert engine.errored and engine.status().phase == "dead"
        with pytest.raises(EngineDeadError, match="on fire"):
            await last(engine.generate("a", greedy(5), "late"))

    connect, backend = PLACES[place]
    run(scenario, connect, config_of(2, backend))


def test_kill_9_of_one_of_several_core_processes_ends_the_others() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        client = engine._start._client
        assert client is not None and isinstance(client._link, DataParallelLink)
        processes = [link for link in client._link._links if isinstance(link, CoreProcess)]
        assert len(processes) == 2
        stream = engine.generate("?", greedy(100), "never")  # on the other replica, which must not go on
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.1)
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
            await task
        await engine.shutdown()
        await wait_for(lambda: not any(psutil.pid_exists(process.pid) for process in processes))

    run(scenario, connect_core, config_of(2, "mp"))


@pytest.mark.parametrize("place", PLACES)
def test_a_replica_that_cannot_start_tells_why(place: str) -> None:
    connect, backend = PLACES[place]
    with pytest.raises(DeviceError, match="^no device for replica 1$"):
        SyncMPClient(config_of(2, backend, f"{HERE}:FailsInReplica1"), connect)
    with pytest.raises(EngineDeadError):
        SyncMPClient(config_of(2, backend, f"{HERE}:ExitsInReplica1"), connect)


def test_shutdown_while_replicas_load_does_not_wait_for_them() -> None:
    messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
    link = connect_core(config_of(2, None, "tests.fakes.fake_cores:NeverLoads"), messages.put)
    messages.get(timeout=PATIENCE_S)
    link.shutdown()
    left = [messages.get(timeout=0) for _ in range(messages.qsize())]
    assert any(isinstance(message, EngineFailed) for message in left)


def test_what_only_one_replica_could_not_read_is_refused() -> None:
    client = SyncMPClient(config_of(2), connect_core)
    with pytest.raises(InvalidRequestError, match="can't be sent"):
        client.add_request(EngineCoreRequest("r", [2**70], greedy(5), [], 0.0, 0, 5))
    client.add_request(EngineCoreRequest("long", [97] * 500, greedy(5), [], 0.0, 0, 5))
    (refused,) = client.get_output().refused
    assert refused.request_id == "long"
    client.shutdown()
