"""Workers without a device, for executors that run them in processes of their own; and configurations of them.

An AlphabetWorker writes the alphabet, as AlphabetExecutor does, and can be made to misbehave by name.
"""

import dataclasses
import os
import signal
import sys
import time

import numpy as np

from jaxllm.config import EngineConfig, ParallelConfig
from jaxllm.exceptions import ConfigError, InvalidRequestError
from jaxllm.executor.executor import Executor
from jaxllm.executor.multiproc_executor import MultiprocExecutor
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput
from tests.fakes.fake_cores import AlphabetExecutor, fake_config

FAKES = "tests.fakes.fake_workers"


def rank() -> int:
    return int(os.environ["RANK"])


class AlphabetWorker(AlphabetExecutor):
    """The token that a step gives is the same on every rank."""

    def echo(self, payload: bytes) -> bytes:
        return payload

    def negated(self, array: np.ndarray) -> np.ndarray:
        return -array

    def whoami(self, prefix: str, number: int) -> tuple[str, int, int]:
        return f"{prefix}{rank()}", number + rank(), int(os.environ["WORLD_SIZE"])

    def pid(self) -> int:
        return os.getpid()

    def nap(self, seconds: float, which_rank: int) -> None:
        if which_rank in (rank(), -1):
            time.sleep(seconds)

    def fail(self, which_rank: int, kind: str) -> str:
        if rank() == which_rank:
            raise {"config": ConfigError, "request": InvalidRequestError, "value": ValueError}[kind]("so it was asked")
        return "fine"

    def kill_rank(self, which_rank: int, signal_number: int) -> None:
        if rank() == which_rank:
            os.kill(os.getpid(), signal_number)


class StepKiller(AlphabetWorker):
    """A prompt that holds "K" lets rank 1 be killed in the step, "F" be frozen, "E" raise an error."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        tokens = {token for new in scheduler_output.new_seqs for token in new.token_ids}
        if rank() == 1 and ord("K") in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank() == 1 and ord("F") in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank() == 1 and ord("E") in tokens:
            raise ValueError("rank 1 can't")
        if tokens & {ord("K"), ord("F"), ord("E")}:
            time.sleep(3600)  # as in a collective that a peer has left
        return super().execute_model(scheduler_output)


class DiesAtStart(AlphabetWorker):
    """Rank 1 ends while it loads, with some words."""

    def initialize(self) -> KVCacheInfo:
        if rank() == 1:
            sys.stderr.write("first words\nno more memory on this planet\n")
            sys.stderr.flush()
            os._exit(7)
        time.sleep(3600)
        raise AssertionError


class Unequal(AlphabetWorker):
    """Each rank allocates another number of blocks."""

    def initialize(self) -> KVCacheInfo:
        info = super().initialize()
        return KVCacheInfo(
            info.num_device_blocks + rank(), *[getattr(info, name) for name in info.__struct_fields__[1:]]
        )


def worker_config(
    executor: str = "alphabet_mp", tensor_parallel_size: int = 2, max_model_len: int = 128
) -> EngineConfig:
    config = fake_config(f"{FAKES}:{executor}", max_model_len)
    return dataclasses.replace(config, parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size))


def mp_executor(config: EngineConfig, worker: str, chunk_bytes: int = 1 << 20) -> MultiprocExecutor:
    return MultiprocExecutor(config, f"{FAKES}:{worker}", forms_job=False, chunk_bytes=chunk_bytes)


def alphabet_mp(config: EngineConfig) -> Executor:
    return mp_executor(config, "AlphabetWorker")


def step_killer_mp(config: EngineConfig) -> Executor:
    return mp_executor(config, "StepKiller")


def dies_at_start_mp(config: EngineConfig) -> Executor:
    return mp_executor(config, "DiesAtStart")
