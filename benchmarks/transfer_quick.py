"""How fast bytes move to another process on this host: `python benchmarks/transfer_quick.py`.

Each line: GB/s (median of rounds) for blocks of one size, one transfer per block waited for
before the next (single), and 64 MiB of blocks in one transfer (batched); then the median
microseconds of a 4 KiB transfer. Quote ratios taken in one run: machines are noisy.
"""

import socket
import statistics
import subprocess
import sys
import time

import numpy as np

from halfmoon_metadata.memory import MemoryStore
from halfmoon_transfer import Op, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.testing import SegmentProcess

KIB, MIB = 1024, 1024 * 1024
ROOM = 64 * MIB
ROUNDS = 7


def gbps(engine: TransferEngine, op: Op, pieces: list[list[Piece]]) -> float:
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for batch in pieces:
            engine.submit(op, batch).result()
        seconds = time.perf_counter() - started
        n_bytes = sum(piece.length for batch in pieces for piece in batch)
        rates.append(n_bytes / seconds / 1e9)
    return statistics.median(rates)


def plain_copy() -> float:
    """One copy of 16 MiB in memory, in GB/s."""
    source, target = np.ones(16 * MIB, np.uint8), np.ones(16 * MIB, np.uint8)
    rates = []
    for _ in range(4 * ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        rates.append(16 * MIB / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)


SINK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    into = memoryview(bytearray(1 << 20))
    while sock.recv_into(into, 0, socket.MSG_WAITALL):
        pass
"""


def plain_sockets() -> float:
    """One stream of 1 MiB sends to another process, in GB/s."""
    rates = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen([sys.executable, "-c", SINK, str(server.getsockname()[1])])
        with server.accept()[0] as sock:
            data = bytes(MIB)
            for _ in range(ROUNDS):
                started = time.perf_counter()
                for _ in range(64):
                    sock.sendall(data)
                rates.append(ROOM / (time.perf_counter() - started) / 1e9)
        child.wait()
    return statistics.median(rates)


def run(label: str, backend: str, settings: TransferSettings) -> None:
    store = MemoryStore()
    with (
        TransferEngine.open("here", metadata=store, backends=(backend,), settings=settings) as here,
        SegmentProcess("there", 1, backend, ROOM, store) as there,
    ):
        local = here.allocate(ROOM)
        local.view[:] = bytes(ROOM)

        def piece(start: int, size: int) -> Piece:
            # Blocks in another order at the far side: they can't be merged into one run.
            return Piece(local.region, start, there.region, ROOM - start - size, size)

        here.submit("read", [piece(0, ROOM)]).result()
        for op in ("write", "read"):
            for size in (64 * KIB, MIB, 16 * MIB):
                blocks = [piece(start, size) for start in range(0, ROOM, size)]
                single = gbps(here, op, [[block] for block in blocks])
                batched = gbps(here, op, [blocks])
                print(
                    f"{label:18} {op:5} {size // KIB:6} KiB   "
                    f"single {single:5.2f}   batched {batched:5.2f} GB/s",
                    flush=True,
                )
            small = []
            for _ in range(1000):
                started = time.perf_counter()
                here.submit(op, [piece(0, 4 * KIB)]).result()
                small.append(time.perf_counter() - started)
            print(f"{label:18} {op:5}      4 KiB   {statistics.median(small) * 1e6:.0f} µs")


if __name__ == "__main__":
    print(f"plain copy {plain_copy():.2f} GB/s, plain sockets {plain_sockets():.2f} GB/s")
    run("shm", "shm", TransferSettings())
    run("tcp", "tcp", TransferSettings())
    run("tcp, no checksums", "tcp", TransferSettings(checksums=False))
