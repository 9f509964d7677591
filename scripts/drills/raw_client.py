"""A client that costs as little as can be: bytes on plain sockets. What it measures is the server, not itself.

As a program it asks again and again until its standard input ends: python -m scripts.drills.raw_client HOST PORT PATH
PAUSE_S. It prints a line after the first answer, and in the end how long each took, in milliseconds.
"""

import gc
import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

_LENGTH, _SERVER_MS = b"\r\ncontent-length: ", b"\r\nopenai-processing-ms: "
_WAIT_S = 600.0


class Answer(NamedTuple):
    status: int
    server_ms: float  # by the server's clock
    client_ms: float  # from writing the request to reading the last byte


class Burst(NamedTuple):
    answers: list[Answer]
    sent_ms: float  # from the first request's first byte to the last one's last
    all_ms: float  # from there to the last answer


def request_bytes(method: str, path: str, host: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), _WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def burst(connections: Sequence[socket.socket], request: bytes) -> Burst:
    """Writes the same small request on all connections, then reads all answers as they come."""
    places = {connection.fileno(): index for index, connection in enumerate(connections)}
    poll = select.epoll()
    for fileno in places:
        poll.register(fileno, select.EPOLLIN)
    received = [bytearray() for _ in connections]
    sent_s, read_s = [0.0] * len(connections), [0.0] * len(connections)
    gc.disable()
    for index, connection in enumerate(connections):
        sent_s[index] = time.perf_counter()
        connection.sendall(request)
    end_s = time.perf_counter()
    num_left = len(connections)
    while num_left:
        ready = poll.poll(_WAIT_S)
        assert ready, "no answer"
        for fileno, _ in ready:
            index = places[fileno]
            data = connections[index].recv(1 << 16)
            assert data, "the server has closed the connection"
            received[index] += data
            if _is_whole(received[index]):
                read_s[index] = time.perf_counter()
                num_left -= 1
    gc.enable()
    poll.close()
    times_ms = [1000 * (read - sent) for sent, read in zip(sent_s, read_s, strict=True)]
    answers = [_parsed(data, time_ms) for data, time_ms in zip(received, times_ms, strict=True)]
    return Burst(answers, 1000 * (end_s - sent_s[0]), 1000 * (max(read_s) - sent_s[0]))


def ask(connection: socket.socket, request: bytes) -> Answer:
    """Writes one request and waits for its answer."""
    return burst([connection], request).answers[0]


def _is_whole(data: bytearray) -> bool:
    head_len = data.find(b"\r\n\r\n")
    return head_len >= 0 and len(data) - head_len - 4 >= int(_field(data[:head_len], _LENGTH))


def _field(head: bytearray, name: bytes) -> bytes:
    return bytes(head.lower().partition(name)[2].partition(b"\r\n")[0])


def _parsed(data: bytearray, client_ms: float) -> Answer:
    head = data[: data.find(b"\r\n\r\n")]
    return Answer(int(head[9:12]), float(_field(head, _SERVER_MS)), client_ms)


def main() -> int:
    host, port, path, pause_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    connection, request = connect(host, port), request_bytes("GET", path, host)
    times_ms = [ask(connection, request).client_ms]
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        answer = ask(connection, request)
        assert answer.status == 200, answer
        times_ms.append(answer.client_ms)
    print(json.dumps(times_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
