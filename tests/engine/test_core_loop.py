"""The busy loop between two queues: what it does with each message, in which order, and what it does with faults."""

import queue
import threading
from collections.abc import Iterator

import pytest

from jaxllm.engine.core_loop import EngineCoreLoop, Inbox
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    FinishSequence,
    FromCore,
    ShutDown,
    UtilityCall,
    UtilityResult,
)
from jaxllm.engine.engine_core import EngineCore
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, RefusedRequest
from jaxllm.sampling_params import SamplingParams
from tests.fakes.engines import engine_config
from tests.fakes.fake_executor import FakeExecutor

PATIENCE_S = 300.0


class Loop:
    """A loop on a thread; it has handled a message when the answer of a later call is there."""

    def __init__(self, core: EngineCore) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._loop = EngineCoreLoop(core, self.inbox, self.outbox.put)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.inbox.put(ShutDown())
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def next(self) -> FromCore:
        return self.outbox.get(timeout=PATIENCE_S)

    def next_outputs(self) -> EngineCoreOutputs:
        message = self.next()
        assert isinstance(message, EngineCoreOutputs)
        return message


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(engine_config(), FakeExecutor())


@pytest.fixture
def loop(core: EngineCore) -> Iterator[Loop]:
    loop = Loop(core)
    yield loop
    loop.stop()


def request(request_id: str, max_tokens: int = 2, num_prompt_tokens: int = 1) -> EngineCoreRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineCoreRequest(request_id, [10] * num_prompt_tokens, params, [], 0.0, 0, max_tokens)


def test_a_request_is_stepped_to_its_end(loop: Loop) -> None:
    loop.inbox.put(AddRequest(request("a", 3)))
    tokens = [output.sequences[0].new_tokens[0].token_id for _ in range(3) for output in loop.next_outputs().outputs]
    assert tokens == [11, 12, 13]


def test_one_that_breaks_a_rule_is_refused_by_name_and_the_others_run(loop: Loop) -> None:
    loop.inbox.put(AddRequest(request("bad", num_prompt_tokens=100)))
    loop.inbox.put(AddRequest(request("good")))
    seen = [loop.next_outputs() for _ in range(3)]
    (refused,) = [refused for outputs in seen for refused in outputs.refused]
    assert (refused.request_id, refused.param, refused.is_our_fault) == ("bad", "prompt", False)
    assert "must be shorter than max_model_len=64" in refused.message
    assert [output.request_id for outputs in seen for output in outputs.outputs] == ["good", "good"]


def test_f1_an_unforeseen_fault_in_adding_is_that_requests_alone(
    core: EngineCore, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request = core.scheduler.add_request

    def fail_late(request: EngineCoreRequest) -> None:
        add_request(request)
        if request.request_id == "bad":
            raise KeyError("half added")

    monkeypatch.setattr(core.scheduler, "add_request", fail_late)
    loop.inbox.put(AddRequest(request("bad", 50)))
    loop.inbox.put(AddRequest(request("good")))
    seen = [loop.next_outputs() for _ in range(3)]
    assert [refused for outputs in seen for refused in outputs.refused] == [
        RefusedRequest("bad", "the engine failed to add this request", None, True)
    ]
    assert [output.request_id for outputs in seen for output in outputs.outputs] == ["good", "good"]
    assert seen[-1].stats.num_running == 0  # nothing of the other one goes on


def test_the_refusal_of_what_could_not_be_read_is_passed_on(loop: Loop) -> None:
    refused = RefusedRequest("x", "unreadable")
    loop.inbox.put(refused)
    outputs = loop.next_outputs()
    assert (outputs.outputs, outputs.refused) == ([], [refused])


def test_the_gauges_go_back_when_an_abort_leaves_nothing_to_step(core: EngineCore) -> None:
    inbox: Inbox = queue.SimpleQueue()
    sent: list[FromCore] = []
    inbox.put(AddRequest(request("a", 50)))
    inbox.put(AddRequest(request("b", 50)))
    engine_loop = EngineCoreLoop(core, inbox, sent.append)
    assert engine_loop._take_messages()
    core.step()
    inbox.put(FinishSequence("b", 0))
    inbox.put(AbortRequests(["a", "unknown"]))
    assert engine_loop._take_messages()
    (outputs,) = sent
    assert isinstance(outputs, EngineCoreOutputs)
    assert (outputs.outputs, outputs.stats.num_running, outputs.stats.num_free_blocks) == ([], 0, 63)


def test_calls_are_answered_in_order_between_steps(loop: Loop) -> None:
    loop.inbox.put(UtilityCall(1, "reset_prefix_cache"))
    loop.inbox.put(AddRequest(request("a", 60)))
    loop.inbox.put(UtilityCall(2, "get_stats"))
    seen: list[FromCore] = [loop.next()]
    while not (isinstance(seen[-1], UtilityResult) and seen[-1].call_id == 2):
        seen.append(loop.next())
    results = [message for message in seen if isinstance(message, UtilityResult)]
    assert results[0] == UtilityResult(1, True)
    assert isinstance(results[1].value, list)
    (stats,) = results[1].value
    assert stats.num_running + stats.num_waiting == 1


def test_shutdown_ends_it_whatever_runs(core: EngineCore) -> None:
    loop = Loop(core)
    loop.inbox.put(AddRequest(request("a", 60)))
    loop.stop()
    assert loop.error is None


def test_a_step_that_raises_ends_the_loop(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> EngineCoreOutputs:
        raise RuntimeError("a step failed")

    monkeypatch.setattr(core, "step", fail)
    loop = Loop(core)
    loop.inbox.put(AddRequest(request("a")))
    loop.join()
    assert str(loop.error) == "a step failed"
