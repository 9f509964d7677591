"""Shared-memory rings between processes of one machine: one writer, N readers, every message to all of them, in order.

    memory     [written flag, one read flag a reader] a chunk; then the chunks
    bells      one pipe a reader: a byte a message. A reader sleeps in the kernel until its bell rings
    sockets    one a reader: a message that doesn't fit into a chunk takes this way; its chunk says so

Memory, pipes and sockets have no names: children inherit their descriptors, and whoever is killed leaves nothing.
Order of the flags. Writer: written = 0, contents, read flags = 0, written = 1. Reader: contents, own read flag = 1.
A chunk is free once everybody has read it. Knows frames of bytes, not what they mean.
"""

import mmap
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

Frame = bytes | bytearray | memoryview

_INLINE, _BY_SOCKET = 0, 1
_HEADER = struct.Struct("<BI")  # which way, number of frames; then the size of each
_MIN_NAP_S, _MAX_NAP_S = 50e-6, 0.01  # how often a writer looks whether the slowest reader has come
# Taking a lock is a full memory barrier on every processor; Python has no other.
_BARRIER = threading.Lock()


class RingShape(msgspec.Struct, frozen=True):
    """A ring's measures. Memory is taken from the system only as it is written."""

    num_readers: int
    num_chunks: int = 10
    chunk_bytes: int = 10 << 20

    def __post_init__(self) -> None:
        if min(self.num_readers, self.num_chunks) < 1 or self.chunk_bytes < 64:
            raise ValueError(f"a ring needs readers, chunks, and 64 bytes a chunk, got {self}")

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * (1 + self.num_readers + self.chunk_bytes)


class AlarmError(Exception):
    """What was waited for won't come: somebody has raised the alarm."""


class Patience:
    """How long a call may wait, and what ends it early.

    Args:
      timeout_s: Seconds from now; None waits for ever.
      alarm: A descriptor that becomes readable when waiting makes no sense any more.
    """

    def __init__(self, timeout_s: float | None = None, alarm: int | None = None) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._alarm = alarm

    def wait(self, fds: Sequence[int], event: int = select.POLLIN, at_most_s: float | None = None) -> list[int]:
        """Returns which descriptors are ready, or [] after at_most_s.

        Raises:
          AlarmError: The alarm was raised, and nothing was ready.
          TimeoutError: The time is over.
        """
        poll = select.poll()
        for fd in fds:
            poll.register(fd, event)
        if self._alarm is not None:
            poll.register(self._alarm, select.POLLIN)
        left_s = self._left_s()
        is_short = at_most_s is not None and (left_s is None or at_most_s < left_s)
        wait_s = at_most_s if is_short else left_s
        ready = [fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)]
        others = [fd for fd in ready if fd != self._alarm]
        if ready and not others:
            raise AlarmError
        if not ready and not is_short:
            raise TimeoutError(f"nothing came within {self._timeout_s:g} s")
        return others

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())


def make_memory(num_bytes: int) -> int:
    """Returns the descriptor of shared memory without a name."""
    if sys.platform == "linux":
        fd = os.memfd_create("jaxllm-ring")
    else:
        with tempfile.TemporaryFile() as file:  # has no name either
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


class RingWriter:
    """The one end that writes. For one thread at a time.

    Args:
      memory: Shared memory of shape.num_bytes, all zero.
      shape: Of the ring.
      bells: The writing end of each reader's bell.
      sockets: Each reader's socket.
    """

    def __init__(self, memory: int, shape: RingShape, bells: Sequence[int], sockets: Sequence[socket.socket]) -> None:
        self._map = _Map(memory, shape)
        self._bells = bells
        self._sockets = sockets
        self._chunk = 0
        for one in sockets:
            one.setblocking(False)

    def write(self, frames: Sequence[Frame], patience: Patience) -> None:
        """Hands one message to every reader; waits while the ring is full, and for large messages until all have it.

        Raises:
          AlarmError, TimeoutError: As `patience` says.
          ConnectionError: A reader has gone.
        """
        sizes = [memoryview(frame).nbytes for frame in frames]
        header_bytes = _HEADER.size + 8 * len(sizes)
        way = _INLINE if header_bytes + sum(sizes) <= self._map.shape.chunk_bytes else _BY_SOCKET
        if header_bytes > self._map.shape.chunk_bytes:
            raise ValueError(f"{len(frames)} frames are more than a chunk can list")
        flags, chunk = self._map.flags(self._chunk), self._map.chunk(self._chunk)
        self._wait_until_free(flags, patience)
        flags[0] = 0
        _HEADER.pack_into(chunk, 0, way, len(sizes))
        struct.pack_into(f"<{len(sizes)}Q", chunk, _HEADER.size, *sizes)
        if way == _INLINE:
            start = header_bytes
            for frame, size in zip(frames, sizes, strict=True):
                chunk[start : start + size] = memoryview(frame).cast("B")
                start += size
        flags[1:] = bytes(self._map.shape.num_readers)
        with _BARRIER:
            flags[0] = 1
        self._chunk = (self._chunk + 1) % self._map.shape.num_chunks
        for bell in self._bells:
            os.write(bell, b"\0")
        if way == _BY_SOCKET:
            _send_to_all(self._sockets, frames, patience)

    def _wait_until_free(self, flags: memoryview, patience: Patience) -> None:
        nap_s = _MIN_NAP_S
        while flags[0] and not all(flags[1:]):
            patience.wait([], at_most_s=nap_s)
            nap_s = min(2 * nap_s, _MAX_NAP_S)
        with _BARRIER:
            pass


class RingReader:
    """One reading end. For one thread at a time.

    Args:
      memory: The writer's memory.
      shape: Of the ring.
      index: Which of the readers this is.
      bell: The reading end of its bell.
      channel: Its socket.
    """

    def __init__(self, memory: int, shape: RingShape, index: int, bell: int, channel: socket.socket) -> None:
        self._map = _Map(memory, shape)
        self._index = index
        self._bell = bell
        self._socket = channel
        self._chunk = 0
        channel.setblocking(False)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while a message waits, and when the writer has gone."""
        return self._bell

    def read(self, patience: Patience) -> list[Frame]:
        """Returns the next message, for which it waits.

        Raises:
          AlarmError, TimeoutError: As `patience` says.
          EOFError: The writer has gone.
        """
        patience.wait([self._bell])
        if not os.read(self._bell, 1):
            raise EOFError("the writer has gone")
        flags, chunk = self._map.flags(self._chunk), self._map.chunk(self._chunk)
        with _BARRIER:
            assert flags[0] and not flags[1 + self._index], "the bell rang for a chunk that isn't there"
        way, num_frames = _HEADER.unpack_from(chunk)
        sizes = struct.unpack_from(f"<{num_frames}Q", chunk, _HEADER.size)
        frames: list[Frame] = []
        if way == _INLINE:
            start = _HEADER.size + 8 * num_frames
            for size in sizes:
                frames.append(bytes(chunk[start : start + size]))
                start += size
        with _BARRIER:
            flags[1 + self._index] = 1
        self._chunk = (self._chunk + 1) % self._map.shape.num_chunks
        if way == _BY_SOCKET:
            frames += [self._receive(size, patience) for size in sizes]
        return frames

    def _receive(self, size: int, patience: Patience) -> Frame:
        frame = bytearray(size)
        view = memoryview(frame)
        while view:
            patience.wait([self._socket.fileno()])
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the writer has gone")
            view = view[count:]
        return frame


class _Map:
    """The ring's memory, mapped."""

    def __init__(self, memory: int, shape: RingShape) -> None:
        self.shape = shape
        self._view = memoryview(mmap.mmap(memory, shape.num_bytes))

    def flags(self, chunk: int) -> memoryview:
        """Returns a chunk's written flag, and its read flags."""
        width = 1 + self.shape.num_readers
        return self._view[chunk * width : (chunk + 1) * width]

    def chunk(self, chunk: int) -> memoryview:
        start = self.shape.num_chunks * (1 + self.shape.num_readers) + chunk * self.shape.chunk_bytes
        return self._view[start : start + self.shape.chunk_bytes]


def _send_to_all(sockets: Sequence[socket.socket], frames: Sequence[Frame], patience: Patience) -> None:
    """Sends the frames through each socket; a slow one doesn't hold up the others."""
    unsent = {one.fileno(): (one, deque(memoryview(frame).cast("B") for frame in frames)) for one in sockets}
    while unsent:
        for fd in patience.wait(list(unsent), select.POLLOUT):
            one, views = unsent[fd]
            while views and not views[0]:
                views.popleft()
            if views:
                views[0] = views[0][one.send(views[0]) :]
            else:
                del unsent[fd]
