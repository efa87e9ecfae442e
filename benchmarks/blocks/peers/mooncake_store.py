"""The reference's store over TCP: its master, an owner of memory, and a client that has none."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from clock import CAPACITY, ROOM, batch_of, measure
from mooncake.store import MooncakeDistributedStore

PORT = 28_000 + os.getpid() % 1000


def open_store(master: str, n_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", n_bytes, 64 << 20, "tcp", "", master) == 0
    return store


if sys.argv[1] == "owner":
    store = open_store(sys.argv[2], CAPACITY)
    print("READY", flush=True)
    sys.stdin.read()
    os._exit(0)

quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
flags = ["-rpc_port", PORT, "-metrics_port", PORT + 1000, "-rpc_address", "127.0.0.1"]
binary = Path(sys.executable).with_name("mooncake_master")
master = subprocess.Popen([binary, *map(str, flags)], **quiet)
owner = None
try:
    time.sleep(1.0)
    address = f"127.0.0.1:{PORT}"
    owner = subprocess.Popen(
        [sys.executable, __file__, "owner", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    while not (line := owner.stdout.readline()).startswith("READY"):
        assert line, "the owner of memory ended"
    store = open_store(address, 0)
    memory = np.ones(ROOM, np.uint8)
    memory[:] = np.arange(ROOM, dtype=np.uint32).view(np.uint8)[:ROOM]
    assert store.register_buffer(memory.ctypes.data, ROOM) == 0
    there: set[str] = set()

    def put(keys: list[str], size: int) -> float:
        for key in keys:
            if key in there:
                assert store.remove(key, True) == 0
        here = [memory.ctypes.data + index * size for index in range(len(keys))]
        started = time.perf_counter()
        if len(keys) == 1:
            codes = [store.put_from(keys[0], here[0], size)]
        else:
            codes = store.batch_put_from(keys, here, [size] * len(keys))
        seconds = time.perf_counter() - started
        assert not any(codes), codes
        there.update(keys)
        return seconds

    def run(op: str, size: int, n_blocks: int) -> float:
        keys = [f"{size}/{index}" for index in range(n_blocks)]
        if op == "put":
            return put(keys, size)
        for index in range(batch_of(size)):
            if f"{size}/{index}" not in there:
                put([f"{size}/{index}"], size)
        here = [memory.ctypes.data + index * size for index in range(n_blocks)]
        started = time.perf_counter()
        if op == "get" and n_blocks == 1:
            found = [store.get_into(keys[0], here[0], size) == size]
        elif op == "get":
            found = [n == size for n in store.batch_get_into(keys, here, [size] * n_blocks)]
        elif n_blocks == 1:
            found = [store.is_exist(keys[0]) == 1]
        else:
            found = [n == 1 for n in store.batch_is_exist(keys)]
        seconds = time.perf_counter() - started
        assert all(found), "a block is missing"
        return seconds

    measure(run)
finally:
    for process in (owner, master):
        if process is not None:
            process.kill()
            process.wait()
    os._exit(0)
