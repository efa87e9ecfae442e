"""Measure what encryption of TCP costs: `python -m benchmarks.transfer.encryption`.

One engine moves blocks to and from a process on the same host, in the clear and encrypted, in
turns. Both know a cluster key. Printed are the best speeds of all rounds, as other load can only
lower them, their ratio (encrypted : clear), and the median processor time of this process.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess
from halfmoon_transfer import ClusterKey, Op, Piece, TransferEngine, TransferSettings

_KEY = ClusterKey("only good for a benchmark")
_MIB = 1024 * 1024
OPS: tuple[Op, ...] = ("write", "read")
#: Bytes of a transfer: as many blocks as fit, or one.
_TRANSFER_BYTES = 16 * _MIB


def main() -> None:
    """Print a line per implementation, operation and size of blocks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.encryption")
    parser.add_argument("--sizes", default="262144,1048576,16777216", help="bytes per block")
    parser.add_argument("--seconds", type=float, default=0.15, help="per round")
    parser.add_argument("--rounds", type=int, default=13)
    chosen = parser.parse_args()
    for native in (True, False):
        for size in map(int, chosen.sizes.split(",")):
            measure(native, size, chosen.seconds, chosen.rounds)


def measure(native: bool, size: int, seconds: float, rounds: int) -> None:
    """Measure both modes in turns, with one size of blocks."""
    with ExitStack() as stack:
        clear, encrypted = (
            stack.enter_context(
                TransferEnds(
                    size, TransferSettings(native=native, cluster_key=_KEY, encryption=encryption)
                )
            )
            for encryption in (False, True)
        )
        for op in OPS:
            figures: dict[TransferEnds, list[tuple[float, float]]] = {clear: [], encrypted: []}
            for _ in range(rounds):
                for ends, measured in figures.items():
                    measured.append(ends.measure(op, seconds))
            speed, encrypted_speed = (
                max(speed for speed, _ in measured) for measured in figures.values()
            )
            cpu, encrypted_cpu = (
                statistics.median(cpu for _, cpu in measured) for measured in figures.values()
            )
            print(
                f"{'native' if native else 'Python':6} {op:5} {size / 1024:6.0f} KiB: "
                f"{speed:5.2f} GB/s clear, {encrypted_speed:5.2f} encrypted, "
                f"{encrypted_speed / speed:.2f} : 1; CPU {cpu:5.2f} and {encrypted_cpu:5.2f} s/GB",
                flush=True,
            )


class TransferEnds(ExitStack):
    """An engine here and a process that it moves blocks to and from, over TCP."""

    def __init__(self, size: int, settings: TransferSettings) -> None:
        super().__init__()
        metadata = MemoryStore()
        n_blocks = max(1, _TRANSFER_BYTES // size)
        there = self.enter_context(
            SegmentProcess("there", 1, "tcp", n_blocks * size, metadata, settings)
        )
        self._here = self.enter_context(
            TransferEngine.open("here", metadata=metadata, backends=("tcp",), settings=settings)
        )
        local = self._here.allocate(n_blocks * size).region
        # In another order there, so that blocks can't be merged.
        self._pieces = [
            Piece(local, index * size, there.region, (n_blocks - 1 - index) * size, size)
            for index in range(n_blocks)
        ]
        self._n_bytes = n_blocks * size
        for op in OPS:
            self._move(op)

    def _move(self, op: Op) -> None:
        self._here.submit(op, self._pieces).result()

    def measure(self, op: Op, seconds: float) -> tuple[float, float]:
        """Return GB per second, and processor seconds of this process per GB."""
        start, cpu, n_transfers = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds:
            self._move(op)
            n_transfers += 1
        gb = n_transfers * self._n_bytes / 1e9
        return gb / (time.perf_counter() - start), (time.process_time() - cpu) / gb


if __name__ == "__main__":
    main()
