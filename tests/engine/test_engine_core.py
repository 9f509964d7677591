"""EngineCore and InprocClient with a scripted model; UniProcExecutor with a worker named by a dotted name."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.engine_core_client import InprocClient
from jaxllm.exceptions import EngineDeadError, InvalidRequestError
from jaxllm.executor.uniproc_executor import UniProcExecutor
from jaxllm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    ModelRunnerOutput,
    SchedulerOutput,
    StepInfo,
)
from jaxllm.sampling_params import SamplingParams
from tests.fakes.fake_executor import FakeExecutor


def _config() -> EngineConfig:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32)
    return EngineConfig(model=model, model_path=Path("model.gguf"), cache=CacheConfig(), scheduler=scheduler)


def _request(request_id: str, prompt_token_ids: list[int], max_tokens: int = 2, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(n=n, max_tokens=max_tokens),
        eos_token_ids=[],
        arrival_time_s=0.0,
        seed=0,
        max_tokens=max_tokens,
    )


def test_requests_run_to_their_end() -> None:
    times = iter([5.0, 5.25, 6.0, 6.5])  # each step's beginning and end
    core = EngineCore(_config(), FakeExecutor(), clock=lambda: next(times))
    core.add_request(_request("a", [10], max_tokens=1))
    core.add_request(_request("b", [20], max_tokens=2))
    first, second = core.step(), core.step()
    assert [(output.request_id, output.finished) for output in first.outputs] == [("a", True), ("b", False)]
    assert [(output.request_id, output.finished) for output in second.outputs] == [("b", True)]
    assert second.outputs[0].first_scheduled_time_s == 5.0
    assert first.step == StepInfo("decode", 0.25, 2, 0, 0)  # a prompt of one token is like a decoding sequence
    assert second.step == StepInfo("decode", 0.5, 1, 0, 0)
    assert second.outputs[0].sequences[0].new_tokens[0].token_id == 22
    assert not core.has_unfinished_requests()


def test_stats_count_what_is_there() -> None:
    core = EngineCore(_config(), FakeExecutor(max_num_seqs=2))
    core.add_request(_request("a", [10, 11, 12, 13, 14], n=2, max_tokens=3))
    core.add_request(_request("b", [20]))
    core.step()
    stats = core.step().stats
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_free_blocks == 63 - 3
    assert (stats.num_copied_blocks, stats.num_preemptions) == (1, 0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (5, 0)


@pytest.mark.parametrize("is_debug", [True, False])
def test_the_books_are_checked_when_idle_in_debug_mode(is_debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_DEBUG", "1" if is_debug else "0")
    core = EngineCore(_config(), FakeExecutor())
    core.add_request(_request("a", [10], max_tokens=2))
    core.step()
    core.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)  # nobody's
    if is_debug:
        with pytest.raises(AssertionError, match="reference counts differ from owners"):
            core.step()
    else:
        core.step()


def test_a_bad_request_fails_alone() -> None:
    core = EngineCore(_config(), FakeExecutor())
    core.add_request(_request("good", [10]))
    with pytest.raises(InvalidRequestError, match="max_model_len=32"):
        core.add_request(_request("bad", list(range(32))))
    assert [output.request_id for output in core.step().outputs] == ["good"]


def test_client_passes_everything_on() -> None:
    executor = FakeExecutor()
    client = InprocClient(EngineCore(_config(), executor))
    for request_id in ("a", "b", "c"):
        client.add_request(_request(request_id, [10], n=2, max_tokens=4))
    client.get_output()
    client.abort_requests(["a", "unknown", "a"])
    client.finish_sequence("b", 0)
    seen = [(output.request_id, [seq.index for seq in output.sequences]) for output in client.get_output().outputs]
    assert seen == [("b", [1]), ("c", [0, 1])]
    assert client.reset_prefix_cache() is False
    client.abort_requests(["b", "c"])
    assert client.reset_prefix_cache() is True
    (stats,) = client.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    client.shutdown()
    assert executor.is_shut_down


class EchoWorker:
    """A worker that UniProcExecutor finds by name."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._executor = FakeExecutor()

    def initialize(self) -> KVCacheInfo:
        return self._executor.initialize()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._executor.execute_model(scheduler_output)

    def shutdown(self) -> None:
        self._executor.shutdown()


def test_uniproc_executor_runs_a_worker_by_name() -> None:
    executor = UniProcExecutor(_config(), worker_class=f"{__name__}:EchoWorker")
    core = EngineCore(_config(), executor)
    core.add_request(_request("a", [10], max_tokens=1))
    assert core.step().outputs[0].sequences[0].new_tokens[0].token_id == 11
    core.shutdown()
    core.shutdown()
    core.add_request(_request("b", [10]))
    with pytest.raises(EngineDeadError, match="the worker isn't running"):
        core.step()


def test_the_engine_core_never_imports_jax() -> None:
    modules = "jaxllm.engine.engine_core_client, jaxllm.executor.uniproc_executor"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_a_step_that_raises_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(_config(), FakeExecutor())
    client = InprocClient(core)
    client.add_request(_request("a", [10]))

    def fail() -> EngineCoreOutputs:
        raise RuntimeError("a step failed")

    monkeypatch.setattr(core, "step", fail)
    for _ in range(2):  # a second call runs no step: the first may have left anything behind
        with pytest.raises(EngineDeadError, match="a step failed"):
            client.get_output()
        monkeypatch.undo()
