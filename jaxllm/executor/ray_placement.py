"""How many workers a Ray cluster gets, and what each of them holds. Knows the nodes' resources as Ray tells them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxllm.config import ParallelConfig
from jaxllm.exceptions import ConfigError

_ACCELERATORS = ("TPU", "GPU")


class Placement(NamedTuple):
    """Equal workers."""

    num_workers: int
    resource: str  # what Ray calls a device
    num_local_devices: int  # of each worker
    is_spread: bool  # one worker a host


def place_workers(parallel: ParallelConfig, nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Returns one worker a host with all its accelerators, as few hosts as do; without any, one a CPU.

    Args:
      parallel: Of one replica.
      nodes: Each living node's resources.

    Raises:
      ConfigError: There are too few devices, or they can't be dealt evenly to hosts.
    """
    world_size = parallel.world_size
    sizes = f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}"
    way_out = "set --tensor-parallel-size and --pipeline-parallel-size"
    resource = next((name for name in _ACCELERATORS if any(node.get(name) for node in nodes)), None)
    if resource is None:
        num_cpus = int(sum(node.get("CPU", 0) for node in nodes))
        if world_size > num_cpus:
            raise ConfigError(
                f"tensor_parallel_size x pipeline_parallel_size must be at most {num_cpus}, the CPUs of the Ray "
                f"cluster, got {sizes}; {way_out}"
            )
        return Placement(world_size, "CPU", 1, is_spread=False)
    counts = sorted((int(node.get(resource, 0)) for node in nodes), reverse=True)
    if world_size <= counts[0]:
        return Placement(1, resource, world_size, is_spread=True)
    for per_host in range(counts[0], 0, -1):
        num_hosts = sum(count >= per_host for count in counts)
        if not world_size % per_host and world_size // per_host <= num_hosts:
            return Placement(world_size // per_host, resource, per_host, is_spread=True)
    raise ConfigError(
        f"tensor_parallel_size x pipeline_parallel_size must be dealt evenly to the {sum(counts)} {resource}s of the "
        f"Ray cluster's {len([count for count in counts if count])} hosts, got {sizes}; {way_out}"
    )
