"""How many requests may wait: whoever comes when the queue is full is turned away at once, by any server.

Counts sequences, not requests: a request for n sequences of m prompts waits as n * m. Knows no engine.
"""

from types import TracebackType

from jaxllm.exceptions import JaxllmError


class QueueFullError(JaxllmError):
    """Too many requests wait already. `retry_after_s` says when asking again may help."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdmissionControl:
    """Counts who waits for a first token and who is being answered.

    Args:
      max_queue: Most sequences that may wait for their first token; None sets no limit.

    Attributes:
      num_waiting: Sequences that wait.
      num_requests: Requests that have not ended, waiting or not.
    """

    def __init__(self, max_queue: int | None) -> None:
        self.num_waiting = 0
        self.num_requests = 0
        self._max_queue = max_queue

    def fill(self, num_more: int) -> float:
        """Returns how full the queue would be if that many more waited: 1 lets nobody in; 0 where there is no limit."""
        return 0.0 if self._max_queue is None else (self.num_waiting + num_more) / self._max_queue

    def admit(self, num_sequences: int) -> "Ticket":
        """Lets a request in. Close its ticket when it ends.

        A request that alone is larger than the queue comes in when nobody waits.

        Raises:
          QueueFullError: Too many wait.
        """
        limit = self._max_queue
        if limit is not None and self.num_waiting and self.num_waiting + num_sequences > limit:
            raise QueueFullError(f"the queue is full: {self.num_waiting} of {limit} sequences wait; ask again later")
        return Ticket(self, num_sequences)


class Ticket:
    """One admitted request. A context manager; `start` and `close` may be called again."""

    def __init__(self, control: AdmissionControl, num_sequences: int) -> None:
        self._control = control
        self._num_waiting = num_sequences
        self._is_open = True
        control.num_waiting += num_sequences
        control.num_requests += 1

    def start(self) -> None:
        """Marks the request as being answered: it waits no more."""
        self._control.num_waiting -= self._num_waiting
        self._num_waiting = 0

    def close(self) -> None:
        """Marks the request as ended."""
        self.start()
        if self._is_open:
            self._is_open = False
            self._control.num_requests -= 1

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
