"""What travels between a front end and an EngineCore that runs elsewhere. `ToCore` goes in, `FromCore` comes out.

As in messages.py: encoded as arrays, fields are appended with defaults. Each type is told apart by its tag.
`engine_index` says which of several data parallel replicas a message goes to or comes from.
"""

from typing import Literal

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, KVCacheInfo, SchedulerStats

UtilityMethod = Literal["reset_prefix_cache", "get_stats"]
UtilityValue = bool | list[SchedulerStats]  # get_stats: of each engine core, in order


class StartEngine(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="start"):
    """The answer to Hello: load this."""

    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="add"):
    request: EngineCoreRequest
    engine_index: int = 0


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="abort"):
    request_ids: list[str]
    engine_index: int = 0


class FinishSequence(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="finish"):
    request_id: str
    index: int
    engine_index: int = 0


class UtilityCall(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="call"):
    """A question that is answered between two steps, by a UtilityResult of the same call_id."""

    call_id: int
    method: UtilityMethod
    engine_index: int = 0


class ShutDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="shutdown"):
    """Stop after the step that runs. Unfinished requests get no further output."""


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="hello"):
    """The core's process is up, and waits for StartEngine."""

    pid: int


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="progress"):
    """How far loading has come. None where nobody knows."""

    phase: str  # what is being done, such as "loading weights"
    percent: float | None = None  # of this phase
    eta_s: float | None = None  # to the end of this phase
    engine_index: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="ready"):
    """The model is loaded; here are each engine core's block counts and limits, in order."""

    kv_cache_infos: list[KVCacheInfo]
    engine_index: int = 0


class Pulse(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="pulse"):
    """A core's sign of life, every second from Ready on; where it gives none, its link sends one in its place."""

    silent_s: float  # for how long it has stood still, though there is work
    engine_index: int = 0


class UtilityResult(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="result"):
    call_id: int
    value: UtilityValue
    engine_index: int = 0


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="failed"):
    """The core's last word: it could not start, it failed, or its process has gone.

    `error` is the name of one of our exceptions, as exceptions.from_name understands it.
    """

    error: str
    message: str
    engine_index: int = 0


ToReplica = AddRequest | AbortRequests | FinishSequence | UtilityCall
ToCore = StartEngine | ToReplica | ShutDown
FromCore = Hello | LoadProgress | Ready | Pulse | EngineCoreOutputs | UtilityResult | EngineFailed
