"""Where requests to generate stand before they are worked on: all who come at once are looked at first. Reads nothing.

Thousands may come in one turn of the event loop. Those whom the queue has no room for are told so within that turn;
the others begin a few a turn, so that whoever comes meanwhile needn't wait for all of them.
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
        self._num_begun = 0  # in this turn
        self._outside: deque[asyncio.Future[None]] = deque()
        self._has_pump = False

    @property
    def is_full(self) -> bool:
        """Whether nobody would be let in now, if all who are here already are."""
        return self._admission.is_full(self._num_expected + self._num_outside)

    def expect(self) -> None:
        """Counts a request, until its task has begun: call it just before the task is made."""
        if not self._num_expected:
            asyncio.get_running_loop().call_soon(self._forget)  # runs before that task does, and after all were counted
        self._num_expected += 1

    async def enter(self) -> None:
        """Returns when a request may begin: at once, unless many have begun in this turn. First come, first served."""
        self._need_pump()
        if self._num_begun < _A_TURN and not self._outside:
            self._num_begun += 1
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

    def _need_pump(self) -> None:
        if not self._has_pump:
            self._has_pump = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Begins a turn."""
        self._has_pump = False
        self._num_begun = 0
        while self._outside and self._num_begun < _A_TURN:
            turn = self._outside.popleft()
            if not turn.done():  # its client has gone
                turn.set_result(None)
                self._num_begun += 1
        if self._outside:
            self._need_pump()
