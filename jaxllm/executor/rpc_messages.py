"""What travels between an executor and its workers: a call to all of them, and each one's answers.

A message is a head, which is one of these types, and a body in frames of its own: a call's arguments, a reply's value.
The body's types are those of the method's annotations, so nothing is decoded that nobody expects. As in messages.py:
encoded as arrays, fields are appended with defaults.
"""

import msgspec

from jaxllm.config import EngineConfig


class RpcCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Run this method. With an output_rank only that worker replies; the others, if they fail."""

    call_id: int
    method: str
    output_rank: int | None = None


class RpcHello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="hello"):
    """The worker's process is up and waits for calls."""


class RpcProgress(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="progress"):
    """How far a call has come that takes long; see jaxllm.progress."""

    phase: str
    percent: float | None
    eta_s: float | None


class RpcReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="reply"):
    """The call's value is in the body; or it failed, and there is no body.

    `error` is the name of one of our exceptions, as exceptions.from_name understands it.
    """

    call_id: int
    error: str | None = None
    message: str = ""


FromWorker = RpcHello | RpcProgress | RpcReply


class StartWorker(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every worker is made from.

    coordinator: "host:port" of the jax.distributed job that the workers form; None where they form none.
    num_local_devices: Devices that each worker drives.
    first_device: Of its machine's devices the first that worker 0 there may use.
    """

    config: EngineConfig
    worker_class: str
    coordinator: str | None
    num_local_devices: int = 1
    first_device: int = 0
