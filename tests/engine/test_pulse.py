"""Who stands still: a loop that works and doesn't come on, a process that says nothing; nobody who is busy or idle."""

import queue
import threading
from collections.abc import Callable, Sequence

import pytest

from jaxllm.engine.core_loop import EngineCoreLoop, Inbox
from jaxllm.engine.core_messages import AddRequest, Pulse, ShutDown
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.pulse import LoopState, LoopWatch, PulseThread, SilenceWatch
from jaxllm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.engines import engine_config
from tests.fakes.fake_executor import FakeExecutor

PATIENCE_S = 300.0


class ScriptedLoop:
    num_turns = 0
    state: LoopState = "working"


def looks(
    loop: ScriptedLoop, ticks: Sequence[int], before_look: Callable[[int], None] = lambda turn: None
) -> list[float]:
    """Returns what each look finds; a look takes one of `ticks`."""
    left = iter(ticks)
    watch = LoopWatch(loop, lambda: next(left))
    seen = []
    for turn in range(len(ticks)):
        before_look(turn)
        seen.append(watch.look())
    return seen


def test_a_loop_that_works_and_does_not_come_on_stands_still() -> None:
    # However much processor time it takes: a loop that spins for ever does not come on either.
    assert looks(ScriptedLoop(), [0, 100, 200, 300]) == [0, 1, 2, 3]


def test_one_turn_is_enough() -> None:
    loop = ScriptedLoop()

    def turn_now_and_then(turn: int) -> None:
        loop.num_turns += turn % 3 == 0

    assert looks(loop, [0] * 7, turn_now_and_then) == [0, 1, 2, 0, 1, 2, 0]


def test_a_loop_that_waits_for_work_does_not_stand_still() -> None:
    loop = ScriptedLoop()
    loop.state = "waiting"
    assert looks(loop, [0] * 400) == [0] * 400


def test_a_device_may_compute_for_ever() -> None:
    loop = ScriptedLoop()
    loop.state = "on device"
    assert looks(loop, range(0, 3000, 3)) == [0] * 1000


def test_a_device_that_computes_nothing_has_five_minutes() -> None:
    loop = ScriptedLoop()
    loop.state = "on device"
    seen = looks(loop, range(0, 640, 2))  # two ticks a second are those of the other threads
    assert seen[:301] == [0] * 301
    assert seen[301:] == list(range(1, 20))


def test_what_comes_after_a_long_step_begins_anew() -> None:
    loop = ScriptedLoop()
    loop.state = "on device"

    def come_back(turn: int) -> None:
        loop.state = "on device" if turn < 290 else "working"

    assert looks(loop, [0] * 294, come_back)[289:] == [0, 0, 1, 2, 3]


def test_a_process_is_silent_that_says_nothing_and_takes_no_time() -> None:
    ticks = iter([5, 5, 5, 5, 8, 10, 10])  # what threads take that wait for the interpreter is no sign of life
    watch = SilenceWatch(lambda: next(ticks))
    assert [watch.look() for _ in range(3)] == [0, 1, 2]
    watch.heard()
    assert [watch.look() for _ in range(4)] == [1, 0, 1, 2]


class Gated(FakeExecutor):
    """A step that has begun goes on when it is let."""

    def __init__(self) -> None:
        super().__init__(candidates=lambda token_ids: {7: 0.0}, num_blocks=9, block_size=4)
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.has_begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().execute_model(scheduler_output)


def test_a_busy_loop_tells_what_it_does() -> None:
    executor = Gated()
    inbox: Inbox = queue.SimpleQueue()
    news: queue.SimpleQueue[object] = queue.SimpleQueue()
    loop = EngineCoreLoop(EngineCore(engine_config(), executor), inbox, news.put)
    assert (loop.state, loop.num_turns) == ("working", 0)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    wait_until(lambda: loop.state == "waiting")
    inbox.put(AddRequest(EngineCoreRequest("r", [1, 2], SamplingParams(), [], 0.0, 0, max_tokens=1)))
    assert executor.has_begun.wait(PATIENCE_S)
    assert (loop.state, loop.num_turns) == ("on device", 1)
    executor.may_go_on.set()
    news.get(timeout=PATIENCE_S)
    wait_until(lambda: loop.state == "waiting")
    assert loop.num_turns == 2
    inbox.put(ShutDown())
    thread.join(PATIENCE_S)


def wait_until(is_so: Callable[[], bool]) -> None:
    turn = threading.Event()
    for _ in range(30_000):
        if is_so():
            return
        turn.wait(0.01)
    raise AssertionError("it didn't happen")


def test_a_standstill_is_told_every_second_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxllm.engine.pulse.LOOK_S", 0.01)
    monkeypatch.setattr("jaxllm.engine.pulse.STALLED_S", 0.02)
    pulses: queue.SimpleQueue[Pulse] = queue.SimpleQueue()
    with PulseThread(LoopWatch(ScriptedLoop(), lambda: 0), pulses.put):
        seen = [pulses.get(timeout=PATIENCE_S).silent_s for _ in range(6)]
    assert seen == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])
    num_sent = pulses.qsize()
    assert threading.Event().wait(0.05) is False and pulses.qsize() == num_sent  # none after the end
    assert ["stood still" in record.getMessage() for record in caplog.records] == [True]
    stacks = capfd.readouterr().err
    assert stacks.count("Current thread") == 1
    assert "test_a_standstill_is_told" in stacks  # what the other threads do
