"""The metrics page: vLLM's names, types, labels and buckets, as its dashboards read them."""

import asyncio
import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from jaxllm.config import CacheConfig
from jaxllm.engine.stats import FinishedRequest, StepStats
from jaxllm.entrypoints.interval_log import IntervalLog
from jaxllm.entrypoints.prometheus import PrometheusMetrics
from jaxllm.messages import KVCacheInfo, SchedulerStats, StepInfo
from tests.fakes.asgi import fake_server

INFO = KVCacheInfo(101, 16, 8, 64, 11, num_warmup_compiles=7)
STATS = SchedulerStats(3, 2, 75, 4, 5, 60, 30, 1, 8, 9, 7)
STEP = StepStats(30, 10, 6, [0.03], [0.02, 0.2])
FINISHED = FinishedRequest(
    finish_reason="length",
    e2e_s=4.0,
    queue_s=0.4,
    prefill_s=1.0,
    decode_s=2.0,
    num_prompt_tokens=30,
    num_cached_tokens=10,
    num_generated_tokens=6,
    max_num_generated_tokens=3,
    n=2,
    max_tokens=50,
)
GAUGES = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:cache_config_info": 1,
    "jaxllm:num_requests_swapped": 1,
}
COUNTERS = {
    "vllm:prompt_tokens": 30,
    "vllm:prompt_tokens_cached": 10,
    "vllm:generation_tokens": 6,
    "vllm:num_preemptions": 4,
    "vllm:prefix_cache_queries": 60,
    "vllm:prefix_cache_hits": 30,
    "jaxllm:copied_blocks": 5,
    "jaxllm:swapped_out_blocks": 8,
    "jaxllm:swapped_in_blocks": 9,
    "jaxllm:step_tokens": 36,
    "jaxllm:padding_tokens": 28,
}
REQUEST_BUCKETS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
HISTOGRAMS = {  # name -> buckets, count, sum
    "vllm:time_to_first_token_seconds": (FIRST, 1, 0.03),
    "vllm:inter_token_latency_seconds": (TOKEN, 2, 0.22),
    "vllm:request_time_per_output_token_seconds": (TOKEN, 1, 1.0),
    "vllm:e2e_request_latency_seconds": (REQUEST_BUCKETS, 1, 4.0),
    "vllm:request_queue_time_seconds": (REQUEST_BUCKETS, 1, 0.4),
    "vllm:request_prefill_time_seconds": (REQUEST_BUCKETS, 1, 1.0),
    "vllm:request_decode_time_seconds": (REQUEST_BUCKETS, 1, 2.0),
    "vllm:request_inference_time_seconds": (REQUEST_BUCKETS, 1, 3.0),
    "vllm:request_prompt_tokens": (LENS, 1, 30),
    "vllm:request_generation_tokens": (LENS, 1, 6),
    "vllm:request_max_num_generation_tokens": (LENS, 1, 3),
    "vllm:request_params_max_tokens": (LENS, 1, 50),
    "vllm:request_prefill_kv_computed_tokens": (LENS, 1, 20),
    "vllm:request_params_n": ([1, 2, 5, 10, 20], 1, 2),
    "vllm:iteration_tokens_total": ([1, *(2**power for power in range(3, 15))], 1, 36),
}


def page() -> dict[str, tuple[str, list]]:
    metrics = PrometheusMetrics("model", 4096, CacheConfig(), [INFO])
    metrics.observe_step(STEP, STATS, StepInfo("mixed", 0.02, 36, 64, 1), 0)
    metrics.observe_finished(FINISHED)
    families = text_string_to_metric_families(metrics.to_text().decode())
    return {family.name: (family.type, family.samples) for family in families}


def test_gauges_and_counters_have_their_names_labels_and_values() -> None:
    found = page()
    for expected, kind, suffix in ((GAUGES, "gauge", ""), (COUNTERS, "counter", "_total")):
        for name, value in expected.items():
            type_, samples = found[name]
            sample = next(sample for sample in samples if sample.name == name + suffix)
            assert (type_, sample.value) == (kind, value), name
            assert {"model_name": "model", "engine": "0"}.items() <= sample.labels.items()


def test_histograms_have_their_buckets() -> None:
    found = page()
    for name, (buckets, count, total) in HISTOGRAMS.items():
        type_, samples = found[name]
        limits = [sample.labels["le"] for sample in samples if sample.name == f"{name}_bucket"]
        assert type_ == "histogram"
        assert [float(limit) for limit in limits] == [*buckets, float("inf")], name
        values = {sample.name: sample.value for sample in samples}
        assert values[f"{name}_count"] == count
        assert abs(values[f"{name}_sum"] - total) < 1e-9, name


def test_series_with_a_label_of_their_own() -> None:
    found = page()

    def by(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in found[name][1] if sample.name.endswith("_total")}

    assert by("vllm:request_success", "finished_reason") == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert by("vllm:prompt_tokens_by_source", "source") == {
        "local_compute": 20,
        "local_cache_hit": 10,
        "external_kv_transfer": 0,
    }
    assert by("jaxllm:xla_compiles", "phase") == {"warmup": 7, "serving": 1}
    steps = [sample for sample in found["jaxllm:step_seconds"][1] if sample.name.endswith("_count")]
    assert {sample.labels["kind"]: sample.value for sample in steps} == {"prefill": 0, "decode": 0, "mixed": 1}
    waiting = found["vllm:num_requests_waiting_by_reason"][1]
    assert {sample.labels["reason"]: sample.value for sample in waiting} == {"capacity": 2, "deferred": 0}
    samples = found["jaxllm:kv_cache_blocks"][1]
    blocks = [(sample.labels["pool"], sample.labels["state"], sample.value) for sample in samples]
    assert blocks == [("device", "free", 75), ("device", "used", 25), ("host", "free", 7), ("host", "used", 3)]
    assert found["vllm:cache_config_info"][1][0].labels["num_gpu_blocks"] == "101"


def test_a_server_counts_its_requests() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "a" * 40, "max_tokens": 5, "n": 2}
            for _ in range(2):
                assert (await server.post("/v1/completions", body)).status == 200
            assert await server.metric("vllm:prompt_tokens_total") == 80
            assert await server.metric("vllm:generation_tokens_total") == 20
            assert await server.metric("vllm:prompt_tokens_cached_total") == 32  # two whole blocks, the second time
            assert await server.metric("vllm:e2e_request_latency_seconds_count") == 2
            assert await server.metric("vllm:request_params_n_sum") == 4
            text = (await server.get("/metrics")).body
            assert b"prompt" not in text.replace(b"prompt_tokens", b"").replace(b"Prompt", b"")

    asyncio.run(run())


def test_each_engine_core_has_its_own_numbers() -> None:
    metrics = PrometheusMetrics("model", 4096, CacheConfig(), [INFO, KVCacheInfo(51, 16, 8, 64)])
    metrics.observe_step(STEP, STATS, StepInfo("mixed", 0.02, 36, 64, 1), 1)
    metrics.observe_schedulers([STATS, SchedulerStats(1, 0, 40, 0, 0, 0, 0)])
    metrics.observe_finished(dataclasses.replace(FINISHED, engine_index=1))
    families = {family.name: family for family in text_string_to_metric_families(metrics.to_text().decode())}

    def values(family: str, name: str) -> dict[str, float]:
        samples = [sample for sample in families[family].samples if sample.name == name]
        assert all(sample.labels["model_name"] == "model" for sample in samples)
        return {sample.labels["engine"]: sample.value for sample in samples}

    assert values("vllm:generation_tokens", "vllm:generation_tokens_total") == {"0": 0, "1": 6}
    assert values("vllm:num_requests_running", "vllm:num_requests_running") == {"0": 3, "1": 1}
    assert values("vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_perc") == {"0": 0.25, "1": 0.2}
    name = "vllm:e2e_request_latency_seconds"
    assert values(name, f"{name}_count") == {"0": 0, "1": 1}
    sizes = {sample.labels["engine"]: sample.labels for sample in families["vllm:cache_config_info"].samples}
    assert (sizes["0"]["num_gpu_blocks"], sizes["1"]["num_gpu_blocks"]) == ("101", "51")


def test_the_log_line_is_written_while_busy(caplog) -> None:
    now = iter([0.0, 0.0, *[second for second in (10.0, 20.0, 30.0) for _ in range(2)]])
    log = IntervalLog([INFO, INFO], lambda: next(now))
    log.observe_step(STEP, STATS, None, 0)
    with caplog.at_level("INFO", "jaxllm.entrypoints.interval_log"):
        log.write()
        log.observe_step(StepStats(), SchedulerStats(0, 0, 100, 4, 5, 80, 35), None, 0)
        log.observe_step(StepStats(num_generated_tokens=5), SchedulerStats(1, 0, 50, 0, 0, 0, 0), None, 1)
        log.write()
        log.observe_step(StepStats(), SchedulerStats(0, 0, 100, 0, 0, 0, 0), None, 1)
        log.write()
    assert [record.getMessage() for record in caplog.records] == [
        "Engine 000: Avg prompt throughput: 3.0 tokens/s, Avg generation throughput: 0.6 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 50.0%",
        "Engine 001: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.5 tokens/s, "
        "Running: 1 reqs, Waiting: 0 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 0.0%",
    ]
