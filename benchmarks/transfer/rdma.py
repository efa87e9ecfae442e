"""Compare the RDMA backend with perftest in one run: `python -m benchmarks.transfer.rdma`.

Over one rail, between two processes of this machine, in rounds that take turns: `ib_write_bw`
and `ib_read_bw` (one queue pair, queue depth 128, their defaults), and our engine (requests of
128 blocks, one after the other). `make bench-rdma` runs it in a virtual machine with software
devices: its processor is emulated, so nothing but the ratios says anything.
"""

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess
from halfmoon_transfer import Piece, TransferEngine, TransferSettings
from halfmoon_transfer.interface import Op

KIB, MIB = 1024, 1024 * 1024
ROOM = 32 * MIB
#: Blocks in one request; and perftest's queue depth.
N_BLOCKS = 128
OPS: tuple[Op, ...] = ("write", "read")
PATIENCE_S = 120.0


class Perftest:
    """One end serves in the background, the other measures."""

    def __init__(self, ours: str, theirs: str, address: str, port: int = 18515) -> None:
        self._ours, self._theirs, self._address, self._port = ours, theirs, address, port

    def gb_per_s(self, op: Op, size: int, n_blocks: int) -> float:
        """Moves so many blocks."""
        tool = f"ib_{op}_bw"
        common = ["-F", "-s", str(size), "-n", str(n_blocks), "-p", str(self._port)]
        common += ["-x", "1"]
        server = subprocess.Popen(
            [tool, "-d", self._theirs, *common],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while True:
                client = subprocess.run(
                    [tool, "-d", self._ours, *common, self._address],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    check=False,
                )
                # The server is there when it accepts.
                if "Couldn't connect" not in client.stdout + client.stderr:
                    break
                if server.poll() is not None:
                    raise RuntimeError(f"{tool} -d {self._theirs} ended with {server.returncode}")
                time.sleep(0.05)
            server.wait(PATIENCE_S)
        finally:
            server.kill()
            server.wait()
        # The columns: bytes, iterations, peak, average, messages.
        row = re.search(rf"^ *{size} +\d+ +([\d.]+) +([\d.]+)", client.stdout, re.MULTILINE)
        if row is None:
            raise RuntimeError(f"{tool} did not run: {client.stdout}{client.stderr}")
        return float(row[2]) * MIB / 1e9


def ours_gb_per_s(
    engine: TransferEngine, op: Op, pieces: list[Piece], size: int, n_blocks: int
) -> float:
    """Moves about so many blocks of ours."""
    n_requests = max(1, n_blocks // len(pieces))
    started = time.perf_counter()
    for _ in range(n_requests):
        engine.transfer(op, pieces)
    seconds = time.perf_counter() - started
    return n_requests * len(pieces) * size / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.rdma")
    parser.add_argument("--ours", default="rxa0", help="the device at this end")
    parser.add_argument("--theirs", default="rxb0", help="the device at the other end")
    parser.add_argument("--address", default="10.10.0.2", help="of the other end's interface")
    parser.add_argument("--sizes", default=f"{64 * KIB}", help="bytes of a block, at most 256 KiB")
    parser.add_argument("--blocks", type=int, default=1024, help="per figure and round")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    missing = [tool for tool in ("ib_write_bw", "ib_read_bw") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"no {', '.join(missing)}: they come with perftest")
    sizes = [int(size) for size in chosen.sizes.split(",")]
    peer = Perftest(chosen.ours, chosen.theirs, chosen.address)
    metadata = MemoryStore()
    there_settings = TransferSettings(rdma_devices=(chosen.theirs,))
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}; medians of {chosen.rounds} rounds\n\n"
        "| MB/s | block | perftest | ours | ratio |\n|---|---|---|---|---|",
        flush=True,
    )
    with (
        TransferEngine.open(
            "here",
            metadata=metadata,
            backends=("rdma",),
            settings=TransferSettings(rdma_devices=(chosen.ours,)),
        ) as engine,
        SegmentProcess("there", 1, "rdma", ROOM, metadata, there_settings) as there,
    ):
        local = engine.allocate(ROOM)
        for size in sizes:
            # The other way round at the far end, so that no two blocks become one slice.
            pieces = [
                Piece(local.region, at * size, there.region, ROOM - (at + 1) * size, size)
                for at in range(min(N_BLOCKS, ROOM // size))
            ]
            for op in OPS:
                engine.transfer(op, pieces)
                rates: list[tuple[float, float]] = []
                for _ in range(chosen.rounds):
                    theirs = peer.gb_per_s(op, size, chosen.blocks)
                    rates.append((theirs, ours_gb_per_s(engine, op, pieces, size, chosen.blocks)))
                    print(f"{op} {rates[-1]}", file=sys.stderr, flush=True)
                theirs, ours = (statistics.median(each) for each in zip(*rates, strict=True))
                print(
                    f"| {op} | {size // KIB} KiB | {theirs * 1000:.0f} | {ours * 1000:.0f} "
                    f"| {ours / theirs:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
