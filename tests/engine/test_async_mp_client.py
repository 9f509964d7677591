"""AsyncMPClient on a link that says what the test tells it to, and a router between it and slow readers."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import async_mp_client
from jaxllm.engine.async_mp_client import AsyncMPClient
from jaxllm.engine.core_link import OnMessage
from jaxllm.engine.core_messages import EngineFailed, ToCore
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.engine.request_router import RequestRouter
from jaxllm.engine.stats import StatsCollector
from jaxllm.exceptions import EngineDeadError
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    SampledToken,
    SchedulerStats,
    SequenceOutput,
)
from jaxllm.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.engines import engine_config

STATS = SchedulerStats(0, 0, 64, 0, 0, 0, 0)
DEATH = EngineFailed("EngineDeadError", "on fire")


class Line:
    """Both ends of a link."""

    def __init__(self) -> None:
        self.sent: list[ToCore] = []
        self.client = AsyncMPClient(engine_config(), self._connect, lambda message: None)

    def _connect(self, config: EngineConfig, on_message: OnMessage) -> "Line":
        self.say = on_message
        return self

    def send(self, message: ToCore) -> None:
        self.sent.append(message)

    def shutdown(self) -> None:
        pass


def outputs(token_id: int) -> EngineCoreOutputs:
    news = EngineCoreOutput("r-0", [SequenceOutput(0, [SampledToken(token_id)])], [], 0, 0.0, False)
    return EngineCoreOutputs([news], STATS)


def run(scenario: Callable[[Line], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(Line()), 60)

    asyncio.run(main())


def test_what_a_core_said_before_it_died_is_given_out() -> None:
    async def scenario(line: Line) -> None:
        for message in (outputs(1), outputs(2), DEATH):
            line.say(message)
        assert [await line.client.get_output(), await line.client.get_output()] == [outputs(1), outputs(2)]
        with pytest.raises(EngineDeadError, match="on fire"):
            await line.client.get_output()

    run(scenario)


def test_old_outputs_do_not_hold_up_the_news_of_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_mp_client, "_LAST_OUTPUTS_S", -1.0)  # the time is over

    async def scenario(line: Line) -> None:
        for message in (*[outputs(1)] * 1000, DEATH):
            line.say(message)
        with pytest.raises(EngineDeadError, match="on fire"):
            await line.client.get_output()

    run(scenario)


def test_outputs_that_wait_are_routed_before_readers_have_their_turn() -> None:
    async def scenario(line: Line) -> None:
        info = KVCacheInfo(65, 16, 8, 64)
        router = RequestRouter(line.client, [info], ByteTokenizer(), StatsCollector([]), lambda error: None)
        request = EngineCoreRequest("r-0", [97], SamplingParams(max_tokens=500), [], 0.0, 0, 500)
        stream = router.add("r", ProcessedRequest(request, "a"), final_only=False)
        for _ in range(300):
            line.say(outputs(98))
        lens = []
        while sum(lens) < 300:
            before = sum(lens)
            lens.append(len((await stream.get()).outputs[0].token_ids) - before)
        assert lens == [128, 128, 44]  # two slices, and what is left
        router.close()

    run(scenario)
