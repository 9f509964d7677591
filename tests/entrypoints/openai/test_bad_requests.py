"""What is refused, how, and that it harms nobody: always an error object, never a 422, never a 500."""

import asyncio
from typing import Any

import pytest

from tests.fakes.asgi import FakeServer, fake_server
from tests.fakes.server_executor import expected_text

COMPLETION = {"prompt": "a", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}

# (changed fields, param, code or None for any)
BAD_SAMPLING = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 10**12}, "top_k", None),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10**9}, "n", "invalid_value"),
    ({"n": 2}, "n", None),  # greedy sequences are all alike
    ({"n": 1.5}, "n", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": -(2**64)}, "seed", "invalid_value"),
    ({"stop": [""]}, "stop", None),
    ({"stop": ["x"] * 17}, "stop", None),
    ({"stop": "x" * 300}, "stop", None),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"stop_token_ids": [999]}, "stop_token_ids", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids", None),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**12}, "max_tokens", None),
    ({"logit_bias": {"191222": -100}}, "logit_bias", None),
    ({"logit_bias": {"AI": -100}}, "logit_bias", None),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(number): 1 for number in range(2000)}}, "logit_bias", None),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"colour": 1}}, "colour", "unsupported_parameter"),
    ({"priority": 3}, "priority", None),
    ({"cache_salt": ""}, "cache_salt", None),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 10, "max_tokens": 9}, "min_tokens", None),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"bad_words": [" "]}, "bad_words", None),
    ({"bad_words": "x"}, "bad_words", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids", None),
    ({"allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids", None),  # nothing could come
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
    ({"temprature": 1}, "temprature", "unsupported_parameter"),
]
BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", None),
    ({"prompt": [""]}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": [-1]}, "prompt", None),
    ({"prompt": [2**40]}, "prompt", None),
    ({"prompt": [10**30]}, "prompt", None),
    ({"prompt": ["a", [1]]}, "prompt", None),
    ({"prompt": ["a"] * 257}, "prompt", None),
    ({"prompt": {"text": "a"}}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({"prompt": "a" * 128}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 200, "max_tokens": None}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", None),
    ({"use_beam_search": True, "stream": True}, "stream", None),
    ({"use_beam_search": True, "n": 2, "temperature": 1}, "temperature", None),
]
BAD_CHATS = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user"}, 5]}, "messages", "invalid_value"),
    ({"messages": [{"content": "a"}]}, "messages", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages", None),
    ({"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "colour", "unsupported_parameter"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 5}, "max_tokens", None),
    ({"tools": []}, "tools", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_parameter"),
    ({"continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
]
GARBAGE = [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']
GARBAGE += [b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100, b'{"prompt": "a", "temperature": 1e999}']


async def check(server: FakeServer, path: str, body: Any, param: str | None, code: str | None) -> None:
    reply = await server.post(path, body)
    assert reply.status == 400, (body, reply.body)
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param, (body, reply.error)
    assert code is None or reply.error["code"] == code, (body, reply.error)
    assert "\n" not in reply.error["message"] and "Traceback" not in reply.error["message"]


def test_every_bad_field_is_named_and_the_next_request_is_answered() -> None:
    async def run() -> None:
        async with fake_server() as server:
            for fields, param, code in BAD_SAMPLING + BAD_COMPLETIONS:
                await check(server, "/v1/completions", {**COMPLETION, **fields}, param, code)
            for fields, param, code in BAD_SAMPLING + BAD_CHATS:
                await check(server, "/v1/chat/completions", {**CHAT, **fields}, param, code)
            assert (await server.post("/v1/completions", COMPLETION)).json["choices"][0]["text"] == expected_text(2)
            assert await server.metric("vllm:num_requests_running") == 0
            assert server.serving.admission.num_requests == server.serving.admission.num_waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_garbage_is_a_400(path: str) -> None:
    async def run() -> None:
        async with fake_server() as server:
            for body in GARBAGE:
                reply = await server.post(path, body)
                assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), body[:50]

    asyncio.run(run())


def test_a_body_has_a_largest_size() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = b'{"prompt": "' + b"a" * (8 << 20) + b'"}'
            assert (await server.post("/v1/completions", body)).status == 413
            declared = await server.post("/v1/completions", b"{}", {"content-length": str(10**12)})
            assert (declared.status, declared.error["code"]) == (413, "request_too_large")

    asyncio.run(run())


def test_neutral_values_of_what_is_not_supported_are_no_reason_to_refuse() -> None:
    neutral = {
        "suffix": None,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "store": False,
    }

    async def run() -> None:
        async with fake_server() as server:
            assert (await server.post("/v1/completions", {**COMPLETION, **neutral})).status == 200
            assert (await server.post("/v1/chat/completions", {**CHAT, **neutral})).status == 200

    asyncio.run(run())


def test_unknown_models_paths_and_methods() -> None:
    async def run() -> None:
        async with fake_server() as server:
            for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
                reply = await server.post(path, {**body, "model": "gpt-5"})
                assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
                assert (await server.post(path, {**body, "model": "alias"})).json["model"] == "alias"
            assert (await server.get("/v1/models/gpt-5")).status == 404
            unknown = await server.get("/v1/nothing")
            assert (unknown.status, unknown.error["code"]) == (404, "not_found")
            wrong = await server.get("/v1/completions")
            assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")

    asyncio.run(run())


def test_a_prompt_one_short_of_the_limit_gets_one_token() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "a" * 127, "max_tokens": 50, "temperature": 0}
            answer = (await server.post("/v1/completions", body)).json
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")

    asyncio.run(run())
