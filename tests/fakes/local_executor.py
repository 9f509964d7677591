"""LocalExecutor: what executors have in common that are their own only worker, and can't lose it."""

from typing import Any

from jaxllm.executor.executor import Executor, FailureCallback


class LocalExecutor(Executor):
    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        return [getattr(self, method)(*args)]

    def check_health(self) -> None:
        pass

    def register_failure_callback(self, callback: FailureCallback) -> None:
        pass
