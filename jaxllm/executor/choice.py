"""Which executor a configuration gets."""

from jaxllm.config import ParallelConfig

EXECUTOR_CLASSES = {
    "uni": "jaxllm.executor.uniproc_executor:UniProcExecutor",
    "mp": "jaxllm.executor.multiproc_executor:MultiprocExecutor",
}


def choose_backend(parallel: ParallelConfig) -> str:
    """Returns the backend that was asked for; else "uni", whose one process drives all local devices."""
    return parallel.distributed_executor_backend or "uni"
