"""/live, /ready and /health: answered at once, from what is already known. Probes never ask the engine to work."""

from typing import Any

from starlette.responses import Response

from jaxllm.entrypoints.openai.errors import RETRY_LOADING_S
from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.serving_engine import ServingEngine


class Probes:
    """Says how the server is."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def live(self) -> Response:
        """Answers 200 as long as a restart would help nobody; 503 once the engine has stood still for long."""
        if self._serving.engine.status().is_hopeless:
            return json_response({"status": "stalled"}, 503)
        return json_response({"status": "alive"})

    async def ready(self) -> Response:
        """Answers 200 while new requests are taken, else 503."""
        return self._status_response()

    async def health(self) -> Response:
        """Answers 200 when the engine can answer, else 503 with how far it is."""
        return self._status_response()

    def _status_response(self) -> Response:
        status = self._serving.engine.status()
        phase = "draining" if self._serving.is_draining and status.phase == "ready" else status.phase
        content: dict[str, Any] = {
            "phase": phase,
            "percent": status.percent,
            "eta_s": status.eta_s,
            "detail": status.detail if phase in ("loading", "stalled") else "",
        }
        if phase == "ready":
            return json_response(content)
        headers = {"retry-after": str(RETRY_LOADING_S)} if phase == "loading" else {}
        return json_response(content, 503, headers)
