"""Signs of life: a core says each second how long it has stood still, so that a frozen one is told from a busy one.

The core's side is PulseThread, which watches the busy loop and sends Pulses. The front end's side is SilenceWatch, for
a process that sends nothing any more. Both count looks, not time: if the whole machine stands still, nobody is blamed.
Knows neither queues nor sockets.
"""

import faulthandler
import signal
import threading
from collections.abc import Callable
from typing import Literal, Protocol

from jaxllm.engine.core_messages import Pulse
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

LOOK_S = 1.0
STALLED_S = 10.0  # a standstill this long: others should send their requests elsewhere
HOPELESS_S = 30.0  # and this long: a restart would help
# A device may take its time: steps end by themselves, and a step that computes takes processor time. One that waits
# this long for its device, taking none, begins to count as a standstill.
DEVICE_GRACE_S = 300.0
# Lets the core's process print the stacks of all its threads though one holds all others up. Not for threads that run:
# it reads what they change, and may crash.
STACKS_SIGNAL = signal.SIGUSR1
_STANDARD_ERROR = 2
_LIVING_TICKS = 3  # of a hundredth of a second: more than the other threads take while the loop stands still

LoopState = Literal["waiting", "working", "on device"]


class Watched(Protocol):
    """A busy loop, as seen from another thread."""

    num_turns: int  # counts up with every step, and with whatever else it has done

    @property
    def state(self) -> LoopState:
        """Whether it waits for work, works, or waits for a step's results."""


class LoopWatch:
    """Counts for how long a loop that isn't idle has not come on. Call `look` every LOOK_S seconds.

    Args:
      loop: What is watched.
      ticks: Returns the processor time of this process so far, in hundredths of a second.
    """

    def __init__(self, loop: Watched, ticks: Callable[[], int]) -> None:
        self._loop = loop
        self._ticks = ticks
        self._last = (-1, "")
        self._last_ticks = 0
        self._num_silent = 0

    def look(self) -> float:
        """Returns for how many seconds the loop has stood still, 0 while it doesn't."""
        state = self._loop.state
        now, ticks = (self._loop.num_turns, state), self._ticks()
        is_computing = state == "on device" and ticks - self._last_ticks >= _LIVING_TICKS
        self._last_ticks = ticks
        if state == "waiting" or now != self._last or is_computing:
            self._last, self._num_silent = now, 0
            return 0.0
        self._num_silent += 1
        silent_s = self._num_silent * LOOK_S
        return max(0.0, silent_s - DEVICE_GRACE_S) if state == "on device" else silent_s


class SilenceWatch:
    """Counts for how long another process has given no sign of life. Call `look` after LOOK_S seconds without one.

    Args:
      ticks: Returns that process's processor time so far.
    """

    def __init__(self, ticks: Callable[[], int]) -> None:
        self._ticks = ticks
        self._last_ticks = -_LIVING_TICKS
        self._num_silent = 0

    def heard(self) -> None:
        """Takes note of a message."""
        self._num_silent = 0

    def look(self) -> float:
        """Returns for how many seconds the process has been silent, 0 if it has at least taken processor time.

        A little doesn't count: threads that wait for the interpreter take some.
        """
        ticks = self._ticks()
        self._num_silent = self._num_silent + 1 if ticks - self._last_ticks < _LIVING_TICKS else 0
        self._last_ticks = ticks
        return self._num_silent * LOOK_S


class PulseThread:
    """Sends a Pulse every LOOK_S seconds, from __enter__ to __exit__. A standstill is logged once, with all stacks.

    Args:
      watch: Of the loop.
      send: Takes the pulses, on this thread.
    """

    def __init__(self, watch: LoopWatch, send: Callable[[Pulse], None]) -> None:
        self._watch = watch
        self._send = send
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        """Returns once no further pulse can come."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        is_told = False
        while not self._is_over.wait(LOOK_S):
            silent_s = self._watch.look()
            self._send(Pulse(silent_s))
            if silent_s >= STALLED_S and not is_told:
                _logger.error("the engine's loop has stood still for %g s; all threads:", silent_s)
                faulthandler.dump_traceback(_STANDARD_ERROR)
            is_told = silent_s >= STALLED_S
