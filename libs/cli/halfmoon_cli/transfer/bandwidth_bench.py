"""Measure how fast bytes move to another process, for `halfmoon transfer bench`.

The target is a process with one region, started here or (`bench_target`) on another host; the
initiator is this process, or several threads of it. Blocks lie in another order at the far
side, so that they can't be merged.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from halfmoon_cli.transfer.bandwidth_target import find_target_region
from halfmoon_cli.transfer.target_process import run_target
from halfmoon_metadata import MetadataStore
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer import (
    ClusterKey,
    Op,
    Piece,
    TransferEngine,
    TransferSettings,
    encryption_from_environment,
)

_ROUNDS = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TransferLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks to move, and by which backend."""

    backend: str = "tcp"
    op: Op = "write"
    block_bytes: int = 64 * 1024
    #: Blocks in one transfer.
    batch: int = 128
    #: Threads, each with one transfer at a time.
    threads: int = 1
    seconds: float = 3.0
    checksums: bool = True
    #: Whether copies in memory are compared, too.
    verify: bool = False

    @property
    def lane_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.block_bytes * self.batch

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that each side needs."""
        return self.lane_bytes * self.threads


class BandwidthFigures(msgspec.Struct, frozen=True):
    """Measured figures; medians of rounds."""

    gb_per_s: float
    #: Microseconds of one transfer of a whole batch.
    p50_us: float
    p99_us: float
    #: CPU seconds of both processes if the target was started here, else of this one.
    cpu_s_per_gb: float


def run_bandwidth_bench(load: TransferLoad) -> BandwidthFigures:
    """Start a target, move blocks for a while, stop it.

    Raises:
        TransferError: a transfer failed.
        ValueError: there is no such backend.
    """
    store = MemoryStore()
    with (
        _initiator(load, store) as engine,
        run_target(store, backend=load.backend, n_bytes=load.n_bytes) as target,
    ):
        return _measure(engine, target.region, load, lambda: _cpu_s(target.pid))


def run_bandwidth_bench_against(
    load: TransferLoad,
    store: MetadataStore,
    target: str,
    *,
    bind: str = "127.0.0.1",
    advertise: str = "",
) -> BandwidthFigures:
    """Move blocks to or from a target on another host.

    Args:
        load: what to move.
        store: where the target has written its record.
        target: its name.
        bind: address to listen at.
        advertise: what the target would dial to reach us; empty: what is bound.

    Raises:
        TransferError: a transfer failed.
        ValueError: there is no such backend or target, or its region is too small.
        MetadataError: the store can't.
        OSError: nothing can listen there.
    """
    region = find_target_region(store, target)
    if region.length < load.n_bytes:
        raise ValueError(
            f"target {target} has {region.length} bytes and {load.n_bytes} are needed for "
            f"{load.threads} threads with {load.batch} blocks of {load.block_bytes} bytes: give "
            "it a larger --size-mib"
        )
    key = ClusterKey.from_environment()
    with _initiator(load, store, bind=bind, advertise=advertise, key=key) as engine:
        return _measure(engine, region, load, time.process_time)


def _initiator(
    load: TransferLoad,
    store: MetadataStore,
    *,
    bind: str = "127.0.0.1",
    advertise: str = "",
    key: ClusterKey | None = None,
) -> TransferEngine:
    return TransferEngine.open(
        f"bench-initiator-{os.getpid()}-{os.urandom(3).hex()}",
        metadata=store,
        backends=(load.backend,),
        bind=bind,
        advertise=advertise or None,
        settings=TransferSettings(
            checksums=load.checksums, cluster_key=key, encryption=encryption_from_environment()
        ),
    )


def _measure(
    engine: TransferEngine, remote: Region, load: TransferLoad, cpu_s: Callable[[], float]
) -> BandwidthFigures:
    lane_bytes, room = load.lane_bytes, load.n_bytes
    local = engine.allocate(room)
    local.view[:] = bytes(room)
    batches = [
        [
            Piece(
                local.region,
                lane * lane_bytes + index * load.block_bytes,
                remote,
                room - lane * lane_bytes - (index + 1) * load.block_bytes,
                load.block_bytes,
            )
            for index in range(load.batch)
        ]
        for lane in range(load.threads)
    ]
    for pieces in batches:
        engine.transfer(load.op, pieces, verify=load.verify)
    rates, costs, times = [], [], []
    for _ in range(_ROUNDS):
        cpu, started = cpu_s(), time.perf_counter()
        found = _round(engine, load, batches)
        seconds = time.perf_counter() - started
        n_gb = len(found) * lane_bytes / 1e9
        rates.append(n_gb / seconds)
        costs.append((cpu_s() - cpu) / n_gb)
        times.extend(found)
    times.sort()
    return BandwidthFigures(
        statistics.median(rates),
        statistics.median(times) * 1e6,
        times[int(len(times) * 0.99)] * 1e6,
        statistics.median(costs),
    )


def _round(engine: TransferEngine, load: TransferLoad, batches: list[list[Piece]]) -> list[float]:
    """Transfer blocks for one round, and return the seconds of each transfer."""
    until = time.perf_counter() + load.seconds / _ROUNDS
    found: list[float] = []
    errors: list[Exception] = []

    def lane(pieces: list[Piece]) -> None:
        try:
            while True:
                started = time.perf_counter()
                engine.transfer(load.op, pieces, verify=load.verify)
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
    """Return the processor seconds of this process and the target so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
