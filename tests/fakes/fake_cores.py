"""Executors that a configuration can name, and a core that runs in a thread of the test instead of a process.

config = fake_config("tests.fakes.fake_cores:AlphabetExecutor")
engine = AsyncLLMEngine(lambda: FrontEnd(config, ByteTokenizer(), [257]), connect=ThreadCore)
"""

import ctypes
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

from jaxllm.config import EngineConfig
from jaxllm.engine.core_loop import EngineCoreLoop, Inbox
from jaxllm.engine.core_messages import EngineFailed, FromCore, Ready, ShutDown, ToCore
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.serialization import MessageDecoder, MessageEncoder
from jaxllm.exceptions import ConfigError, DeviceError, EngineDeadError, ModelLoadError
from jaxllm.executor.executor import make_executor
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SampledToken, SchedulerOutput
from jaxllm.progress import progress_bar
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.engines import engine_config
from tests.fakes.fake_executor import FakeExecutor, Row

FAKES = "tests.fakes.fake_cores"
STEP_S = 0.001


def next_letter(token_ids: Sequence[int], shift: int = 1) -> int:
    """Goes on in the alphabet, round and round: "a" -> "b", "z" -> "a"; after any other token, "a" comes next."""
    last = token_ids[-1]
    return ord("a") + ((last - ord("a") + shift) % 26 if ord("a") <= last <= ord("z") else 0)


class AlphabetExecutor(FakeExecutor):
    """Writes the alphabet after the prompt's last letter; a step takes a millisecond, as on a fast device.

    Greedy requests go letter by letter. Others go seed % 26 letters at a time.
    A prompt that holds "!" lets the step raise; one that holds "?" takes for ever.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            draw=lambda token_ids, seed: next_letter(token_ids, seed),
            num_blocks=config.cache.num_gpu_blocks_override or 4097,
            block_size=16,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for new in scheduler_output.new_seqs:
            if ord("!") in new.token_ids:
                raise RuntimeError("the device is on fire")
            if ord("?") in new.token_ids:
                time.sleep(3600)
        time.sleep(STEP_S)
        return super().execute_model(scheduler_output)

    def _draw_token(self, row: Row, seed: int) -> SampledToken:
        return super()._draw_token(row, 1 if row.sampling_params.is_greedy else seed)


class SlowToLoad(AlphabetExecutor):
    """Takes half a second to load."""

    def initialize(self) -> KVCacheInfo:
        with progress_bar(5, "loading weights", "B") as bar:
            for _ in range(5):
                time.sleep(0.11)
                bar.update(1)
        return super().initialize()


class NeverLoads(AlphabetExecutor):
    def initialize(self) -> KVCacheInfo:
        with progress_bar(2, "loading weights", "B") as bar:
            bar.update(1)
            time.sleep(3600)
        return super().initialize()


class HoldsEveryThread(AlphabetExecutor):
    """Ends in a native call that lets no Python thread run, after half a second."""

    def initialize(self) -> KVCacheInfo:
        with progress_bar(1, "loading weights", "B"):
            time.sleep(0.5)
            ctypes.PyDLL(None).sleep(3600)
        return super().initialize()


class HoldsEveryThreadInAStep(AlphabetExecutor):
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        ctypes.PyDLL(None).sleep(3600)
        return super().execute_model(scheduler_output)


class PrintsAWord(AlphabetExecutor):
    def initialize(self) -> KVCacheInfo:
        print("word", flush=True)
        return super().initialize()


class _Fails(AlphabetExecutor):
    error: type[BaseException]

    def initialize(self) -> KVCacheInfo:
        raise self.error(f"the test wants a {self.error.__name__}")


class FailsConfigError(_Fails):
    error = ConfigError


class FailsModelLoadError(_Fails):
    error = ModelLoadError


class FailsDeviceError(_Fails):
    error = DeviceError


class FailsKeyError(_Fails):
    error = KeyError


class FailsSystemExit(_Fails):
    error = SystemExit


def fake_config(executor_class: str = f"{FAKES}:AlphabetExecutor", max_model_len: int = 128) -> EngineConfig:
    config = engine_config(max_model_len=max_model_len, model_limit=max(128, max_model_len))
    return dataclasses.replace(config, executor_class=executor_class)


def fake_front_end(config: EngineConfig | None = None) -> FrontEnd:
    return FrontEnd(config or fake_config(), ByteTokenizer(), [257])


class ThreadCore:
    """A CoreLink without a process: the busy loop runs on a thread. Messages go through bytes all the same."""

    def __init__(self, config: EngineConfig, on_message: Callable[[FromCore], None]) -> None:
        self._inbox: Inbox = queue.SimpleQueue()
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[ToCore] = MessageDecoder(ToCore)
        self._config = config
        self._on_message = on_message
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: ToCore) -> None:
        self._inbox.put(self._decoder.decode(self._encoder.encode(message)))

    def shutdown(self) -> None:
        self.send(ShutDown())
        self._thread.join()

    def _run(self) -> None:
        encoder, decoder = MessageEncoder(), MessageDecoder[FromCore](FromCore)

        def send(message: FromCore) -> None:
            self._on_message(decoder.decode(encoder.encode(message)))

        try:
            core = EngineCore(self._config, make_executor(self._config))
            send(Ready([core.kv_cache_info]))
            EngineCoreLoop(core, self._inbox, send).run()
            reason = "the engine was shut down"
        except Exception as error:
            reason = f"the engine has failed: {error}"
        send(EngineFailed(EngineDeadError.__name__, reason))
