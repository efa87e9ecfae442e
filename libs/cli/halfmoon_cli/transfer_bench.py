"""`halfmoon transfer bench`: how fast bytes move to another process on this host.

The target is a process of its own with one region; the initiator is this one, or several
threads of it. Blocks lie in another order at the far side, so that they can't be merged.
"""

import os
import statistics
import threading
import time
from pathlib import Path

import msgspec

from halfmoon_metadata.memory import MemoryStore
from halfmoon_transfer import Op, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.testing import SegmentProcess

_ROUNDS = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to move."""

    backend: str = "tcp"
    op: Op = "write"
    block_bytes: int = 64 * 1024
    #: Blocks in one transfer.
    batch: int = 128
    #: Threads that each have one transfer going.
    threads: int = 1
    seconds: float = 3.0
    checksums: bool = True


class Figures(msgspec.Struct, frozen=True):
    """What came out; medians of rounds."""

    gb_per_s: float
    #: Microseconds of one transfer of a whole batch.
    p50_us: float
    p99_us: float
    #: Of both processes together.
    cpu_s_per_gb: float


def run_bench(load: Load) -> Figures:
    """Start a target, move blocks for a while, stop it.

    Raises:
        TransferError: a transfer failed.
        ValueError: there is no such backend.
    """
    store = MemoryStore()
    lane_bytes = load.block_bytes * load.batch
    room = lane_bytes * load.threads
    settings = TransferSettings(checksums=load.checksums)
    with (
        TransferEngine.open(
            "bench-initiator", metadata=store, backends=(load.backend,), settings=settings
        ) as engine,
        SegmentProcess("bench-target", 1, load.backend, room, store) as target,
    ):
        local = engine.allocate(room)
        local.view[:] = bytes(room)
        batches = [
            [
                Piece(
                    local.region,
                    lane * lane_bytes + index * load.block_bytes,
                    target.region,
                    room - lane * lane_bytes - (index + 1) * load.block_bytes,
                    load.block_bytes,
                )
                for index in range(load.batch)
            ]
            for lane in range(load.threads)
        ]
        for pieces in batches:
            engine.transfer(load.op, pieces)
        rates, costs, times = [], [], []
        for _ in range(_ROUNDS):
            cpu, started = _cpu_s(target.pid), time.perf_counter()
            found = _round(engine, load, batches)
            seconds = time.perf_counter() - started
            n_gb = len(found) * lane_bytes / 1e9
            rates.append(n_gb / seconds)
            costs.append((_cpu_s(target.pid) - cpu) / n_gb)
            times.extend(found)
    times.sort()
    return Figures(
        statistics.median(rates),
        statistics.median(times) * 1e6,
        times[int(len(times) * 0.99)] * 1e6,
        statistics.median(costs),
    )


def _round(engine: TransferEngine, load: Load, batches: list[list[Piece]]) -> list[float]:
    """Seconds of each transfer that was made in one round."""
    until = time.perf_counter() + load.seconds / _ROUNDS
    found: list[float] = []
    errors: list[Exception] = []

    def lane(pieces: list[Piece]) -> None:
        try:
            while True:
                started = time.perf_counter()
                engine.transfer(load.op, pieces)
                now = time.perf_counter()
                found.append(now - started)
                if now >= until:
                    return
        except Exception as error:
            errors.append(error)

    if len(batches) == 1:
        lane(batches[0])
    else:
        threads = [threading.Thread(target=lane, args=(pieces,)) for pieces in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found


def _cpu_s(pid: int) -> float:
    """Processor seconds that we and the target have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
