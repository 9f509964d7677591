"""The engine's numbers as Prometheus reads them: vLLM's names, types, labels and buckets, and our own `jaxllm:*`.

Dashboards and autoscalers made for vLLM read the first kind. Each server has a registry of its own.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from jaxllm.config import CacheConfig
from jaxllm.engine.stats import FinishedRequest, StepStats
from jaxllm.entrypoints.scheduler_metrics import EngineState, SchedulerCollector
from jaxllm.messages import KVCacheInfo, SchedulerStats, StepInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_N_BUCKETS = (1, 2, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_STEP_KINDS = ("prefill", "decode", "mixed")


class PrometheusMetrics:
    """Takes the engine's numbers and writes them down. Implements StatsSink.

    Args:
      model_name: The label of that name.
      max_model_len: Where the buckets of token counts end.
      cache: Shown as labels of vllm:cache_config_info.
      kv_cache_infos: What each engine core allocated. Its place is its label "engine".
    """

    def __init__(
        self, model_name: str, max_model_len: int, cache: CacheConfig, kv_cache_infos: Sequence[KVCacheInfo]
    ) -> None:
        self._registry = CollectorRegistry()
        families = _Families(self._registry)
        lens = _one_two_five(max_model_len)
        self._states = [EngineState(model_name, index, info) for index, info in enumerate(kv_cache_infos)]
        self._engines = [_EngineMetrics(families, state, lens) for state in self._states]
        self._registry.register(SchedulerCollector(self._states, cache))

    def to_text(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_schedulers(self, stats: Sequence[SchedulerStats]) -> None:
        """Takes each engine core's counters of this moment."""
        for state, one in zip(self._states, stats, strict=True):
            state.stats = one

    def observe_step(
        self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None, engine_index: int
    ) -> None:
        self._engines[engine_index].observe_step(step, scheduler, info)

    def observe_finished(self, request: FinishedRequest) -> None:
        self._engines[request.engine_index].observe_finished(request)


class _Families:
    """Metrics of every engine core by name. The first who asks for one makes it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, text: str, labels: Mapping[str, str]) -> Counter:
        """Returns the counter of these labels."""
        if name not in self._counters:
            self._counters[name] = Counter(name, text, tuple(labels), registry=self._registry)
        return self._counters[name].labels(**labels)

    def histogram(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> Histogram:
        """Returns the histogram of these labels."""
        if name not in self._histograms:
            family = Histogram(name, text, tuple(labels), buckets=buckets, registry=self._registry)
            self._histograms[name] = family
        return self._histograms[name].labels(**labels)


class _EngineMetrics:
    """One engine core's counters and histograms."""

    def __init__(self, families: _Families, state: EngineState, lens: Sequence[int]) -> None:
        self._families = families
        self._state = state
        self._make_counters()
        self._make_histograms(lens)

    def observe_step(self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None) -> None:
        self._state.stats = scheduler
        self._prompt_tokens.inc(step.num_prompt_tokens)
        self._cached_tokens.inc(step.num_cached_tokens)
        self._computed_source.inc(step.num_prompt_tokens - step.num_cached_tokens)
        self._cached_source.inc(step.num_cached_tokens)
        self._generated_tokens.inc(step.num_generated_tokens)
        self._step_tokens.observe(step.num_prompt_tokens + step.num_generated_tokens)
        for seconds in step.times_to_first_token_s:
            self._first_token.observe(seconds)
        for seconds in step.inter_token_latencies_s:
            self._inter_token.observe(seconds)
        if info is not None:
            self._step_seconds[info.kind].observe(info.duration_s)
            self._step_computed.inc(info.num_tokens)
            self._step_padded.inc(max(info.num_padded_tokens - info.num_tokens, 0))
            self._state.info = info

    def observe_finished(self, request: FinishedRequest) -> None:
        self._finished[request.finish_reason].inc()
        for histogram, value in (
            (self._e2e, request.e2e_s),
            (self._queue, request.queue_s),
            (self._prefill, request.prefill_s),
            (self._decode, request.decode_s),
            (self._inference, request.inference_s),
            (self._per_token, request.time_per_output_token_s),
            (self._num_prompt, request.num_prompt_tokens),
            (self._num_computed, request.num_prompt_tokens - request.num_cached_tokens),
            (self._num_generated, request.num_generated_tokens),
            (self._max_generated, request.max_num_generated_tokens),
            (self._param_n, request.n),
            (self._param_max_tokens, request.max_tokens),
        ):
            if value is not None:
                histogram.observe(value)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        sources = self._counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._computed_source, self._cached_source = sources["local_compute"], sources["local_cache_hit"]
        self._generated_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._finished = self._counters(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason", _FINISH_REASONS
        )
        self._step_computed = self._counter("jaxllm:step_tokens", "Tokens that steps computed.")
        self._step_padded = self._counter("jaxllm:padding_tokens", "Tokens of padding that steps computed beside them.")

    def _make_histograms(self, lens: Sequence[int]) -> None:
        add = self._histogram
        self._first_token = add(
            "vllm:time_to_first_token_seconds", "From arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = add("vllm:inter_token_latency_seconds", "Between two tokens.", _TOKEN_BUCKETS)
        self._per_token = add(
            "vllm:request_time_per_output_token_seconds", "A request's mean time between tokens.", _TOKEN_BUCKETS
        )
        self._e2e = add("vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_BUCKETS)
        self._queue = add("vllm:request_queue_time_seconds", "From arrival to first being scheduled.", _REQUEST_BUCKETS)
        self._prefill = add("vllm:request_prefill_time_seconds", "From there to the first token.", _REQUEST_BUCKETS)
        self._decode = add("vllm:request_decode_time_seconds", "From there to the last token.", _REQUEST_BUCKETS)
        self._inference = add(
            "vllm:request_inference_time_seconds", "From being scheduled to the last token.", _REQUEST_BUCKETS
        )
        self._num_prompt = add("vllm:request_prompt_tokens", "Prompt tokens of a request.", lens)
        self._num_computed = add(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that weren't in the prefix cache.", lens
        )
        self._num_generated = add("vllm:request_generation_tokens", "Tokens generated for a request.", lens)
        self._max_generated = add(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sequence.", lens
        )
        self._param_n = add("vllm:request_params_n", "The parameter n.", _N_BUCKETS)
        self._param_max_tokens = add("vllm:request_params_max_tokens", "The parameter max_tokens.", lens)
        self._step_tokens = add(
            "vllm:iteration_tokens_total", "Prompt and generated tokens of a step.", _STEP_TOKEN_BUCKETS
        )
        self._step_seconds = {
            kind: self._families.histogram(
                "jaxllm:step_seconds",
                "Duration of a step, by kind.",
                {**self._state.labels, "kind": kind},
                _STEP_TIME_BUCKETS,
            )
            for kind in _STEP_KINDS
        }

    def _counter(self, name: str, text: str) -> Counter:
        return self._families.counter(name, text, self._state.labels)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        labels = self._state.labels
        return {value: self._families.counter(name, text, {**labels, label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._families.histogram(name, text, self._state.labels, buckets)


def _one_two_five(limit: int) -> list[int]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to the limit."""
    buckets: list[int] = []
    power = 1
    while power <= limit:
        buckets += [power * step for step in (1, 2, 5) if power * step <= limit]
        power *= 10
    return buckets
