"""StatsCollector on hand-written steps: each number computed by hand."""

from jaxllm.engine.stats import FinishedRequest, StatsCollector, StepStats
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SampledToken,
    SchedulerStats,
    SequenceOutput,
    StepInfo,
)
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams

STATS = SchedulerStats(1, 2, 3, 4, 5, 6, 7)


class Sink:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[FinishedRequest] = []

    def observe_step(
        self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None, engine_index: int
    ) -> None:
        assert scheduler is STATS
        self.steps.append(step)

    def observe_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)


def request(request_id: str, n: int = 1) -> EngineCoreRequest:
    params = SamplingParams(n=n, max_tokens=9)
    return EngineCoreRequest(request_id, [5, 6, 7], params, [], arrival_time_s=10.0, seed=0, max_tokens=8)


def news(request_id: str, *counts: int) -> EngineCoreOutput:
    sequences = [SequenceOutput(index, [SampledToken(1)] * count) for index, count in enumerate(counts)]
    return EngineCoreOutput(request_id, sequences, [], 2, first_scheduled_time_s=10.5, finished=False)


def output(*lens: int, reason: str = "stop") -> RequestOutput:
    sequences = [CompletionOutput(index, token_ids=[1] * size, finish_reason=reason) for index, size in enumerate(lens)]
    return RequestOutput("a", None, [5, 6, 7], None, sequences, True, RequestMetrics(10.0))


def collect() -> tuple[StatsCollector, Sink]:
    sink = Sink()
    return StatsCollector([sink]), sink


def step(collector: StatsCollector, now_s: float, *outputs: EngineCoreOutput) -> None:
    collector.stepped(EngineCoreOutputs(list(outputs), STATS), now_s)


def test_one_request_from_its_arrival_to_its_end() -> None:
    collector, sink = collect()
    collector.added(request("a"))
    step(collector, 11.0, news("a"))  # a part of its prompt
    step(collector, 12.0, news("a", 1))
    step(collector, 12.5, news("a", 1))
    step(collector, 14.0, news("a", 1))
    collector.ended("a", output(3), 14.25)
    assert sink.steps == [
        StepStats(),
        StepStats(3, 2, 1, times_to_first_token_s=[2.0]),
        StepStats(0, 0, 1, inter_token_latencies_s=[0.5]),
        StepStats(0, 0, 1, inter_token_latencies_s=[1.5]),
    ]
    (finished,) = sink.finished
    assert finished == FinishedRequest(
        finish_reason="stop",
        e2e_s=4.25,
        queue_s=0.5,
        prefill_s=1.5,
        decode_s=2.0,
        num_prompt_tokens=3,
        num_cached_tokens=2,
        num_generated_tokens=3,
        max_num_generated_tokens=3,
        n=1,
        max_tokens=8,
    )
    assert (finished.inference_s, finished.time_per_output_token_s) == (3.5, 1.0)


def test_several_sequences_count_their_prompt_once() -> None:
    collector, sink = collect()
    collector.added(request("a", n=2))
    step(collector, 12.0, news("a", 1, 1))
    step(collector, 13.0, news("a", 1, 1))
    collector.ended("a", output(2, 5, reason="length"), 13.0)
    assert sink.steps == [StepStats(3, 2, 2, [2.0], []), StepStats(0, 0, 2, [], [1.0, 1.0])]
    assert (sink.finished[0].num_generated_tokens, sink.finished[0].max_num_generated_tokens) == (7, 5)


def test_a_request_that_is_given_up_counts_as_aborted_once() -> None:
    collector, sink = collect()
    collector.added(request("a"))
    collector.ended("a", None, 11.0)
    collector.ended("a", None, 12.0)
    step(collector, 12.0, news("a", 1))
    (finished,) = sink.finished
    assert (finished.finish_reason, finished.queue_s, finished.prefill_s, finished.decode_s) == ("abort",) + (None,) * 3
    assert (finished.inference_s, finished.time_per_output_token_s) == (None, None)
    assert sink.steps == [StepStats()]


def test_a_refused_request_is_none() -> None:
    collector, sink = collect()
    collector.added(request("a"))
    collector.refused("a")
    collector.ended("a", None, 11.0)
    assert sink.finished == []
