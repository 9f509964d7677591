"""Where requests to generate stand before they are worked on: all who come at once are looked at first. Reads none.

Thousands may come in one turn of the event loop. Those whom the queue has no room for are told so within that turn. As
the queue fills, the others begin a few a turn, so that whoever comes meanwhile needn't wait for all of them to be told.
"""

import asyncio
from collections import deque

from jaxllm.entrypoints.admission import AdmissionControl

_A_TURN = 4  # requests of a crowd that begin in one turn; each takes half a millisecond or so
_CROWD = 1 / 8  # of the queue; below that all begin at once, which lets them share the engine's steps


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
        self._is_crowded = False
        self._has_next_turn = False

    @property
    def is_full(self) -> bool:
        """Whether nobody would be let in now, if all who are here were in the queue."""
        return self._fill >= 1

    def expect(self) -> None:
        """Counts a request, until its task has begun: call it just before the task is made."""
        self._num_expected += 1
        self._look()
        self._need_next_turn()

    async def enter(self) -> None:
        """Returns when a request may begin: at once, unless there is a crowd. First come, first served."""
        self._look()
        if not self._is_crowded:
            return
        self._need_next_turn()
        turn = asyncio.get_running_loop().create_future()
        self._outside.append(turn)
        self._num_outside += 1
        try:
            await turn
        finally:
            self._num_outside -= 1

    @property
    def _fill(self) -> float:
        return self._admission.fill(self._num_expected + self._num_outside)

    def _look(self) -> None:
        self._is_crowded = self._is_crowded or self._fill >= _CROWD

    def _need_next_turn(self) -> None:
        if not self._has_next_turn:
            self._has_next_turn = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Called after the loop has read from all connections, before the tasks run that this led to."""
        self._has_next_turn = False
        have_come, self._num_expected = self._num_expected > 0, 0
        for _ in range(min(_A_TURN, len(self._outside))):
            turn = self._outside.popleft()
            if not turn.done():  # its client has gone
                turn.set_result(None)
        # Those who have come will soon be outside, if there is a crowd.
        self._is_crowded = self._is_crowded and (have_come or bool(self._outside))
        if self._is_crowded:
            self._need_next_turn()
