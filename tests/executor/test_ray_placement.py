"""Where a Ray cluster's workers go."""

import pytest

from jaxllm.config import ParallelConfig
from jaxllm.exceptions import ConfigError
from jaxllm.executor.ray_placement import Placement, place_workers

TPU_HOSTS = [{"CPU": 8.0, "TPU": 4.0}] * 4
MIXED_GPU_HOSTS = [{"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}]


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "placement"),
    [
        (4, 1, TPU_HOSTS, Placement(1, "TPU", 4, True)),
        (8, 1, TPU_HOSTS, Placement(2, "TPU", 4, True)),
        (8, 2, TPU_HOSTS, Placement(4, "TPU", 4, True)),
        (6, 1, TPU_HOSTS, Placement(2, "TPU", 3, True)),
        (2, 1, TPU_HOSTS, Placement(1, "TPU", 2, True)),
        (8, 1, MIXED_GPU_HOSTS, Placement(1, "GPU", 8, True)),
        (2, 2, [{"CPU": 3.0}, {"CPU": 1.0}], Placement(4, "CPU", 1, False)),
    ],
)
def test_as_few_hosts_as_hold_it_evenly(tp: int, pp: int, nodes: list[dict[str, float]], placement: Placement) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert place_workers(parallel, nodes) == placement


@pytest.mark.parametrize(
    ("tp", "nodes", "says"),
    [
        (5, [{"CPU": 4.0}], "must be at most 4, the CPUs of the Ray cluster, got 5 x 1"),
        (32, TPU_HOSTS, "dealt evenly to the 16 TPUs of the Ray cluster's 4 hosts, got 32 x 1"),
        (10, MIXED_GPU_HOSTS, "dealt evenly to the 10 GPUs of the Ray cluster's 2 hosts, got 10 x 1"),
    ],
)
def test_what_does_not_fit_is_refused(tp: int, nodes: list[dict[str, float]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place_workers(ParallelConfig(tensor_parallel_size=tp), nodes)
