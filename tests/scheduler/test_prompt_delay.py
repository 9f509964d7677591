"""PromptDelay: the oracle of scheduler_delay_factor, alone and in the scheduler."""

from jaxllm.scheduler.prompt_delay import PromptDelay
from tests.fakes.fake_executor import FakeExecutor
from tests.scheduler.builders import make_request, make_scheduler


def test_oracle() -> None:
    delay = PromptDelay(0.5)
    assert delay.passed(10.0, [9.0], False)
    delay.prev_prompt = True  # a prompt is scheduled at 10
    assert not delay.passed(12.0, [11.5], True)  # waited 0.5, must be above 0.5 x 2
    assert delay.last_prompt_latency_s == 2.0
    assert not delay.passed(12.5, [11.5], True)
    assert delay.last_prompt_latency_s == 2.0, "decode steps don't change it"
    assert delay.passed(12.51, [11.5], True)


def test_nobody_waits_while_nothing_runs_or_without_a_factor() -> None:
    for factor, is_running in ((0.5, False), (0.0, True)):
        delay = PromptDelay(factor)
        delay.prev_prompt = True
        assert delay.passed(100.0, [100.0], is_running)


def test_the_oldest_counts() -> None:
    delay = PromptDelay(1.0)
    delay.prev_prompt = True
    assert delay.passed(5.0, [4.9, -1.0], True)


def test_the_scheduler_holds_a_prompt_back() -> None:
    executor = FakeExecutor()
    scheduler = make_scheduler(executor, scheduler_delay_factor=0.5)
    scheduler.add_request(make_request("a", [10], max_tokens=9, arrival_time_s=9.0))
    scheduled = []
    for now_s in (10.0, 12.0, 12.4, 12.6):
        if now_s == 12.0:
            scheduler.add_request(make_request("b", [20], max_tokens=9, arrival_time_s=11.5))
        step = scheduler.schedule(now_s)
        scheduler.update_from_output(step, executor.execute_model(step))
        scheduled.append(list(step.num_scheduled_tokens))
    assert scheduled == [[0], [0], [0], [0, 1]]
