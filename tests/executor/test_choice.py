"""Which executor is chosen, and what is refused before anything is loaded."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig, ParallelConfig
from jaxllm.engine.data_parallel_link import connect_core
from jaxllm.engine.engine_core_client import InprocClient
from jaxllm.engine.llm_engine import make_client
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError
from jaxllm.executor import choice
from jaxllm.executor.choice import choose_backend
from jaxllm.executor.external_launcher import ExecutorWithExternalLauncher, LauncherEnvironment
from jaxllm.executor.ranks import output_rank
from jaxllm.model_loader.checkpoint import open_checkpoint
from tests.fakes.fake_workers import worker_config
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("tp", "asked", "address", "num_devices", "backend"),
    [
        (1, None, None, 1, "uni"),
        (4, None, None, 1, "uni"),  # the worker says that there are too few, and what to do
        (4, None, "head:6379", 4, "uni"),
        (4, None, "head:6379", 2, "ray"),
        (1, None, "head:6379", 0, "uni"),
        (2, "mp", "head:6379", 1, "mp"),
        (1, "external_launcher", None, 1, "external_launcher"),
    ],
)
def test_the_choice(
    tp: int, asked: str | None, address: str | None, num_devices: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(choice, "_count_local_devices", lambda: num_devices)
    monkeypatch.setattr(choice, "_is_installed", lambda name: name == "ray")
    parallel = ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend=asked)
    assert choose_backend(parallel) == backend


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"needs Ray, which isn't installed; pip install 'jaxllm\[ray\]'"):
        choose_backend(ParallelConfig(distributed_executor_backend="ray"))


@pytest.mark.parametrize(
    ("platforms", "has_chips", "is_refused"),
    [("", True, True), ("tpu,cpu", True, True), ("cpu", True, False), ("", False, False)],
)
def test_a_tpu_host_has_one_process(
    platforms: str, has_chips: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(choice, "_TPU_DEVICES", (f"{tmp_path}/{'accel' if has_chips else 'vfio'}[0-9]*",))
    monkeypatch.setattr(choice, "_is_installed", lambda name: True)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    parallel = ParallelConfig(distributed_executor_backend="mp")
    if is_refused:
        with pytest.raises(ConfigError, match="TPU chips of a host belong to one process; leave it out"):
            choose_backend(parallel)
    else:
        assert choose_backend(parallel) == "mp"


def test_the_configuration_names_the_executor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_folder(tmp_path, tiny_llama())))
    configs = {
        backend: EngineArgs(distributed_executor_backend=backend).create_engine_config(checkpoint)
        for backend in (None, "mp", "external_launcher")
    }
    assert {backend: config.executor_class.split(":")[1] for backend, config in configs.items()} == {
        None: "UniProcExecutor",
        "mp": "MultiprocExecutor",
        "external_launcher": "ExecutorWithExternalLauncher",
    }
    assert configs["external_launcher"].seed == 0 and configs["mp"].seed is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"MASTER_ADDR": ""}, "needs the launcher's RANK, .*, MASTER_ADDR isn't set; start every rank with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, got 'two'"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE, got 2 and 2"),
    ],
)
def test_the_launcher_must_say_who_is_who(change: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LauncherEnvironment.read({**LAUNCHER, **change})


def test_what_the_launcher_says() -> None:
    assert LauncherEnvironment.read(LAUNCHER) == LauncherEnvironment(1, 2, 0, "node0:29500")


def _launched(**changes: Any) -> EngineConfig:
    config = dataclasses.replace(worker_config(), seed=0)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (_launched(parallel=ParallelConfig(tensor_parallel_size=3)), "multiple of WORLD_SIZE=2, got 3 x 1"),
        (
            _launched(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)),
            "data_parallel_size must be 1",
        ),
        (
            _launched(scheduler=dataclasses.replace(worker_config().scheduler, scheduler_delay_factor=0.5)),
            "every rank must schedule alike: scheduler_delay_factor measures time and must be 0, got 0.5",
        ),
        (_launched(seed=None), "need the same one everywhere; set --seed"),
    ],
)
def test_what_would_let_ranks_differ_is_refused(
    config: EngineConfig, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        ExecutorWithExternalLauncher(config)


def test_a_core_of_its_own_is_not_for_launched_ranks() -> None:
    parallel = ParallelConfig(distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="external_launcher is for LLM and generate"):
        connect_core(dataclasses.replace(worker_config(), parallel=parallel), lambda message: None)


def test_an_llm_of_a_launched_rank_has_its_core_here() -> None:
    parallel = ParallelConfig(distributed_executor_backend="external_launcher")
    config = dataclasses.replace(
        worker_config(), parallel=parallel, executor_class="tests.fakes.fake_cores:AlphabetExecutor"
    )
    assert isinstance(make_client(config, "mp"), InprocClient)


@pytest.mark.parametrize(
    ("tp", "pp", "num_workers", "rank"),
    [(1, 1, 1, 0), (4, 1, 4, 0), (2, 2, 4, 2), (4, 2, 2, 1), (4, 2, 1, 0), (2, 3, 3, 2)],
)
def test_the_last_stages_first_worker_speaks(tp: int, pp: int, num_workers: int, rank: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert output_rank(parallel, num_workers) == rank
