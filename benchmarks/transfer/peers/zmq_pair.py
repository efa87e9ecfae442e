"""pyzmq: a PAIR over TCP, frames sent without a copy, received and copied into place."""

import os

import zmq
from measure import ROOM, measure

PORT = 28_000 + os.getpid() % 1000
memory = memoryview(bytearray(os.urandom(4096) * (ROOM // 4096)))


def give(sock: zmq.Socket, size: int, n_blocks: int) -> None:
    for index in range(n_blocks):
        sock.send(memory[index * size : (index + 1) * size], copy=False)


def take(sock: zmq.Socket, size: int, n_blocks: int) -> None:
    for index in range(n_blocks):
        memory[index * size : (index + 1) * size] = sock.recv(copy=False).buffer


pid = os.fork()
if pid == 0:
    sock = zmq.Context().socket(zmq.PAIR)
    sock.bind(f"tcp://127.0.0.1:{PORT}")
    while (order := sock.recv_json()) is not None:
        op, size, n_blocks = order
        if op == "write":
            take(sock, size, n_blocks)
            sock.send(b"!")
        else:
            give(sock, size, n_blocks)
    os._exit(0)

sock = zmq.Context().socket(zmq.PAIR)
sock.connect(f"tcp://127.0.0.1:{PORT}")


def move(op: str, size: int, n_blocks: int) -> None:
    sock.send_json([op, size, n_blocks])
    if op == "write":
        give(sock, size, n_blocks)
        sock.recv()
    else:
        take(sock, size, n_blocks)


measure(move, [pid])
sock.send_json(None)
os.waitpid(pid, 0)
os._exit(0)
