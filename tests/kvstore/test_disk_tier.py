"""Kvstore nodes with a disk, as processes: more than memory holds, killed, and damaged."""

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from halfmoon_kvstore.disk_tier.segment_file import scan_blocks
from halfmoon_kvstore.disk_tier.superblock import read_shape
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, InstantTiers, prompt_blocks
from halfmoon_testing.full_disk import no_files_above
from halfmoon_transfer.interface import TransferError
from tests.nightly import by_day

#: One MiB of memory.
N_SLOTS = 256
#: On a busy machine a reader may have to wait, and is to get everything nevertheless.
PATIENT = {"capacity_mib": 1, "promotion_wait_s": 60}


def segment(folder: Path) -> Path:
    [path] = sorted(folder.glob("segment-*.kv"))
    return path


def on_disk(path: Path) -> dict[BlockHash, int]:
    """Blocks by slot, by the headers alone."""
    return {found.record.hash: found.slot for found in scan_blocks(path)}


async def filled(nodes: Any, flags: dict[str, Any]) -> list[list[BlockHash]]:
    """Start a node and put four times what memory holds; kill it. Returns the prompts."""
    nodes.start("a", **flags)
    prompts = [prompt_blocks(i, 16) for i in range(4 * N_SLOTS // 16)]
    async with nodes.client("a") as client:
        for each in prompts:
            await client.put(each)
    nodes.kill("a")
    return prompts


async def test_several_times_the_memory_is_kept_and_survives_kill_9(
    nodes: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    flags = {**PATIENT, "disk_path": disk, "disk_mib": 16}
    nodes.start("a", **flags)
    times = by_day(4, at_night=10)
    prompts = [prompt_blocks(i, 32) for i in range(times * N_SLOTS // 32)]
    async with nodes.client("a") as client:
        for each in prompts:
            assert await client.get(each) == []
            assert await client.put(each) == 32
        for each in reversed(prompts):
            assert await client.get(each) == each
    nodes.kill("a")
    written = on_disk(segment(disk))
    assert len(written) >= (times - 1) * N_SLOTS
    nodes.start("a", **flags)
    async with nodes.client("a") as client:
        assert await client.stored() == set(written)
        for each in prompts:
            found = await client.get(each)
            kept = [block in written for block in each]
            assert found == each[: kept.index(False) if False in kept else len(each)]


@pytest.mark.random_seeds(1)
async def test_a_node_started_on_a_damaged_file_serves_what_is_whole_and_says_what_it_mended(
    nodes: Any, tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    disk = tmp_path / "disk"
    flags = {**PATIENT, "disk_path": disk, "disk_mib": 8}
    prompts = await filled(nodes, flags)
    path = segment(disk)
    written, shape = on_disk(path), read_shape(path)
    assert shape is not None
    damages = {
        "a bit of page 0": (dice.randrange(200), 1),
        "page 0": (0, 4096),
        "a page of headers": (4096, 4096),
        "the last page": (shape.n_bytes - 4096, 4096),
    }
    for what, (at, n_bytes) in damages.items():
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(n_bytes)
            file.seek(at)
            file.write(bytes([before[0] ^ 1]) if n_bytes == 1 else bytes(n_bytes))
        nodes.start("a", **flags)
        async with nodes.client("a") as client:
            assert await client.stored() == set(written), what
            each = next(each for each in prompts if set(each) <= written.keys())
            assert await client.get(each) == each, what
        assert "disk_segment_mended" in nodes.log("a") and path.name in nodes.log("a"), what
        nodes.kill("a")
    # Of blocks whose bytes are damaged none is served, nor what follows it.
    damaged = {each[9] for each in prompts if set(each) <= written.keys()}
    assert len(damaged) > 10
    with path.open("r+b") as file:
        for block in damaged:
            file.seek(shape.offset(written[block]) + 1000)
            file.write(b"damage")
    nodes.start("a", **flags)
    async with nodes.client("a") as client:
        for each in prompts:
            found = await client.get(each)
            assert not damaged & set(found)
            if set(each) <= written.keys():
                assert found == each[:9]
        assert not damaged & await client.stored()


@pytest.mark.random_seeds(1)
async def test_killed_in_the_middle_of_writes_a_node_loses_nothing_that_was_written(
    nodes: Any, tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    disk = tmp_path / "disk"
    # So small a disk that slots are written over all the time.
    flags = {**PATIENT, "disk_path": disk, "disk_mib": 3}
    for round_ in range(2):
        nodes.start("a", **flags)
        async with nodes.client("a") as client:
            if round_:
                before = on_disk(segment(disk))
                assert await client.stored() == set(before)
                for i in range(80):
                    await client.get(
                        prompt_blocks((round_ - 1) * 1000 + i, 24)
                    )  # verifies what it gets

            done: list[int] = []

            async def put_on(client: BlockClient, first: int, done: list[int]) -> None:
                while True:
                    await client.put(prompt_blocks(first + len(done), 24))
                    done.append(len(done))

            # Enough for memory and disk to be full, and then anywhere.
            n_puts = dice.randrange(40, 80)
            putting = asyncio.create_task(put_on(client, round_ * 1000, done))
            while len(done) < n_puts and not putting.done():
                await asyncio.sleep(0.001)
            nodes.kill("a")
            with pytest.raises((PeerUnreachable, TransferError)):
                await putting
    path = segment(disk)
    shape = read_shape(path)
    assert shape is not None
    found = scan_blocks(path)
    assert found
    bytes_ = path.read_bytes()
    for each in found:
        start = shape.offset(each.slot)
        there = xxhash.xxh3_64_intdigest(bytes_[start : start + SMALL_LAYOUT.block_bytes])
        assert each.record.checksum == there, "a header without its bytes"


async def test_two_processes_share_no_folder_and_one_that_is_told_to_stop_saves_its_memory(
    nodes: Any, tmp_path: Path
) -> None:
    flags = {**PATIENT, "disk_path": tmp_path / "disk", "disk_mib": 8}
    nodes.start("a", **flags)
    blocks = prompt_blocks(1, 200)
    async with nodes.client("a") as client:
        await client.put(blocks)
    assert on_disk(segment(tmp_path / "disk")) == {}
    with pytest.raises(AssertionError, match="give each kvstore its own"):
        nodes.start("b", **flags)
    process = nodes.processes["a"]
    process.signal(signal.SIGTERM)
    assert process.wait(60) and process.exit_code == 0, nodes.log("a")
    nodes.start("a", **flags)
    async with nodes.client("a") as client:
        assert await client.get(blocks) == blocks


async def test_a_full_disk_is_said_and_memory_serves_blocks(nodes: Any, tmp_path: Path) -> None:
    with no_files_above(2 << 20):
        nodes.start("a", capacity_mib=1, disk_path=tmp_path / "disk", disk_mib=8)
    prompts = [prompt_blocks(i, 32) for i in range(20)]
    async with nodes.client("a") as client:
        for each in prompts:
            await client.put(each)
        assert await client.get(prompts[-1]) == prompts[-1]
        assert 0 < len(await client.stored()) <= N_SLOTS
    assert "disk_smaller_than_wanted" in nodes.log("a")


def conversations(seed: int, n_requests: int) -> list[list[BlockHash]]:
    """Requests as in the traces: prompts that go on from earlier ones, all with one beginning."""
    dice = random.Random(seed)
    root = BlockHash(bytes(16))
    open_: list[list[BlockHash]] = []
    requests = []
    for _ in range(n_requests):
        if open_ and dice.random() < 0.5:
            earlier = open_.pop(min(int(dice.expovariate(0.08)), len(open_) - 1))
        else:
            earlier = [root]
        fresh = [BlockHash(dice.randbytes(16)) for _ in range(dice.randrange(2, 20))]
        requests.append(earlier + fresh)
        open_.insert(0, earlier + fresh)
    return requests


async def test_two_nodes_hit_as_often_as_their_policy_does_alone(
    nodes: Any, tmp_path: Path
) -> None:
    requests = conversations(seed=7, n_requests=260)
    names = ("a", "b")
    for name in names:
        nodes.start(
            name, **PATIENT, disk_path=tmp_path / name, disk_mib=32,
            eviction="patience", metrics_port=0,
        )  # fmt: skip
    alone = [InstantTiers(N_SLOTS, 32 << 8, "patience") for _ in names]
    there: list[set[BlockHash]] = [set(), set()]
    async with nodes.client("a") as a, nodes.client("b") as b:
        for request in requests:
            which = request[1][0] % 2
            client = (a, b)[which]
            known = next((i for i, x in enumerate(request) if x not in there[which]), len(request))
            assert await client.get(request) == request[:known]
            await client.put(request)
            there[which] |= set(request)
            assert alone[which].get(request) == known
            alone[which].put(request)
    for name, pure in zip(names, alone, strict=True):
        counts = pure.tiers.counts
        n_alone = counts.hits_memory + counts.hits_disk + counts.misses
        live = lookups(nodes, name)
        assert counts.hits_disk > 100, "memory holds too much for this to mean anything"
        # The live node does not count the very first request, before it knows its layout.
        assert live["memory"] / sum(live.values()) == pytest.approx(
            counts.hits_memory / n_alone, abs=0.01
        )


def lookups(nodes: Any, name: str) -> dict[str, float]:
    """Blocks asked for, by the tier that had them, as the node's metrics say."""
    found = {}
    for row in httpx.get(f"{nodes.info(name).http}/metrics", timeout=10).text.splitlines():
        if row.startswith(start := 'halfmoon_kvstore_lookup_blocks_total{tier="'):
            kind, value = row.removeprefix(start).split('"} ')
            found[kind] = float(value)
    return found
