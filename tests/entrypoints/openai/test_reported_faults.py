"""Faults that users of other servers have reported, each as the right behaviour over HTTP. Names say which."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.front_end import FrontEnd
from jaxllm.messages import SampledToken, TokenLogprobs
from tests.fakes.asgi import SERVER_EXECUTOR, FakeServer, fake_server
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_cores import fake_config
from tests.fakes.fake_executor import FakeExecutor, Row
from tests.fakes.fake_server import start_server

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 12, "temperature": 0}


class OneWord(FakeExecutor):
    """Writes "ABC DEFGHIJ" and the end-of-text token; its log probabilities are -inf."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(num_blocks=1025, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)

    def _draw_token(self, row: Row, seed: int) -> SampledToken:
        time.sleep(0.01)  # as a device would: readers keep up, and each token comes by itself
        word = [*b"ABC DEFGHIJ", 257]
        token_id = word[min(len(row.token_ids) - row.num_prompt_tokens, len(word) - 1)]
        if row.sampling_params.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, TokenLogprobs(float("-inf"), 1, [token_id], [float("-inf")]))


def one_word(tokenizer: ByteTokenizer | None = None, **model: Any) -> FrontEnd:
    config = dataclasses.replace(fake_config(f"{__name__}:OneWord"), **model)
    return FrontEnd(config, tokenizer or ByteTokenizer(), [257])


def run(check: Callable[[FakeServer], Any], front_end: FrontEnd | None = None, **options: Any) -> None:
    async def inside() -> None:
        async with fake_server(front_end=front_end, **options) as server:
            await check(server)

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["DEFGHIJ"], "ABC ", "DEFGHIJ"),  # 3574: over several tokens, and nothing of it leaks
        (["EF"], "ABC D", "EF"),  # 3572
        (["C D"], "AB", "C D"),  # 13280: begins in an earlier token's text
        (["nothing", "GH"], "ABC DEF", "GH"),
        (["DEFGHIJKLMNOP"], "ABC DEFGHIJ", None),  # held back to the end, then released
    ],
)
def test_stop_strings_cut_where_they_begin(stop: Sequence[str], text: str, found: str | None) -> None:
    async def check(server: FakeServer) -> None:
        body = {**COMPLETION, "stop": stop}
        (choice,) = (await server.post("/v1/completions", body)).json["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", found)
        events = (await server.post("/v1/completions", {**body, "stream": True})).events
        texts = [chunk["choices"][0]["text"] for chunk in events]
        assert "".join(texts) == text
        # 11089: what may be the beginning of a stop is held back, its chunks come all the same.
        assert texts[0] == "" or len(max(stop, key=len)) < 8

    run(check, one_word())


def test_the_end_of_text_token_is_no_text_and_is_counted() -> None:  # 28172
    async def check(server: FakeServer) -> None:
        answer = (await server.post("/v1/completions", {**COMPLETION, "return_token_ids": True})).json
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("ABC DEFGHIJ", 12)
        assert answer["choices"][0]["token_ids"][-1] == 257

    run(check, one_word())


@pytest.mark.parametrize("stream", [False, True])
def test_infinite_log_probabilities_are_valid_json(stream: bool) -> None:  # 10234
    async def check(server: FakeServer) -> None:
        reply = await server.post("/v1/completions", {**COMPLETION, "logprobs": 1, "echo": False, "stream": stream})
        choice = (reply.events[0] if stream else reply.json)["choices"][0]
        assert choice["logprobs"]["token_logprobs"][0] == -9999.0
        assert b"Infinity" not in reply.body and b"NaN" not in reply.body

    run(check, one_word())


def test_logprobs_0_reports_the_sampled_token_alone() -> None:  # 3707
    async def check(server: FakeServer) -> None:
        logprobs = (await server.post("/v1/completions", {**COMPLETION, "logprobs": 0})).json["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][:2] == [0.0, -0.125]
        assert [len(top) for top in logprobs["top_logprobs"]] == [1] * 12

    run(check)


def test_prompt_logprobs_are_the_same_from_the_prefix_cache() -> None:  # 8268
    async def check(server: FakeServer) -> None:
        body = {"prompt": "a" * 50, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
        first, second = [(await server.post("/v1/completions", body)).json["choices"][0] for _ in range(2)]
        assert first == second
        assert len(first["prompt_logprobs"]) == 50 and first["prompt_logprobs"][0] is None

    run(check)


def test_more_tokens_than_fit_are_clipped() -> None:  # 33418
    async def check(server: FakeServer) -> None:
        answer = (await server.post("/v1/completions", {**COMPLETION, "prompt": "a" * 100, "max_tokens": 999})).json
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (28, "length")

    run(check)


def test_generation_config_is_a_default_and_no_ceiling() -> None:  # 19861
    config = dataclasses.replace(
        fake_config(SERVER_EXECUTOR), generation_config={"max_new_tokens": 5, "temperature": 0.0, "top_p": None}
    )

    async def check(server: FakeServer) -> None:
        for asked, given in ((None, 5), (9, 9)):
            for path, prompt in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                answer = (await server.post(path, {**prompt, "max_tokens": asked})).json
                assert answer["usage"]["completion_tokens"] == given
        text = (await server.post("/v1/completions", {"prompt": "a"})).json["choices"][0]["text"]
        assert text == "Héll"  # greedy, as its temperature says

    run(check, FrontEnd(config, ByteTokenizer(), [257]))


def test_a_template_that_refuses_a_conversation_is_a_400() -> None:  # 17119
    class Strict(ByteTokenizer):
        chat_template = "{{ raise_exception('roles must alternate') }}"

    class Without(ByteTokenizer):
        chat_template = None

    body = {"messages": [{"role": "user", "content": "a"}] * 2}

    async def check(server: FakeServer) -> None:
        reply = await server.post("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "roles must alternate" in reply.error["message"] or "no chat template" in reply.error["message"]

    run(check, one_word(Strict()))
    run(check, one_word(Without()))


def test_different_salts_share_no_prefix() -> None:  # 44701
    async def cached(server: FakeServer, salt: str | None) -> int:
        body = {**COMPLETION, "prompt": "b" * 64, "cache_salt": salt}
        usage = (await server.post("/v1/completions", body)).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def check(server: FakeServer) -> None:
        assert [await cached(server, salt) for salt in (None, "a", "b", "a", "b", None)] == [0, 0, 0, 48, 48, 48]

    run(check)


def test_an_abort_storm_leaves_nothing() -> None:  # 18485
    async def check(server: FakeServer) -> None:
        for _ in range(10):
            calls = [server.call("POST", "/v1/completions", {**COMPLETION, "stream": True}) for _ in range(100)]
            await asyncio.sleep(0)
            for call in calls:
                call.disconnect()
            await asyncio.gather(*(call.reply() for call in calls))
        while server.engine.num_unfinished_requests or await server.metric("vllm:kv_cache_usage_perc"):
            await asyncio.sleep(0.01)
        assert server.serving.admission.num_requests == 0

    run(check)


def test_an_idle_server_uses_no_processor_time() -> None:
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with start_server(SERVER_EXECUTOR) as server:
        pids = [server.process.pid, server.core_pid()]
        before = [ticks(pid) for pid in pids]
        time.sleep(3)
        # A hundredth of a second each; a loop that spins would take 300 of them.
        assert all(ticks(pid) - start < 30 for pid, start in zip(pids, before, strict=True))
