"""The routes that need no generation: probes, models, versions, tokens; and what holds while the model loads."""

import asyncio
import threading

import pytest

import jaxllm
from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_messages import Pulse
from jaxllm.engine.front_end import FrontEnd
from jaxllm.entrypoints.admission import AdmissionControl, QueueFullError
from jaxllm.entrypoints.openai.api_server import build_app
from jaxllm.entrypoints.openai.metrics_page import MetricsPage
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.exceptions import ModelLoadError
from jaxllm.progress import progress_bar
from tests.fakes.asgi import FakeServer, fake_server
from tests.fakes.fake_cores import ThreadCore, fake_front_end


def test_small_facts() -> None:
    async def run() -> None:
        async with fake_server() as server:
            assert (await server.get("/version")).json == {"version": jaxllm.__version__}
            assert (await server.get("/load")).json == {"server_load": 0}
            assert (await server.get("/live")).status == (await server.get("/ready")).status == 200
            health = await server.get("/health")
            assert (health.status, health.json["phase"]) == (200, "ready")
            models = (await server.get("/v1/models")).json
            assert models["object"] == "list"
            assert [card["id"] for card in models["data"]] == ["fake", "alias"]
            assert models["data"][1]["root"] == "fake" and models["data"][1]["max_model_len"] == 128

    asyncio.run(run())


def test_tokens_and_back() -> None:
    async def run() -> None:
        async with fake_server() as server:
            reply = (await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json
            assert (reply["count"], reply["tokens"], reply["max_model_len"]) == (3, [104, 195, 169], 128)
            assert reply["token_strs"][0] == "h"
            assert (await server.post("/detokenize", {"tokens": reply["tokens"]})).json == {"prompt": "hé"}
            assert (await server.post("/detokenize", {"tokens": [104, 2**40, 257]})).json == {"prompt": "h</s>"}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            text = "<user>a\n<assistant>"
            assert (await server.post("/tokenize", chat)).json["tokens"] == list(text.encode())
            assert (await server.post("/tokenize", {})).status == 400
            assert (await server.post("/tokenize", {"prompt": "a", **chat})).status == 400
            assert (await server.post("/detokenize", {"tokens": [-1]})).status == 400

    asyncio.run(run())


def test_messages_may_be_made_of_parts_and_lack_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]

    async def run() -> None:
        async with fake_server() as server:
            reply = (await server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json
            assert reply["tokens"] == list(b"<user>a\nb\n<assistant>\n<user>c\n")

    asyncio.run(run())


class Loading:
    """A server whose model loads until it is told to go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self._error = error

    def __call__(self) -> FrontEnd:
        with progress_bar(4, "loading weights", "file") as bar:
            bar._reported_s = 0.0
            bar.update(1)
            self.go.wait(60)
        if self._error is not None:
            raise self._error
        return fake_front_end()


def test_it_answers_while_the_model_loads() -> None:
    async def run() -> None:
        loading = Loading()
        engine = AsyncLLMEngine(loading, connect=ThreadCore)
        serving = ServingEngine(engine, ("fake",), AdmissionControl(None))
        page = MetricsPage(serving)
        server = FakeServer(build_app(serving, page), engine, serving)
        while engine.status().percent is None:
            await asyncio.sleep(0.01)
        health = await server.get("/health")
        assert (health.status, health.json["phase"], health.json["percent"]) == (503, "loading", 25.0)
        assert health.json["detail"] == "loading weights" and health.json["eta_s"] > 0
        assert (await server.get("/ready")).status == 503
        assert (await server.get("/live")).status == (await server.get("/version")).status == 200
        assert ((await server.get("/metrics")).status, (await server.get("/metrics")).body) == (200, b"")
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            reply = await server.post(path, body)
            assert (reply.status, reply.error["code"]) == (503, "loading")
            assert int(reply.headers["retry-after"]) >= 1
        assert (await server.get("/v1/models")).status == 503
        loading.go.set()
        await engine.wait_ready()
        page.attach()
        serving.was_ready = True
        assert (await server.post("/v1/completions", {"prompt": "a"})).status == 200
        await engine.shutdown()

    asyncio.run(run())


def test_a_standstill_shows_in_ready_first_and_in_live_when_it_lasts() -> None:
    async def run() -> None:
        async with fake_server() as server:
            client = server.engine._start._client
            assert client is not None
            for replica, silent_s, ready, live in (
                (0, 9, 200, 200),
                (0, 10, 503, 200),
                (1, 0, 503, 200),  # another replica's sign of life
                (0, 29, 503, 200),
                (0, 30, 503, 503),
                (0, 0, 200, 200),
            ):
                client._receive(Pulse(silent_s, replica))
                statuses = [(await server.get(path)).status for path in ("/ready", "/health", "/live")]
                assert statuses == [ready, ready, live]
            client._receive(Pulse(12))
            health = (await server.get("/health")).json
            assert (health["phase"], health["detail"]) == ("stalled", "no sign of life for 12 s")
            reply = await server.post("/v1/completions", {"prompt": "a"})  # it may come back
            assert reply.status == 200

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_leaves_a_dead_server() -> None:
    async def run() -> None:
        loading = Loading(ModelLoadError("/secret/model.gguf: is damaged"))
        engine = AsyncLLMEngine(loading, connect=ThreadCore)
        serving = ServingEngine(engine, ("fake",), AdmissionControl(None))
        server = FakeServer(build_app(serving, MetricsPage(serving)), engine, serving)
        loading.go.set()
        with pytest.raises(ModelLoadError):
            await engine.wait_ready()
        health = await server.get("/health")
        assert (health.status, health.json["phase"]) == (503, "dead")
        assert b"secret" not in health.body
        await engine.shutdown()

    asyncio.run(run())


def test_admission_counts_sequences() -> None:
    control = AdmissionControl(4)
    with control.admit(3), pytest.raises(QueueFullError, match="3 of 4"):
        control.admit(2)
    assert (control.num_waiting, control.num_requests) == (0, 0)
    large = control.admit(100)  # alone, it may come in
    with pytest.raises(QueueFullError):
        control.admit(1)
    large.start()
    large.start()
    assert (control.num_waiting, control.num_requests) == (0, 1)
    control.admit(4).close()
    large.close()
    large.close()
    assert (control.num_waiting, control.num_requests) == (0, 0)
    assert AdmissionControl(None).admit(10**6) is not None
