"""Rings: order, contents, every reader, the way for large messages, and what a writer or reader waits for."""

import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from jaxllm.executor.shm_broadcast import AlarmError, Patience, RingReader, RingShape, RingWriter, make_memory
from tests.fakes.ring_peer import send_to_readers

_PATIENCE_S = 300.0


class Ring(NamedTuple):
    writer: RingWriter
    readers: list[RingReader]
    fds: list[int]
    channels: list[socket.socket]


@pytest.fixture
def ring() -> Iterator[Ring]:
    """Two readers, three chunks of 256 bytes, both ends here."""
    shape = RingShape(2, 3, 256)
    memory = make_memory(shape.num_bytes)
    pipes = [os.pipe(), os.pipe()]
    pairs = [socket.socketpair(), socket.socketpair()]
    readers = [RingReader(memory, shape, index, pipes[index][0], pairs[index][0]) for index in range(2)]
    writer = RingWriter(memory, shape, [pipe[1] for pipe in pipes], [pair[1] for pair in pairs])
    fds = [memory, *(fd for pipe in pipes for fd in pipe)]
    yield Ring(writer, readers, fds, [one for pair in pairs for one in pair])
    for fd in fds:
        os.close(fd)
    for pair in pairs:
        for one in pair:
            one.close()


def test_every_reader_gets_every_message_in_order(ring: Ring) -> None:
    sent = [[b"first"], [b"", b"two", b"frames"], [b"x" * 200]]
    for frames in sent:
        ring.writer.write(frames, Patience(0))
    for reader in ring.readers:
        assert [reader.read(Patience(0)) for _ in sent] == sent


def test_a_full_ring_waits_for_the_slowest_reader(ring: Ring) -> None:
    for number in range(3):
        ring.writer.write([bytes([number])], Patience(0))
        assert ring.readers[0].read(Patience(0)) == [bytes([number])]
    with pytest.raises(TimeoutError, match="nothing came within 0.01 s"):
        ring.writer.write([b"too much"], Patience(0.01))
    assert ring.readers[1].read(Patience(0)) == [b"\0"]
    ring.writer.write([b"now"], Patience(0))
    assert [ring.readers[1].read(Patience(0)) for _ in range(3)] == [[b"\1"], [b"\2"], [b"now"]]
    assert ring.readers[0].read(Patience(0)) == [b"now"]


def test_larger_messages_than_a_chunk_come_between_the_others(ring: Ring) -> None:
    large = [b"head", random.Random(0).randbytes(3 << 20), b""]
    results: dict[int, list[list[bytes]]] = {}

    def read(index: int) -> None:
        frames = [ring.readers[index].read(Patience(_PATIENCE_S)) for _ in range(3)]
        results[index] = [[bytes(frame) for frame in one] for one in frames]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for message in ([b"before"], large, [b"after"]):
        ring.writer.write(message, Patience(_PATIENCE_S))
    for thread in threads:
        thread.join()
    assert results == {0: [[b"before"], large, [b"after"]], 1: [[b"before"], large, [b"after"]]}


def test_the_size_that_just_fits_goes_inline(ring: Ring) -> None:
    header = 5 + 8  # way and number of frames, one size
    for size in (256 - header, 256 - header + 1):
        ring.writer.write([b"y" * size], Patience(0))
        arrives_by_socket = bool(select.select([ring.channels[0]], [], [], 0)[0])
        assert arrives_by_socket == (size + header > 256)
        assert [reader.read(Patience(0)) for reader in ring.readers] == [[b"y" * size]] * 2


def test_the_alarm_ends_waiting_and_news_come_before_it(ring: Ring) -> None:
    alarm, switch = os.pipe()
    os.write(switch, b"\0")
    with pytest.raises(AlarmError):
        ring.readers[0].read(Patience(alarm=alarm))
    ring.writer.write([b"news"], Patience(alarm=alarm))
    assert ring.readers[0].read(Patience(alarm=alarm)) == [b"news"]
    for _ in range(2):
        ring.writer.write([b"more"], Patience(alarm=alarm))
    with pytest.raises(AlarmError):  # full, since nobody reads on
        ring.writer.write([b"even more"], Patience(alarm=alarm))
    os.close(alarm)
    os.close(switch)


def test_the_other_ends_death_shows(ring: Ring) -> None:
    _, bell, our_bell, second_bell, _ = ring.fds
    os.close(our_bell)
    ring.fds.remove(our_bell)
    with pytest.raises(EOFError):
        ring.readers[0].read(Patience())
    os.close(second_bell)
    ring.fds.remove(second_bell)
    with pytest.raises(OSError):
        ring.writer.write([b"to nobody"], Patience(0))


@pytest.mark.parametrize("shape", [(0, 10, 100), (1, 0, 100), (1, 10, 63)])
def test_a_ring_without_room_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a ring needs readers"):
        RingShape(*shape)


def test_twenty_thousand_messages_between_processes() -> None:
    assert send_to_readers(num_readers=2, num_messages=20_000) > 0  # the readers themselves look at what comes
