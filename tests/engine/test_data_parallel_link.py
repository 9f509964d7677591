"""One line to several replicas, message by message. The replicas are lists of what they were sent."""

import dataclasses
from typing import Any

import pytest

from jaxllm.config import EngineConfig, ParallelConfig
from jaxllm.engine.core_link import CoreLink, OnMessage
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishSequence,
    FromCore,
    LoadProgress,
    Pulse,
    Ready,
    ShutDown,
    UtilityCall,
    UtilityResult,
)
from jaxllm.engine.data_parallel_link import DataParallelLink
from jaxllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, KVCacheInfo, SchedulerStats
from jaxllm.sampling_params import SamplingParams
from tests.fakes.engines import engine_config

INFOS = [KVCacheInfo(num_blocks, 16, 8, 64) for num_blocks in (65, 33)]
STATS = [SchedulerStats(number, 0, 0, 0, 0, 0, 0) for number in range(2)]


class ListLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_shut_down = False
        self.fails = False

    def send(self, message: Any) -> None:
        if self.fails:
            raise OverflowError("too large a number")
        self.sent.append(message)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def take(self) -> list[Any]:
        sent, self.sent = self.sent, []
        return sent


class Replicas:
    """Two replicas behind one line, `replies` is what came out of it."""

    def __init__(self, is_ready: bool = True, enable_prefix_caching: bool = False) -> None:
        self.links = [ListLink(), ListLink()]
        self.replies: list[FromCore] = []
        config = engine_config()
        cache = dataclasses.replace(config.cache, enable_prefix_caching=enable_prefix_caching)
        config = dataclasses.replace(config, cache=cache, parallel=ParallelConfig(data_parallel_size=2))
        self.line = DataParallelLink(config, self.replies.append, self._connect)
        if is_ready:
            self.say(Ready([INFOS[1]], 1))
            self.say(Ready([INFOS[0]], 0))
            assert self.take() == [Ready(INFOS)]

    def _connect(self, config: EngineConfig, on_message: OnMessage) -> list[CoreLink]:
        self.say = on_message
        return list(self.links)

    def take(self) -> list[FromCore]:
        replies = list(self.replies)
        self.replies.clear()
        return replies


def request(request_id: str, prompt: list[int] | None = None, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt or [1, 2], SamplingParams(n=n), [], 0.0, 0, max_tokens=9)


def test_what_concerns_a_request_goes_where_the_request_went() -> None:
    replicas = Replicas()
    first, second = replicas.links
    for name in "abcd":
        replicas.line.send(AddRequest(request(name, n=2)))
    assert [message.request.request_id for message in first.take()] == ["a", "c"]
    sent = second.take()
    assert [(message.request.request_id, message.engine_index) for message in sent] == [("b", 1), ("d", 1)]
    replicas.line.send(FinishSequence("b", 1))
    replicas.line.send(AbortRequests(["a", "b", "unknown", "c", "d"]))
    replicas.line.send(AbortRequests(["a"]))  # twice
    replicas.line.send(FinishSequence("c", 0))  # too late
    assert first.take() == [AbortRequests(["a", "c"], 0)]
    assert second.take() == [FinishSequence("b", 1, 1), AbortRequests(["b", "d"], 1)]


def test_an_answer_makes_room_for_the_next_request() -> None:
    replicas = Replicas()
    for name in "ab":
        replicas.line.send(AddRequest(request(name)))
    news = EngineCoreOutputs([EngineCoreOutput("b", [], [], 0, 0.0, True)], STATS[1], engine_index=1)
    replicas.say(news)
    assert replicas.take() == [news]
    replicas.line.send(AddRequest(request("c")))
    assert [message.request.request_id for message in replicas.links[1].take()] == ["b", "c"]


def test_a_request_that_cannot_be_sent_counts_nowhere() -> None:
    replicas = Replicas()
    replicas.links[0].fails = True
    with pytest.raises(OverflowError):
        replicas.line.send(AddRequest(request("a")))
    replicas.links[0].fails = False
    replicas.line.send(AbortRequests(["a"]))
    for name in "bc":
        replicas.line.send(AddRequest(request(name)))
    assert [len(link.take()) for link in replicas.links] == [1, 1]


def test_affinity_lasts_as_long_as_the_prefix_caches() -> None:
    replicas = Replicas(enable_prefix_caching=True)
    prompt = list(range(40))

    def place(name: str) -> int:
        replicas.line.send(AddRequest(request(name, prompt)))
        replicas.line.send(AbortRequests([name]))
        (index,) = [index for index, link in enumerate(replicas.links) if link.take()]
        return index

    assert [place("a"), place("b"), place("c")] == [0, 0, 0]
    replicas.line.send(UtilityCall(1, "reset_prefix_cache"))
    for index in (0, 1):
        replicas.say(UtilityResult(1, True, index))
    assert [link.take()[0].method for link in replicas.links] == ["reset_prefix_cache"] * 2
    assert place("d") == 1


def test_a_question_is_answered_once_all_have_answered() -> None:
    replicas = Replicas()
    replicas.line.send(UtilityCall(7, "get_stats"))
    assert [link.take() for link in replicas.links] == [[UtilityCall(7, "get_stats", index)] for index in (0, 1)]
    replicas.say(UtilityResult(7, [STATS[1]], 1))
    assert replicas.take() == []
    replicas.say(UtilityResult(7, [STATS[0]], 0))
    assert replicas.take() == [UtilityResult(7, STATS)]
    for number, (here, there) in enumerate([(True, True), (True, False), (False, True)]):
        replicas.line.send(UtilityCall(number, "reset_prefix_cache"))
        replicas.say(UtilityResult(number, here, 0))
        replicas.say(UtilityResult(number, there, 1))
        assert replicas.take() == [UtilityResult(number, here and there)]


def test_progress_is_told_of_the_first_that_still_loads() -> None:
    replicas = Replicas(is_ready=False)
    for message in (LoadProgress("a", engine_index=0), LoadProgress("b", engine_index=1), Ready([INFOS[0]], 0)):
        replicas.say(message)
    replicas.say(LoadProgress("c", engine_index=1))
    assert replicas.take() == [LoadProgress("a", engine_index=0), LoadProgress("c", engine_index=1)]
    replicas.say(Ready([INFOS[1]], 1))
    assert replicas.take() == [Ready(INFOS)]


@pytest.mark.parametrize("is_ready", [True, False])
def test_one_death_is_told_once_and_ends_the_others(is_ready: bool) -> None:
    replicas = Replicas(is_ready)
    failure = EngineFailed("EngineDeadError", "on fire", 1)
    replicas.say(failure)
    replicas.say(EngineCoreOutputs([], STATS[0]))
    replicas.say(EngineFailed("EngineDeadError", "the engine was shut down", 0))
    assert replicas.take() == [failure]
    assert [link.take() for link in replicas.links] == [[ShutDown()], [ShutDown()]]


def test_a_death_before_all_links_are_there_ends_them_too() -> None:
    links = [ListLink(), ListLink()]
    replies: list[FromCore] = []

    def connect(config: EngineConfig, on_message: OnMessage) -> list[CoreLink]:
        on_message(EngineFailed("DeviceError", "no device", 0))
        return list(links)

    config = dataclasses.replace(engine_config(), parallel=ParallelConfig(data_parallel_size=2))
    DataParallelLink(config, replies.append, connect)
    assert replies == [EngineFailed("DeviceError", "no device", 0)]
    assert [link.take() for link in links] == [[ShutDown()], [ShutDown()]]


def test_shutdown_asks_all_before_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas()
    order: list[str] = []
    for number, link in enumerate(replicas.links):
        monkeypatch.setattr(link, "send", lambda message, number=number: order.append(f"ask {number}"))
        monkeypatch.setattr(link, "shutdown", lambda number=number: order.append(f"wait {number}"))
    replicas.line.shutdown()
    assert order == ["ask 0", "ask 1", "wait 0", "wait 1"]


def test_pulses_say_whose_they_are() -> None:
    replicas = Replicas(is_ready=False)
    replicas.say(Pulse(3.0, 1))  # while the other one still loads
    assert replicas.take() == [Pulse(3.0, 1)]
