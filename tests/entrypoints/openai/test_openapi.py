"""Requests made up from our own OpenAPI document: whatever comes, no 5xx, and the server is idle afterwards."""

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fakes.fake_server import ServerProcess, start_server
from tests.fakes.server_executor import expected_text

NUM_EXAMPLES = 25  # for each route


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("tests.fakes.server_executor:ServerExecutor", "--max-model-len", "128") as server:
        yield server


def test_the_document_names_every_route(server: ServerProcess) -> None:
    document = json.loads(server.get("/openapi.json")[1])
    assert set(document["paths"]) == {
        *("/live", "/ready", "/health", "/version", "/load", "/metrics", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions"),
    }
    assert "CompletionRequest" in document["components"]["schemas"]


@pytest.mark.slow
def test_no_request_brings_a_5xx(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        cases = st.one_of(
            operation.as_strategy(),
            operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
        )

        @given(case=cases)
        @settings(
            max_examples=NUM_EXAMPLES,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            deadline=None,
            database=None,
        )
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=120)
            assert response.status_code < 500 and response.status_code != 422, response.text
            if response.status_code >= 400:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] is None or isinstance(error["code"], str)

        check()
    text = server.get("/metrics")[1].decode()
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in text
    assert 'jaxllm:kv_cache_blocks{engine="0",model_name="fake",pool="device",state="used"} 0.0' in text
    assert server.process.poll() is None and expected_text(2) == "H\ufffd"
