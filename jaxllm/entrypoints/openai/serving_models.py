"""GET /v1/models: what is served, under every name that it has."""

from typing import Any

from starlette.responses import Response

from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.serving_engine import ServingEngine


class ModelService:
    """Lists models."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def list(self) -> Response:
        """Raises: ApiError: 503, the model's limits aren't known yet."""
        self._serving.check_ready()
        cards = [self._card(name) for name in self._serving.served_model_names]
        return json_response({"object": "list", "data": cards})

    async def get(self, name: str) -> Response:
        """Raises: ApiError: 404, nothing by that name is served; 503, as for `list`."""
        self._serving.check_ready()
        return json_response(self._card(self._serving.model_of(name)))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._serving.created,
            "owned_by": "jaxllm",
            "root": self._serving.served_model_names[0],
            "parent": None,
            "max_model_len": self._serving.engine.config.scheduler.max_model_len,
            "permission": [],
        }
