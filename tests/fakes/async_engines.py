"""Scenarios on an AsyncLLMEngine that answers with the alphabet, and what they ask of it."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_process import CoreProcess
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.fake_cores import ThreadCore, fake_config, fake_front_end

T = TypeVar("T")
PATIENCE_S = 300.0


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def alphabet_from(letter: str, count: int) -> str:
    return "".join(chr(97 + (ord(letter) - 97 + step) % 26) for step in range(1, count + 1))


def run(
    scenario: Callable[[AsyncLLMEngine], Coroutine[Any, Any, T]],
    connect: Connect = ThreadCore,
    config: EngineConfig | None = None,
) -> T:
    """Runs a scenario on an engine that is ready, and checks that nothing of it is left afterwards."""

    async def main() -> T:
        engine = AsyncLLMEngine(lambda: fake_front_end(config or fake_config()), connect)
        try:
            await engine.wait_ready()
            result = await asyncio.wait_for(scenario(engine), PATIENCE_S)
            if not engine.errored:
                await until_idle(engine)
            return result
        finally:
            await engine.shutdown()

    return asyncio.run(main())


async def until_idle(engine: AsyncLLMEngine) -> None:
    """Waits until every request and every block has been given back."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        stats = await engine.get_stats()
        if (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 4096):
            break
        assert time.monotonic() < deadline_s, stats
        await asyncio.sleep(0.01)
    assert engine.num_unfinished_requests == 0


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await collect(stream))[-1]


def core_pid(engine: AsyncLLMEngine) -> int:
    client = engine._start._client
    assert client is not None and isinstance(client._link, CoreProcess)
    return client._link.pid


async def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it didn't happen"
        await asyncio.sleep(0.01)


def with_max_num_seqs(max_num_seqs: int) -> EngineConfig:

    config = fake_config()
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_num_seqs=max_num_seqs))
