"""Our disk tier as a node uses it: slots written and read by 8 threads, checksums included."""

import mmap
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from clock import ROOM, batch_of, measure

from halfmoon_kvstore.disk import Disk
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.layout import KvLayout
from halfmoon_scheduling.disk_map import BlockRecord
from halfmoon_scheduling.tier_commands import Promote, WriteBack


class Tier:
    """A folder of slots, and what is in them."""

    def __init__(self, folder: Path, size: int) -> None:
        layout = KvLayout(
            model="m", n_layers=size // 4096, n_kv_heads=1, head_dim=32, dtype="float32",
            block_size=16,
        )  # fmt: skip
        self.disk = Disk(folder, 2 * ROOM + (64 << 20), generation=1)
        self.disk.open(layout)
        self.records: dict[int, BlockRecord] = {}

    def command(self, op: str, slot: int, view: memoryview) -> WriteBack | Promote:
        if op == "get":
            return Promote(self.records[slot], slot, 0)
        checksum = xxhash.xxh3_64_intdigest(view)
        record = BlockRecord(BlockHash(slot.to_bytes(16, "big")), None, 0, checksum)
        self.records[slot] = record
        return WriteBack(record, 0, slot)


def main() -> None:
    pool = ThreadPoolExecutor(8)
    memory = memoryview(mmap.mmap(-1, ROOM))
    memory[:] = os.urandom(1 << 20) * (ROOM >> 20)
    for text in sys.argv[1].split(","):
        with tempfile.TemporaryDirectory(dir=".", prefix="disk-tier-") as folder:
            size = int(text)
            tier = Tier(Path(folder), size)
            views = [memory[i * size : (i + 1) * size] for i in range(batch_of(size))]
            slots = range(2 * ROOM // size)
            for slot in slots:
                view = views[slot % len(views)]
                assert tier.disk.perform(tier.command("put", slot, view), view) == "ok"

            def run(
                op: str, size: int, n_blocks: int, tier: Tier = tier, slots: range = slots,
                views: list[memoryview] = views,
            ) -> float:  # fmt: skip
                chosen = random.sample(slots, max(n_blocks, len(views)))[:n_blocks]
                commands = [
                    tier.command(op, *pair) for pair in zip(chosen, views[:n_blocks], strict=True)
                ]
                started = time.perf_counter()
                if n_blocks == 1:
                    outcomes = [tier.disk.perform(commands[0], views[0])]
                else:
                    outcomes = list(pool.map(tier.disk.perform, commands, views))
                assert set(outcomes) == {"ok"}, outcomes
                return time.perf_counter() - started

            sys.argv[-2] = text
            measure(run, ["put", "get"])
            tier.disk.close()


main()
