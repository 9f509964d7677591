"""AsyncLLMEngine: streams, aborts of every kind, slow readers, deaths, draining. On a core in a thread, mostly."""

import asyncio
import dataclasses
import gc
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import psutil
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_messages import FinishSequence, ToCore
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import (
    DeviceError,
    EngineDeadError,
    InvalidRequestError,
    JaxllmError,
    ModelNotFoundError,
    RequestFailedError,
)
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_cores import FAKES, ThreadCore, fake_config, fake_front_end

T = TypeVar("T")
LINKS = pytest.mark.parametrize("connect", [ThreadCore, CoreProcess])
PATIENCE_S = 300.0


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def alphabet_from(letter: str, count: int) -> str:
    return "".join(chr(97 + (ord(letter) - 97 + step) % 26) for step in range(1, count + 1))


def run(
    scenario: Callable[[AsyncLLMEngine], Coroutine[Any, Any, T]],
    connect: Connect = ThreadCore,
    config: EngineConfig | None = None,
) -> T:
    """Runs a scenario on an engine that is ready, and checks that nothing of it is left afterwards."""

    async def main() -> T:
        engine = AsyncLLMEngine(lambda: fake_front_end(config or fake_config()), connect)
        try:
            await engine.wait_ready()
            result = await asyncio.wait_for(scenario(engine), PATIENCE_S)
            if not engine.errored:
                await until_idle(engine)
            return result
        finally:
            await engine.shutdown()

    return asyncio.run(main())


async def until_idle(engine: AsyncLLMEngine) -> None:
    """Waits until every request and every block has been given back."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        stats = await engine.get_stats()
        if (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 4096):
            break
        assert time.monotonic() < deadline_s, stats
        await asyncio.sleep(0.01)
    assert engine.num_unfinished_requests == 0


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await collect(stream))[-1]


def core_pid(engine: AsyncLLMEngine) -> int:
    assert engine._client is not None and isinstance(engine._client._link, CoreProcess)
    return engine._client._link.pid


async def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it didn't happen"
        await asyncio.sleep(0.01)


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


def with_max_num_seqs(max_num_seqs: int) -> EngineConfig:

    config = fake_config()
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_num_seqs=max_num_seqs))


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

    run(scenario)


@LINKS
def test_the_end_of_the_engine_is_told_to_every_stream(connect: Connect) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        streams = [asyncio.create_task(collect(engine.generate("a", greedy(120), f"r{index}"))) for index in range(32)]
        await wait_for(lambda: engine.num_unfinished_requests == 32)
        streams.append(asyncio.create_task(collect(engine.generate("!", greedy(1), "bad"))))
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "the device is on fire" in str(result)
        assert engine.errored and isinstance(engine.dead_error, EngineDeadError)
        assert engine.status().phase == "dead" and "on fire" in engine.status().detail
        for call in (anext(engine.generate("a", greedy(1), "r")), engine.get_stats(), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="on fire"):
                await call
        assert engine.num_unfinished_requests == 0

    run(scenario, connect)


def test_check_9_kill_9_of_the_core_is_told_to_every_stream() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        streams = [asyncio.create_task(collect(engine.generate("a", greedy(120), f"r{index}"))) for index in range(31)]
        streams.append(asyncio.create_task(collect(engine.generate("?", greedy(1), "endless"))))
        await wait_for(lambda: engine.num_unfinished_requests == 32)
        os.kill(core_pid(engine), signal.SIGKILL)
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "was ended by SIGKILL" in str(result)
        assert engine.status().phase == "dead"

    run(scenario, CoreProcess)


def test_a_death_shows_though_nobody_asks_anything() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        os.kill(core_pid(engine), signal.SIGKILL)
        await wait_for(lambda: engine.status().phase == "dead")

    run(scenario, CoreProcess)


def test_an_answer_that_cannot_be_read_fails_alone() -> None:
    class BrokenTokenizer(ByteTokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            if ord("q") in ids:
                raise KeyError("a token that this tokenizer can't stand")
            return super().decode(ids, skip_special_tokens)

    async def main() -> None:
        engine = AsyncLLMEngine(lambda: FrontEnd(fake_config(), BrokenTokenizer(), [257]), ThreadCore)
        bad, good = await asyncio.gather(
            collect(engine.generate("o", greedy(9), "bad")),
            last(engine.generate("a", greedy(9), "good")),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestFailedError) and "KeyError" not in str(bad)
        assert not isinstance(good, BaseException) and good.outputs[0].text == alphabet_from("a", 9)
        await until_idle(engine)
        await engine.shutdown()

    asyncio.run(main())


def test_the_prefix_cache_is_reset_when_nothing_runs() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        prompt = "the same prompt of more than one block"
        assert (await last(engine.generate(prompt, greedy(1), "a"))).num_cached_tokens == 0
        assert (await last(engine.generate(prompt, greedy(1), "b"))).num_cached_tokens == 32
        stream = engine.generate(prompt, greedy(80), "c")
        await anext(stream)
        assert await engine.reset_prefix_cache() is False
        await collect(stream)
        assert await engine.reset_prefix_cache() is True
        assert (await last(engine.generate(prompt, greedy(1), "d"))).num_cached_tokens == 0
        assert engine.stats is not None and engine.stats.prefix_cache_hits == 64

    run(scenario)


def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        task = asyncio.create_task(last(engine.generate("a", greedy(100), "r")))
        await wait_for(lambda: engine.num_unfinished_requests == 1)
        shutdown = asyncio.create_task(engine.shutdown(PATIENCE_S))
        await asyncio.sleep(0)
        assert engine.status().phase == "draining"
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(engine.generate("a", greedy(1), "s"))
        assert (await task).outputs[0].text == alphabet_from("a", 100)
        await shutdown
        assert engine.status().phase == "dead" and not engine.errored

    with pytest.raises(EngineDeadError):  # there is nothing left that could be asked for its stats
        run(scenario)


def test_what_is_not_finished_in_time_fails() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        task = asyncio.create_task(last(engine.generate("?", greedy(1), "r")))
        await wait_for(lambda: engine.num_unfinished_requests == 1)
        await engine.shutdown(0.05)
        with pytest.raises(EngineDeadError, match="shut down before the request was finished"):
            await task

    with pytest.raises(EngineDeadError):
        run(scenario, CoreProcess)


def test_nothing_else_waits_for_long_texts() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        in_thread: list[bool] = []

        class Watching(ByteTokenizer):
            def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
                in_thread.append(threading.current_thread() is not threading.main_thread())
                return super().encode(text)

        assert engine._front_end is not None
        engine._front_end = engine._front_end._replace(tokenizer=Watching())
        assert await engine.encode("short") == list(b"short")
        assert len(await engine.encode("long" * 10_000)) == 40_000
        assert in_thread == [False, True]
        assert await engine.decode([104, 105]) == "hi"
        assert await engine.decode([104] * 10_000) == "h" * 10_000

    run(scenario)


def test_a_prompt_that_is_still_being_tokenized_fails_at_shutdown() -> None:
    may_go_on = threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            may_go_on.wait(PATIENCE_S)
            return super().encode(text)[:5]

    async def main() -> None:
        engine = AsyncLLMEngine(lambda: FrontEnd(fake_config(), Slow(), [257]), ThreadCore)
        await engine.wait_ready()
        tasks = [asyncio.create_task(last(engine.generate("a" * 9000, greedy(1), f"r{index}"))) for index in range(6)]
        await asyncio.sleep(0.05)
        await engine.shutdown()
        may_go_on.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await engine.encode("a" * 9000)

    asyncio.run(main())


def test_generate_waits_for_the_model_and_status_tells_how_far_it_is() -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(lambda: fake_front_end(fake_config(f"{FAKES}:SlowToLoad")), CoreProcess)
        assert engine.status().phase == "loading"
        task = asyncio.create_task(last(engine.generate("a", greedy(3), "r")))
        await wait_for(lambda: (engine.status().percent or 0) > 0)
        status = engine.status()
        assert (status.phase, status.detail) == ("loading", "loading weights") and status.eta_s is not None
        assert (await task).outputs[0].text == "bcd"
        assert engine.status() == ("ready", None, None, "")
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (lambda: fake_front_end(fake_config(f"{FAKES}:FailsDeviceError")), DeviceError),
        (lambda: fake_front_end(fake_config(f"{FAKES}:FailsKeyError")), EngineDeadError),
        (lambda: [].pop(), EngineDeadError),
    ],
)
def test_loading_that_fails_says_why(load: Callable[[], FrontEnd], error: type[JaxllmError]) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(load, CoreProcess)
        with pytest.raises(error):
            await engine.wait_ready()
        assert type(engine.dead_error) is error and engine.status().phase == "dead"
        with pytest.raises(error):
            await anext(engine.generate("a", greedy(1), "r"))
        await engine.shutdown()

    asyncio.run(main())


def test_from_engine_args_returns_at_once_and_wait_ready_tells_what_is_wrong() -> None:
    async def main() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(model="/no/such/model.gguf"))
        with pytest.raises(ModelNotFoundError):
            await engine.wait_ready()
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["starting the engine process", "loading weights"])
def test_shutdown_while_loading_does_not_wait(moment: str) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(lambda: fake_front_end(fake_config(f"{FAKES}:NeverLoads")), CoreProcess)
        waiting = asyncio.create_task(engine.wait_ready())
        await wait_for(lambda: engine.status().detail == moment)
        await engine.shutdown(PATIENCE_S)
        with pytest.raises(EngineDeadError):
            await waiting
        assert not engine.errored
        assert not psutil.pid_exists(core_pid(engine))

    asyncio.run(main())


def test_shutdown_before_the_front_end_is_loaded_starts_no_core() -> None:
    may_load = threading.Event()

    def load() -> FrontEnd:
        may_load.wait(PATIENCE_S)
        return fake_front_end()

    async def main() -> None:
        before = psutil.Process().children()
        engine = AsyncLLMEngine(load, CoreProcess)
        await engine.shutdown()
        may_load.set()
        with pytest.raises(EngineDeadError):
            await engine.wait_ready()
        await asyncio.sleep(0.1)
        assert psutil.Process().children() == before and engine._client is None

    asyncio.run(main())


def test_the_event_loop_has_turns_while_a_thousand_outputs_come() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        params = SamplingParams(n=100, seed=1, max_tokens=20)
        await asyncio.gather(*[collect(engine.generate("a", params, f"r{index}")) for index in range(10)])
        task.cancel()
        assert turns > 20

    run(scenario, config=with_max_num_seqs(1000))


def test_f4_the_death_of_the_output_task_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        def fail(*args: Any) -> None:
            raise KeyError("a fault of ours")

        monkeypatch.setattr(engine, "_route", fail)
        with pytest.raises(EngineDeadError, match="the output task has failed: KeyError"):
            await collect(engine.generate("a", greedy(3), "r"))
        assert engine.status().phase == "dead"
        with pytest.raises(EngineDeadError, match="the output task has failed"):
            await collect(engine.generate("a", greedy(3), "r"))

    run(scenario)
