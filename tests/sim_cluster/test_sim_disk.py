"""The disk of a simulated kvstore: calls to a slow one take virtual time."""

import asyncio
import random

import pytest
import xxhash

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_scheduling.tiers.tier_commands import Promote, WriteBack
from halfmoon_testing.sim_cluster.sim_disk import VirtualDisk
from halfmoon_testing.sim_cluster.sim_services import fake_layout
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess

BLOCK = bytes(range(16))
RECORD = BlockRecord(BlockHash(b"a" * 16), None, 0, xxhash.xxh3_64_intdigest(BLOCK))
WRITE, READ = WriteBack(RECORD, 0, 3), Promote(RECORD, 3, 0)


def slow_disk(seed: int) -> VirtualDisk:
    disk = VirtualDisk(random.Random(seed), 8)
    disk.slow_s = 0.2, 2.0
    return disk


@pytest.mark.random_seeds(3)
def test_calls_to_a_slow_disk_take_their_time_and_all_else_goes_on(seed: int) -> None:
    loop, disk = VirtualLoop(random.Random(seed)), slow_disk(seed)
    process = VirtualProcess("kvstore-0")
    seen: list[tuple[str, float]] = []
    copy = bytearray(len(BLOCK))

    async def call() -> None:
        await asyncio.to_thread(disk.open, fake_layout())
        seen.append(("open", loop.time()))
        assert await asyncio.to_thread(disk.perform, WRITE, memoryview(BLOCK)) == "ok"
        seen.append(("written", loop.time()))
        disk.slow_s = None
        assert await asyncio.to_thread(disk.perform, READ, memoryview(copy)) == "ok"
        seen.append(("read", loop.time()))

    async def tick() -> None:
        await asyncio.sleep(0.1)
        seen.append(("tick", loop.time()))

    async def run() -> None:
        tasks = [loop.start(process, call()), loop.start(process, tick())]
        await asyncio.gather(*tasks)

    loop.run_until_complete(run())
    assert [name for name, _ in seen] == ["tick", "open", "written", "read"]
    opened_s, written_s, read_s = (at_s for _, at_s in seen[1:])
    assert 0.2 <= opened_s <= 2.1 and 0.2 <= written_s - opened_s <= 2.1
    assert read_s - written_s < 0.01
    assert copy == BLOCK


def test_a_node_that_is_killed_in_a_slow_call_ends_it_before_or_after_the_bytes_moved() -> None:
    written = [is_written_by_a_node_that_is_killed(seed) for seed in range(20)]
    assert set(written) == {True, False}


def is_written_by_a_node_that_is_killed(seed: int) -> bool:
    loop, disk = VirtualLoop(random.Random(seed)), slow_disk(seed)
    disk.slow_s = 0.2, 0.2
    process = VirtualProcess("kvstore-0")
    outcomes: list[object] = []

    async def write() -> None:
        outcomes.append(await asyncio.to_thread(disk.perform, WRITE, memoryview(BLOCK)))

    async def run() -> None:
        loop.start(process, write())
        await asyncio.sleep(0.15 * random.Random(seed).random())
        loop.kill(process)
        disk.slow_s = None
        await asyncio.sleep(5.0)

    loop.run_until_complete(run())
    process.threads.clear()
    assert not outcomes
    return bool(list(disk.blocks()))
