"""The `openai` Python client against a real server process: what users of it see."""

import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.fake_server import ServerProcess, start_server
from tests.fakes.server_executor import expected_text

KEY = "sk-test"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("tests.fakes.server_executor:ServerExecutor", "--api-key", KEY, "--log-format", "json") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def used_blocks(server: ServerProcess) -> float:
    request = urllib.request.Request(server.url + "/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        line = next(line for line in answer.read().decode().splitlines() if 'pool="device",state="used"' in line)
    return float(line.split()[-1])


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("fake", "jaxllm", 4096)
    assert client.models.retrieve("fake").id == "fake"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="Say", max_tokens=9, temperature=0, logprobs=2, echo=True)
    (choice,) = answer.choices
    assert choice.text == "Say" + expected_text(9)
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens[:5] == ["S", "a", "y", "H", ""]  # the fifth is half of an é
    assert choice.logprobs.token_logprobs[:5] == [None, -1.0, -2.0, 0.0, -0.125]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 9, 12)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_and_its_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hé", "length")
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", 0.0, [72])
    assert [entry.token for entry in first.top_logprobs] == ["a", "b"]


def test_streams_with_several_choices_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=20,
        temperature=1,
        seed=2,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usages = ["", ""], {}, []
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [expected_text(20, 2), expected_text(20, 3)]
    assert reasons == {0: "length", 1: "length"}
    assert [usage.completion_tokens for usage in usages] == [40]


def test_errors_become_the_clients_exceptions(server: ServerProcess, client: openai.OpenAI) -> None:
    def complete(key: str = KEY, **fields: object) -> None:
        with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as other:
            other.completions.create(**{"model": "fake", "prompt": "a", **fields})

    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        complete(temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as long:
        complete(prompt="a" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError) as auth:
        complete(key="sk-wrong")
    assert auth.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        complete(model="gpt-5")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as suffix:
        complete(suffix="end")
    assert (suffix.value.code, suffix.value.param) == ("unsupported_parameter", "suffix")


@pytest.fixture(scope="session")
def node_modules(pytestconfig: pytest.Config) -> Path:
    """The openai npm package, installed once into pytest's cache."""
    folder = pytestconfig.cache.mkdir("openai-npm")
    modules = folder / "node_modules"
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    if not (modules / "openai").is_dir():
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "openai@6"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"npm can't install the openai package: {result.stderr[-300:]}")
    return modules


@pytest.mark.slow
def test_the_npm_package(server: ServerProcess, node_modules: Path) -> None:
    script = Path(__file__).with_name("npm_client.mjs")
    with tempfile.TemporaryDirectory() as folder:
        # Modules are looked for beside the script.
        copy = Path(shutil.copy(script, folder))
        (copy.parent / "node_modules").symlink_to(node_modules)
        command = ["node", str(copy), server.url + "/v1", KEY]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["models"] == ["fake"]
    assert (found["completion"]["text"], found["completion"]["finish_reason"]) == (expected_text(9), "length")
    assert found["completion"]["logprobs"]["token_logprobs"][:2] == [0, -0.125]
    assert found["chat"]["message"]["content"] == "Hé"
    assert [entry["token"] for entry in found["chat"]["logprobs"]["content"][0]["top_logprobs"]] == ["a"]
    assert found["usage"]["completion_tokens"] == 3
    assert found["texts"] == [expected_text(20, 2), expected_text(20, 3)] and found["streamed"] == 40
    assert found["errors"] == [
        ["BadRequestError", 400, "invalid_value"],
        ["AuthenticationError", 401, "invalid_api_key"],
        ["NotFoundError", 404, "model_not_found"],
    ]
    server.wait_until(lambda: used_blocks(server) == 0, "no blocks in use")


def test_a_closed_stream_frees_every_block(server: ServerProcess, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="a" * 100, max_tokens=3900, n=2, stream=True)
    next(iter(stream))
    assert used_blocks(server) > 0
    stream.close()
    server.wait_until(lambda: used_blocks(server) == 0, "no blocks in use")


def test_the_log_is_json_and_holds_no_key(server: ServerProcess) -> None:
    text = server.log_text()
    assert KEY not in text
    assert {"time", "level", "logger", "message"} <= set(json.loads(text.splitlines()[0]))
