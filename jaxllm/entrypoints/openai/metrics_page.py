"""GET /metrics: empty until the engine is ready, then its numbers, the scheduler's of this moment among them."""

import asyncio
from contextlib import suppress

from starlette.responses import Response

from jaxllm.engine.stats import StatsCollector
from jaxllm.entrypoints.interval_log import IntervalLog
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.entrypoints.prometheus import CONTENT_TYPE, PrometheusMetrics
from jaxllm.exceptions import EngineDeadError

_SCHEDULER_TIMEOUT_S = 1.0  # a scraper should rather get the latest step's numbers than none


class MetricsPage:
    """Owns what counts. `attach` must be called before the first request."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving
        self._prometheus: PrometheusMetrics | None = None

    def attach(self) -> IntervalLog:
        """Begins to count; the engine must be ready. Returns what writes the log line."""
        engine = self._serving.engine
        infos = engine.kv_cache_infos
        assert infos is not None
        config = engine.config
        model_name = self._serving.served_model_names[0]
        self._prometheus = PrometheusMetrics(model_name, config.scheduler.max_model_len, config.cache, infos)
        interval_log = IntervalLog(infos)
        engine.stats_collector = StatsCollector([self._prometheus, interval_log])
        return interval_log

    async def get(self) -> Response:
        """Returns the page."""
        if self._prometheus is None:
            return Response(b"", media_type=CONTENT_TYPE)
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(_SCHEDULER_TIMEOUT_S):
                self._prometheus.observe_schedulers(await self._serving.engine.get_stats_by_engine())
        return Response(self._prometheus.to_text(), headers={"content-type": CONTENT_TYPE})
