"""A plain socket pair: `sendall` at one side, `recv_into` at the other, one byte when all came."""

import os
import socket
import struct

from measure import ROOM, measure

HEAD = struct.Struct("<cQQ")


def serve(sock: socket.socket) -> None:
    memory = memoryview(bytearray(os.urandom(4096) * (ROOM // 4096)))
    while head := sock.recv(HEAD.size, socket.MSG_WAITALL):
        op, size, n_blocks = HEAD.unpack(head)
        for index in range(n_blocks):
            block = memory[index * size : (index + 1) * size]
            if op == b"r":
                sock.sendall(block)
            else:
                fill(sock, block)
        if op == b"w":
            sock.sendall(b"!")


def fill(sock: socket.socket, block: memoryview) -> None:
    n_received = 0
    while n_received < len(block):
        n_received += sock.recv_into(block[n_received:], 0, socket.MSG_WAITALL)


server = socket.create_server(("127.0.0.1", 0))
pid = os.fork()
if pid == 0:
    with socket.create_connection(server.getsockname()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(connection)
    os._exit(0)
sock = server.accept()[0]
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
memory = memoryview(bytearray(os.urandom(4096) * (ROOM // 4096)))


def move(op: str, size: int, n_blocks: int) -> None:
    sock.sendall(HEAD.pack(op[:1].encode(), size, n_blocks))
    for index in range(n_blocks):
        block = memory[index * size : (index + 1) * size]
        if op == "write":
            sock.sendall(block)
        else:
            fill(sock, block)
    if op == "write":
        sock.recv(1)


measure(move, [pid])
sock.close()
os.waitpid(pid, 0)
