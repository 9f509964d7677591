"""Which worker speaks for all, and what all must agree on."""

from collections.abc import Sequence

import msgspec

from jaxllm.config import ParallelConfig
from jaxllm.exceptions import ConfigError
from jaxllm.messages import KVCacheInfo


def output_rank(parallel: ParallelConfig, num_workers: int) -> int:
    """Returns the worker that has the first device of the last pipeline stage: a step's results end there first."""
    first_device = parallel.tensor_parallel_size * (parallel.pipeline_parallel_size - 1)
    return first_device // (parallel.world_size // num_workers)


def same_everywhere(infos: Sequence[KVCacheInfo]) -> KVCacheInfo:
    """Returns what every worker has allocated.

    Raises:
      ConfigError: They have allocated different KV caches, so that one scheduler can't serve all.
    """
    # Each worker compiles the programs of its own stages.
    kinds = {msgspec.structs.astuple(msgspec.structs.replace(info, num_warmup_compiles=0)) for info in infos}
    if len(kinds) > 1:
        counts = ", ".join(str(info.num_device_blocks) for info in infos)
        raise ConfigError(
            f"every worker must have the same KV cache, got {counts} blocks; set --num-gpu-blocks-override"
        )
    return infos[0]
