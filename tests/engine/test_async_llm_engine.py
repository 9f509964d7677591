"""AsyncLLMEngine: streams, aborts of every kind, slow readers. On a core in a thread, mostly."""

import asyncio
import gc
import random
from typing import Any

import pytest

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_messages import FinishSequence, ToCore
from jaxllm.engine.core_process import CoreProcess
from jaxllm.exceptions import (
    InvalidRequestError,
)
from jaxllm.sampling_params import SamplingParams
from tests.fakes.async_engines import (
    alphabet_from,
    collect,
    greedy,
    last,
    run,
    wait_for,
    with_max_num_seqs,
)
from tests.fakes.fake_cores import ThreadCore

LINKS = pytest.mark.parametrize("connect", [ThreadCore, CoreProcess])


@LINKS
def test_a_stream_grows_to_the_whole_answer(connect: Connect) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        outputs = await collect(engine.generate("m", greedy(20), "r"))
        texts = [output.outputs[0].text for output in outputs]
        assert texts[-1] == alphabet_from("m", 20)
        assert all(texts[-1].startswith(text) for text in texts)
        assert [len(text) for text in texts] == sorted({len(text) for text in texts})
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"r"}

    run(scenario, connect)


@LINKS
def test_many_requests_at_once_are_as_alone(connect: Connect) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        params = [
            greedy(30, stop="wxy"),
            SamplingParams(n=3, seed=4, max_tokens=12),
            greedy(9, logprobs=2, prompt_logprobs=0),
            greedy(25, stop_token_ids=[ord("f")]),
        ]
        alone = [await last(engine.generate("kat", one, f"a{index}")) for index, one in enumerate(params)]
        streams = [last(engine.generate("kat", params[index % 4], f"b{index}")) for index in range(40)]
        for index, output in enumerate(await asyncio.gather(*streams)):
            expected = alone[index % 4]
            assert [facts(one) for one in output.outputs] == [facts(one) for one in expected.outputs]
            assert output.prompt_logprobs == expected.prompt_logprobs

    run(scenario, connect)


def facts(output: Any) -> tuple[Any, ...]:
    return output.index, output.text, output.token_ids, output.finish_reason, output.stop_reason, output.logprobs


def test_a_stop_string_ends_the_sequence_in_the_core_too() -> None:
    sent: list[ToCore] = []

    class Recording(ThreadCore):
        def send(self, message: ToCore) -> None:
            sent.append(message)
            super().send(message)

    async def scenario(engine: AsyncLLMEngine) -> None:
        output = await last(engine.generate("a", greedy(100, stop="def"), "r"))
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("bc", "def")
        assert FinishSequence("r-0", 0) in sent

    run(scenario, Recording)


def test_final_only_yields_once() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        (output,) = await collect(engine.generate("a", greedy(30), "r", final_only=True))
        assert output.finished and output.outputs[0].text == alphabet_from("a", 30)

    run(scenario)


def test_a_slow_reader_gets_fewer_outputs_and_all_of_the_text() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        count = 0
        async for output in engine.generate("a", greedy(100), "r"):
            count += 1
            if not output.finished:
                await wait_for(lambda: engine.num_unfinished_requests == 0)  # reads again once all is there
        assert count == 2 and output.outputs[0].text == alphabet_from("a", 100)

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "message"),
    [
        ("", greedy(1), "r", "prompt must not be empty"),
        ([-1], greedy(1), "r", "prompt_token_ids must be in"),
        ("a" * 200, greedy(1), "r", "must be shorter than max_model_len=128"),
        ("a" * 9000, greedy(1), "r", "must be shorter than max_model_len=128"),
        ("a", {"n": 1}, "r", "must be SamplingParams"),
        ("a", greedy(1, stop="\ud800"), "r", "stop must be valid Unicode"),
        ("a", greedy(1), "\ud800", "request_id must be valid Unicode"),
        ("a", greedy(1), 7, "request_id must be a string"),
        ("a", SamplingParams(n=100), "r", "n must be at most max_num_seqs"),
    ],
)
def test_a_bad_request_is_refused_before_its_first_output(
    prompt: Any, params: Any, request_id: Any, message: str
) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            await anext(engine.generate(prompt, params, request_id))
        assert engine.num_unfinished_requests == 0
        assert (await last(engine.generate("a", greedy(3), "r"))).outputs[0].text == "bcd"

    run(scenario, config=with_max_num_seqs(64))


def test_b112_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("a", greedy(100), "r")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="request_id 'r' is in use"):
            await anext(engine.generate("b", greedy(3), "r"))
        assert (await collect(stream))[-1].outputs[0].text == alphabet_from("a", 100)  # the first goes on
        results = await asyncio.gather(
            *[collect(engine.generate("b" * 5000, greedy(3), "s")) for _ in range(2)],
            *[collect(engine.generate("b", greedy(3), "t")) for _ in range(2)],
            return_exceptions=True,
        )
        assert [type(result) for result in results[:2]] == [InvalidRequestError] * 2  # too long
        assert sorted(isinstance(result, InvalidRequestError) for result in results[2:]) == [False, True]

    run(scenario)


@LINKS
def test_closing_a_stream_aborts_the_request(connect: Connect) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("a", greedy(100), "r")
        await anext(stream)
        await stream.aclose()
        assert engine.num_unfinished_requests == 0

    run(scenario, connect)


def test_dropping_a_stream_aborts_the_request() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("a", greedy(100), "r")
        await anext(stream)
        gc.disable()  # reference counts alone must do
        try:
            del stream
            await wait_for(lambda: engine.num_unfinished_requests == 0)
        finally:
            gc.enable()
        assert (await engine.get_stats()).num_waiting == 0

    run(scenario)


@pytest.mark.parametrize("prompt", ["a", "a" * 20_000])
def test_cancelling_the_reader_aborts_the_request(prompt: str) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        for delay_s in (0, 0.001, 0.005, 0.05):
            task = asyncio.create_task(collect(engine.generate(prompt, greedy(100), "r")))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, InvalidRequestError)):
                await task
            assert engine.num_unfinished_requests == 0

    run(scenario)


def test_b88_every_sequence_of_a_dropped_request_ends() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        stream = engine.generate("abc", SamplingParams(n=4, seed=1, max_tokens=100), "r")
        async for output in stream:
            if all(one.text for one in output.outputs):
                break
        await stream.aclose()
        assert engine.num_unfinished_requests == 0  # run() waits until their blocks are free too

    run(scenario)


def test_abort_gives_the_reader_a_last_output() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        task = asyncio.create_task(collect(engine.generate("a", greedy(120), "r")))
        other = asyncio.create_task(last(engine.generate("a", greedy(120), "s")))
        await wait_for(lambda: engine.num_unfinished_requests == 2)
        await engine.abort(["r", "nobody", "r"])
        await engine.abort("r")
        output = (await task)[-1]
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert (await other).outputs[0].text == alphabet_from("a", 120)  # B114: aborts are by id

    run(scenario)


@LINKS
def test_check_14_half_of_200_streams_are_dropped_at_random_and_the_others_are_as_alone(connect: Connect) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        rng = random.Random(3)
        params = [
            SamplingParams(n=rng.choice([1, 4]), seed=index, max_tokens=rng.randint(1, 60), stop=["xyz"])
            for index in range(200)
        ]
        alone = {
            index: await last(engine.generate("abc", params[index], f"alone{index}")) for index in range(1, 200, 20)
        }

        async def reader(index: int) -> list[Any] | None:
            await asyncio.sleep(rng.random() * 0.05)
            stream = engine.generate("abc", params[index], f"r{index}")
            seen: list[Any] = []
            is_dropped, num_outputs = index % 2 == 0, rng.randint(0, 20)
            try:
                async for output in stream:
                    seen = [facts(one) for one in output.outputs]
                    num_outputs -= 1
                    if is_dropped and num_outputs < 0:
                        return None
            finally:
                await stream.aclose()
            return seen

        tasks = [asyncio.create_task(reader(index)) for index in range(200)]
        for index in range(0, 200, 4):  # these at any moment, before the first output too
            asyncio.get_running_loop().call_later(rng.random() * 0.2, tasks[index].cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index, expected in alone.items():
            assert results[index] == [facts(one) for one in expected.outputs]
        assert all(isinstance(result, list) for result in results[1::2])

    run(scenario, connect)


def test_b118_an_abort_storm_leaves_nothing() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        async def one(index: int) -> None:
            stream = engine.generate("a", greedy(100), f"r{index}")
            if index % 2:
                await anext(stream)
            else:
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                await engine.abort(f"r{index}")
                await asyncio.wait([task])
                task.exception()
            await stream.aclose()

        for start in range(0, 1000, 100):
            await asyncio.gather(*[one(index) for index in range(start, start + 100)])
        assert engine.num_unfinished_requests == 0  # run() waits until their blocks are free too

    run(scenario)
