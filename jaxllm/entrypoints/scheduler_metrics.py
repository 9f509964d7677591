"""What each engine core's scheduler and worker count themselves, written down for Prometheus as it stands."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxllm.config import CacheConfig
from jaxllm.engine.stats import idle_stats
from jaxllm.messages import KVCacheInfo, StepInfo


class EngineState:
    """The latest numbers of one engine core.

    Attributes:
      labels: Of each of its metrics.
      stats: Its scheduler's.
      info: Of its latest step, None before the first.
    """

    def __init__(self, model_name: str, engine_index: int, kv_cache_info: KVCacheInfo) -> None:
        self.labels = {"model_name": model_name, "engine": str(engine_index)}
        self.kv_cache_info = kv_cache_info
        self.num_blocks = kv_cache_info.num_device_blocks - 1  # the null blocks count nowhere
        self.num_host_blocks = max(kv_cache_info.num_host_blocks - 1, 0)
        self.stats = idle_stats(kv_cache_info)
        self.info: StepInfo | None = None

    @property
    def num_used(self) -> int:
        """Device blocks in use."""
        return self.num_blocks - self.stats.num_free_blocks

    @property
    def num_host_used(self) -> int:
        """Host blocks in use."""
        return self.num_host_blocks - self.stats.num_free_host_blocks


LABELS = ("model_name", "engine")
# Values of the labels that follow LABELS -> sample.
Samples = Mapping[tuple[str, ...], float]


def _blocks(engine: EngineState) -> Samples:
    return {
        ("device", "free"): engine.stats.num_free_blocks,
        ("device", "used"): engine.num_used,
        ("host", "free"): engine.stats.num_free_host_blocks,
        ("host", "used"): engine.num_host_used,
    }


def _compiles(engine: EngineState) -> Samples:
    num_serving = 0 if engine.info is None else engine.info.num_compiles
    return {("warmup",): engine.kv_cache_info.num_warmup_compiles, ("serving",): num_serving}


# Name, help, labels that follow LABELS, samples of one engine core.
Table = tuple[tuple[str, str, tuple[str, ...], Callable[[EngineState], Samples]], ...]
_GAUGES: Table = (
    ("vllm:num_requests_running", "Requests in the batch.", (), lambda engine: {(): engine.stats.num_running}),
    ("vllm:num_requests_waiting", "Requests that wait.", (), lambda engine: {(): engine.stats.num_waiting}),
    (
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait, by reason.",
        ("reason",),
        lambda engine: {("capacity",): engine.stats.num_waiting, ("deferred",): 0},
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use, 0 to 1.",
        (),
        lambda engine: {(): engine.num_used / engine.num_blocks},
    ),
    ("jaxllm:num_requests_swapped", "Requests in host memory.", (), lambda engine: {(): engine.stats.num_swapped}),
    ("jaxllm:kv_cache_blocks", "Blocks of the KV cache, by pool and state.", ("pool", "state"), _blocks),
)
_COUNTERS: Table = (
    ("vllm:num_preemptions", "Preemptions.", (), lambda engine: {(): engine.stats.num_preemptions}),
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        (),
        lambda engine: {(): engine.stats.prefix_cache_queries},
    ),
    (
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache.",
        (),
        lambda engine: {(): engine.stats.prefix_cache_hits},
    ),
    ("jaxllm:copied_blocks", "Blocks copied on write.", (), lambda engine: {(): engine.stats.num_copied_blocks}),
    (
        "jaxllm:swapped_out_blocks",
        "Blocks swapped to host memory.",
        (),
        lambda engine: {(): engine.stats.num_swapped_out_blocks},
    ),
    ("jaxllm:swapped_in_blocks", "Blocks swapped back.", (), lambda engine: {(): engine.stats.num_swapped_in_blocks}),
    ("jaxllm:xla_compiles", "Programs compiled, by phase.", ("phase",), _compiles),
)


class SchedulerCollector:
    """A collector of prometheus_client. Each metric has each engine core's samples."""

    def __init__(self, engines: Sequence[EngineState], cache: CacheConfig) -> None:
        self._engines = engines
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, labels, samples in table:
                family = kind(name, text, labels=(*LABELS, *labels))
                for engine in self._engines:
                    for values, sample in samples(engine).items():
                        family.add_metric([*engine.labels.values(), *values], sample)
                yield family
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        cache = self._cache
        shared = {
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "swap_space": str(cache.swap_space),
        }
        names = ("block_size", "num_gpu_blocks", "num_cpu_blocks", *shared)
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=(*LABELS, *names))
        for engine in self._engines:
            info = engine.kv_cache_info
            own = [str(info.block_size), str(info.num_device_blocks), str(info.num_host_blocks)]
            family.add_metric([*engine.labels.values(), *own, *shared.values()], 1)
        return family
