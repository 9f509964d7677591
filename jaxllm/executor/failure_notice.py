"""FailureNotice: tells whoever has asked that the workers have failed. Once, whichever comes first."""

import threading

from jaxllm.executor.executor import FailureCallback


class FailureNotice:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[FailureCallback] = []
        self._reason: str | None = None

    def register(self, callback: FailureCallback) -> None:
        """Has `callback` called when tell() is; at once if it was already."""
        with self._lock:
            self._callbacks.append(callback)
            reason = self._reason
        if reason is not None:
            callback(reason)

    def tell(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(reason)
