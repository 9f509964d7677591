"""AsyncLLMEngine: loading, deaths, draining, and what else concerns the whole engine."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.request_router import RequestRouter
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import (
    DeviceError,
    EngineDeadError,
    JaxllmError,
    ModelNotFoundError,
    RequestFailedError,
)
from jaxllm.sampling_params import SamplingParams
from tests.fakes.async_engines import (
    PATIENCE_S,
    alphabet_from,
    collect,
    core_pid,
    greedy,
    last,
    run,
    until_idle,
    wait_for,
    with_max_num_seqs,
)
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_cores import FAKES, ThreadCore, fake_config, fake_front_end

LINKS = pytest.mark.parametrize("connect", [ThreadCore, CoreProcess])


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
        # Far more tokens than there is time for: no stream may end before the step that takes for ever.
        streams = [asyncio.create_task(collect(engine.generate("a", greedy(2000), f"r{index}"))) for index in range(31)]
        streams.append(asyncio.create_task(collect(engine.generate("?", greedy(1), "endless"))))
        await wait_for(lambda: engine.num_unfinished_requests == 32)
        os.kill(core_pid(engine), signal.SIGKILL)
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "was ended by SIGKILL" in str(result)
        assert engine.status().phase == "dead"

    run(scenario, CoreProcess, fake_config(max_model_len=2048))


def test_a_death_shows_though_nobody_asks_anything() -> None:
    async def scenario(engine: AsyncLLMEngine) -> None:
        os.kill(core_pid(engine), signal.SIGKILL)
        await wait_for(lambda: engine.status().phase == "dead")
        assert isinstance(engine.dead_error, EngineDeadError)

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

        assert engine._start.front_end is not None
        engine._start.front_end = engine._start.front_end._replace(tokenizer=Watching())
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
        assert engine.status() == ("ready", None, None, "", False)
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
        assert psutil.Process().children() == before and engine._start._client is None

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

        monkeypatch.setattr(RequestRouter, "_route", fail)
        with pytest.raises(EngineDeadError, match="the output task has failed: KeyError"):
            await collect(engine.generate("a", greedy(3), "r"))
        assert engine.status().phase == "dead"
        with pytest.raises(EngineDeadError, match="the output task has failed"):
            await collect(engine.generate("a", greedy(3), "r"))

    run(scenario)
