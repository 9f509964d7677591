"""What an executor with worker processes adds to a step, over one whose worker is in this process.

The worker computes nothing and has no device, so that what is left is the way there and back.
"""

import importlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from jaxllm.bench.host import HostLoop
from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from jaxllm.executor.choice import EXECUTOR_CLASSES, choose_backend
from jaxllm.executor.executor import Executor
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SampledToken, SchedulerOutput

NUM_WORKERS = 2
_WORKER = "jaxllm.bench.executor_cost:NoWorker"


@dataclass(frozen=True, kw_only=True)
class ExecutorTimes:
    """Microseconds that one execute_model takes."""

    num_seqs: int
    uni: float
    other: float
    added: float  # other - uni


class NoWorker:
    """Draws token 1 for every sequence of a step."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def initialize(self) -> KVCacheInfo:
        scheduler = self._config.scheduler
        return KVCacheInfo(2, 16, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput({seq_id: [SampledToken(1)] for seq_id in scheduler_output.num_scheduled_tokens}, {})

    def shutdown(self) -> None:
        pass


def measure(backend: str, num_seqs: int, num_steps: int) -> ExecutorTimes:
    """Returns the medians of num_steps decode steps, taken in turns.

    Raises:
      ConfigError: The backend isn't installed.
    """
    uni, other = _start("uni", 1), _start(backend, NUM_WORKERS)
    try:
        loop = HostLoop(num_seqs)
        loop.run_to_decode()
        times = []
        for _ in range(num_steps):
            step, _ = loop.step()
            times.append((_time(uni, step), _time(other, step)))
    finally:
        other.shutdown()
    uni_us, other_us = (statistics.median(column) / 1000 for column in zip(*times, strict=True))
    return ExecutorTimes(num_seqs=num_seqs, uni=uni_us, other=other_us, added=other_us - uni_us)


def _time(executor: Executor, step: SchedulerOutput) -> int:
    start_ns = time.perf_counter_ns()
    executor.execute_model(step)
    return time.perf_counter_ns() - start_ns


def _start(backend: str, num_workers: int) -> Executor:
    parallel = ParallelConfig(tensor_parallel_size=num_workers, distributed_executor_backend=backend)
    module_name, class_name = EXECUTOR_CLASSES[choose_backend(parallel)].split(":")
    make = vars(importlib.import_module(module_name))[class_name]
    no_job = {} if backend == "uni" else {"forms_job": False}
    executor: Executor = make(_config(parallel), _WORKER, **no_job)
    executor.initialize()
    return executor


def _config(parallel: ParallelConfig) -> EngineConfig:
    """Returns a configuration that nobody reads but for its sizes."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=2,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        max_position_embeddings=1,
    )
    scheduler = SchedulerConfig(max_model_len=1)
    return EngineConfig(model=model, model_path=Path(), cache=CacheConfig(), scheduler=scheduler, parallel=parallel)
