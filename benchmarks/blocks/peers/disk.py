"""Our disk tier as a node uses it, and a bare file past the page cache (O_DIRECT), in turns.

Both move blocks at random places, 8 at a time, in threads; ours makes or verifies checksums and
writes headers, too. In turns, because a disk that others share is faster now and slower then.
"""

import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from clock import ROOM, batch_of

from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_scheduling.tiers.tier_commands import Promote, WriteBack

#: Bytes that are written and read.
FILE_BYTES = 2 * ROOM


class BareFile:
    """Blocks one after the other."""

    label = "O_DIRECT, 8 threads"

    def __init__(self, folder: Path, size: int, pool: ThreadPoolExecutor, memory: memoryview):
        self.size, self.pool, self.memory = size, pool, memory
        self.fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, FILE_BYTES)
        for start in range(0, FILE_BYTES, size):
            os.pwritev(self.fd, [memory[:size]], start)

    def prepare(self, op: str, slots: list[int]) -> Callable[[], None]:
        move = os.pwritev if op == "put" else os.preadv
        views = [self.memory[i * self.size : (i + 1) * self.size] for i in range(len(slots))]

        def one(slot: int, view: memoryview) -> None:
            assert move(self.fd, [view], slot * self.size) == self.size

        return lambda: list(self.pool.map(one, slots, views))


class Tier:
    """A folder of segments."""

    label = "halfmoon, disk tier"

    def __init__(self, folder: Path, size: int, pool: ThreadPoolExecutor, memory: memoryview):
        self.size, self.pool, self.memory = size, pool, memory
        layout = KvLayout(
            model="m", n_layers=size // 4096, n_kv_heads=1, head_dim=32, dtype="float32",
            block_size=16,
        )  # fmt: skip
        self.disk = SegmentFolder(folder / "tier", FILE_BYTES + (64 << 20), generation=1)
        self.disk.open(layout)
        self.records: dict[int, BlockRecord] = {}
        for slot in range(FILE_BYTES // size):
            self.prepare("put", [slot])()

    def prepare(self, op: str, slots: list[int]) -> Callable[[], None]:
        views = [self.memory[i * self.size : (i + 1) * self.size] for i in range(len(slots))]
        commands = list(map(self.write if op == "put" else self.read, slots, views))

        def go() -> None:
            assert set(self.pool.map(self.disk.perform, commands, views)) == {"ok"}

        return go

    def write(self, slot: int, view: memoryview) -> WriteBack:
        checksum = xxhash.xxh3_64_intdigest(view)
        record = BlockRecord(BlockHash(slot.to_bytes(16, "big")), None, 0, checksum)
        self.records[slot] = record
        return WriteBack(record, 0, slot)

    def read(self, slot: int, view: memoryview) -> Promote:
        return Promote(self.records[slot], slot, 0)


def main() -> None:
    pool = ThreadPoolExecutor(8)
    memory = memoryview(mmap.mmap(-1, ROOM))
    memory[:] = os.urandom(1 << 20) * (ROOM >> 20)
    seconds = float(sys.argv[2])
    for size in map(int, sys.argv[1].split(",")):
        with tempfile.TemporaryDirectory(dir=".", prefix="bench-disk-") as name:
            peers = [kind(Path(name), size, pool, memory) for kind in (BareFile, Tier)]
            slots = range(FILE_BYTES // size)
            for op in ("put", "get"):
                many = in_turns(peers, op, slots, batch_of(size), 2 * seconds)
                one = in_turns(peers, op, slots, 1, seconds)
                for peer, batch_s, single_s in zip(peers, many, one, strict=True):
                    rate = batch_of(size) * size / batch_s / 1e9
                    result = {"label": peer.label, "op": op, "size": size, "gb_per_s": rate}
                    print(json.dumps(result | {"p50_us": single_s * 1e6}), flush=True)


def in_turns(peers: list, op: str, slots: range, n_blocks: int, seconds: float) -> list[float]:
    """The median of each one's times."""
    times: list[list[float]] = [[] for _ in peers]
    until = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < until:
        for peer, its in zip(peers, times, strict=True):
            go = peer.prepare(op, random.sample(slots, n_blocks))
            started = time.perf_counter()
            go()
            its.append(time.perf_counter() - started)
    return [statistics.median(its) for its in times]


main()
