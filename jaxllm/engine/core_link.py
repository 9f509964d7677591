"""CoreLink: a line to an EngineCore that runs somewhere else. The clients know this much of it, and no more."""

from collections.abc import Callable
from typing import Protocol

from jaxllm.config import EngineConfig
from jaxllm.engine.core_messages import FromCore, ToCore

OnMessage = Callable[[FromCore], None]


class CoreLink(Protocol):
    """The core's messages come from a thread of the link's. EngineFailed always comes, and is the last one."""

    def send(self, message: ToCore) -> None:
        """Sends without waiting. Does nothing once the core has gone.

        Raises:
          TypeError, ValueError, OverflowError: The message can't be encoded.
        """

    def shutdown(self) -> None:
        """Ends the core and waits until it has gone, a few seconds at most. Idempotent."""


# Starts a core: its configuration, and where its messages go.
Connect = Callable[[EngineConfig, OnMessage], CoreLink]
