"""Where requests to generate stand before they are worked on: all who come at once are looked at first. Reads nothing.

Thousands may come in one turn of the event loop. Those whom the queue has no room for are told so within that turn, and
from then on the others begin a few a turn, so that whoever comes meanwhile needn't wait for all of them to be told.
"""

import asyncio
from collections import deque

from jaxllm.entrypoints.admission import AdmissionControl

_A_TURN = 8  # requests that begin in one turn; each takes half a millisecond or so


class Door:
    """Counts whom AdmissionControl doesn't know yet. Use it from one event loop.

    Args:
      admission: Has the last word on who may wait.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._num_expected = 0  # have a task that begins later in this turn
        self._num_outside = 0  # wait in `enter`
        self._outside: deque[asyncio.Future[None]] = deque()
        self._is_crowded = False  # somebody was turned away, and `_begin_some` comes

    def turns_away(self) -> bool:
        """Whether whoever comes now must be turned away: the queue would be full if all who are here were in it."""
        if not self._admission.is_full(self._num_expected + self._num_outside):
            return False
        if not self._is_crowded:
            self._is_crowded = True
            asyncio.get_running_loop().call_soon(self._begin_some)
        return True

    def expect(self) -> None:
        """Counts a request, until its task has begun: call it just before the task is made."""
        if not self._num_expected:
            asyncio.get_running_loop().call_soon(self._forget)  # runs before that task does, and after all were counted
        self._num_expected += 1

    async def enter(self) -> None:
        """Returns when a request may begin: at once, unless there is a crowd. First come, first served."""
        if not self._is_crowded:
            return
        turn = asyncio.get_running_loop().create_future()
        self._outside.append(turn)
        self._num_outside += 1
        try:
            await turn
        finally:
            self._num_outside -= 1

    def _forget(self) -> None:
        self._num_expected = 0

    def _begin_some(self) -> None:
        """Called once a turn while there is a crowd."""
        for _ in range(min(_A_TURN, len(self._outside))):
            turn = self._outside.popleft()
            if not turn.done():  # its client has gone
                turn.set_result(None)
        self._is_crowded = bool(self._outside)
        if self._is_crowded:
            asyncio.get_running_loop().call_soon(self._begin_some)
