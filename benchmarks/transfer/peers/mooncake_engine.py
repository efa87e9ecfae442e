"""The reference's engine over TCP, its own Python binding at both sides."""

import os
import subprocess
import sys

import numpy as np
from measure import ROOM, measure
from mooncake.engine import TransferEngine

os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")


def open_engine() -> tuple[TransferEngine, np.ndarray]:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.ones(ROOM, np.uint8)
    assert engine.register_memory(memory.ctypes.data, ROOM) == 0
    return engine, memory


if sys.argv[1] == "target":
    engine, memory = open_engine()
    print("TARGET", engine.get_rpc_port(), memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)

child = subprocess.Popen(
    [sys.executable, __file__, "target"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
)
while not (line := child.stdout.readline()).startswith("TARGET"):
    assert line, "the target ended"
_, port, address = line.split()
peer, remote = f"127.0.0.1:{port}", int(address)
engine, memory = open_engine()
local = memory.ctypes.data


def move(op: str, size: int, n_blocks: int) -> None:
    if n_blocks == 1:
        one = engine.transfer_sync_write if op == "write" else engine.transfer_sync_read
        status = one(peer, local, remote, size)
    else:
        many = (
            engine.batch_transfer_sync_write if op == "write" else engine.batch_transfer_sync_read
        )
        here = [local + index * size for index in range(n_blocks)]
        there = [remote + ROOM - (index + 1) * size for index in range(n_blocks)]
        status = many(peer, here, there, [size] * n_blocks)
    if status != 0:
        raise RuntimeError(f"status {status}")


measure(move, [child.pid])
child.stdin.close()
child.wait()
os._exit(0)
