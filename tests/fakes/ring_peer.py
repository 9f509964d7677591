"""Both ends of a ring in processes of their own, with messages whose contents both can tell by their number.

`python -m tests.fakes.ring_peer HANDLES` is a reader: it checks every message, and says at the end how many it had.
"""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jaxllm.executor.shm_broadcast import Frame, Patience, RingReader, RingShape, RingWriter, make_memory

ROOT = Path(__file__).parents[2]
_NOISE = random.Random(0).randbytes(1 << 20)
_PATIENCE_S = 600.0


class _Handles(msgspec.Struct):
    shape: RingShape
    index: int
    memory: int
    bell: int
    channel: int
    num_messages: int
    seed: int
    pauses: bool


def messages(num_messages: int, seed: int, chunk_bytes: int) -> Iterator[list[Frame]]:
    """Yields messages of random sizes, up to a little more than a chunk holds; the first frame is the number."""
    rng = random.Random(seed)
    for number in range(num_messages):
        sizes = [rng.choice((rng.randrange(64), rng.randrange(chunk_bytes))) for _ in range(rng.randrange(3))]
        if not rng.randrange(1000):
            sizes.append(chunk_bytes + rng.randrange(100_000))
        start = rng.randrange(1 << 16)
        yield [number.to_bytes(8, "little"), *(_NOISE[start : start + size] for size in sizes)]


def send_to_readers(
    num_readers: int, num_messages: int, seed: int = 0, num_chunks: int = 10, chunk_bytes: int = 4096
) -> float:
    """Sends messages to reader processes, the last of which is slow now and then. Returns the seconds it took.

    Raises:
      AssertionError: A reader had something else, or in another order.
    """
    shape = RingShape(num_readers, num_chunks, chunk_bytes)
    memory = make_memory(shape.num_bytes)
    bells, channels, readers = [], [], []
    for index in range(num_readers):
        bell, our_bell = os.pipe()
        channel, our_channel = socket.socketpair()
        bells.append(our_bell)
        channels.append(our_channel)
        is_last = index == num_readers - 1
        handles = _Handles(shape, index, memory, bell, channel.fileno(), num_messages, seed, is_last)
        command = [sys.executable, "-m", "tests.fakes.ring_peer", msgspec.json.encode(handles).decode()]
        readers.append(subprocess.Popen(command, cwd=ROOT, pass_fds=(memory, bell, channel.fileno())))
        os.close(bell)
        channel.close()
    writer = RingWriter(memory, shape, bells, channels)
    start_s = time.monotonic()
    for frames in messages(num_messages, seed, chunk_bytes):
        writer.write(frames, Patience(_PATIENCE_S))
    codes = [reader.wait(_PATIENCE_S) for reader in readers]
    assert codes == [0] * num_readers, codes
    for fd in (memory, *bells):
        os.close(fd)
    for our_channel in channels:
        our_channel.close()
    return time.monotonic() - start_s


def main(argument: str) -> int:
    handles = msgspec.json.decode(argument, type=_Handles)
    channel = socket.socket(fileno=handles.channel)
    reader = RingReader(handles.memory, handles.shape, handles.index, handles.bell, channel)
    rng = random.Random(handles.index)
    for expected in messages(handles.num_messages, handles.seed, handles.shape.chunk_bytes):
        frames = reader.read(Patience(_PATIENCE_S))
        assert frames == expected, (frames[0], expected[0])
        if handles.pauses and not rng.randrange(2000):
            time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
