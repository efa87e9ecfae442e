"""A kvstore that leaves: what only it has is elsewhere afterwards, byte for byte."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_kvstore.drain.drain_migration import DrainProgress
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.messages import (
    BlocksLeased,
    KvstoreRefused,
    LeaseBlocks,
    ReleaseLease,
    ReserveBlocks,
)
from halfmoon_runtime.observability.operator_http import OperatorRequest
from halfmoon_testing.block_client import BlockClient, prompt_blocks

#: One MiB is 256 blocks.
N_BLOCKS_MIB = 256
WITHIN_S = 60.0


async def ended(nodes: Any, name: str) -> str:
    """Wait for a node's end, which must be a good one; its log."""
    process = nodes.processes[name]
    assert await asyncio.to_thread(process.wait, WITHIN_S), nodes.log(name)
    assert process.exit_code == 0, nodes.log(name)
    return str(nodes.log(name))


async def told(web: httpx.AsyncClient) -> None:
    """Read a drain's progress until its end: a node stays for seconds until that was read."""
    while (await web.get("/drain")).json()["state"] == "moving":
        await asyncio.sleep(0.01)


async def readable(clients: Sequence[BlockClient], prompts: Sequence[list[BlockHash]]) -> None:
    """Every block can be read from one of these, and is what was put."""
    for each in prompts:
        found = {block for client in clients for block in await client.get(each)}
        for block in set(each) - found:  # perhaps without the blocks before it
            found |= {b for client in clients for b in await client.get([block])}
        assert found == set(each)


@asynccontextmanager
async def leaving(nodes: Any, **flags: Any) -> AsyncIterator[tuple[BlockClient, httpx.AsyncClient]]:
    """Node a, which is going to leave, and how to speak with it."""
    nodes.start("a", capacity_mib=1, metrics_port=0, **flags)
    async with nodes.client("a") as a, nodes.http("a") as web:
        yield a, web


async def test_after_a_drain_every_block_of_both_tiers_is_readable_from_the_rest(
    nodes: Any, tmp_path: Path
) -> None:
    disk = {"disk_path": tmp_path / "a", "disk_mib": 8, "promotion_wait_s": 60}
    nodes.start("b", capacity_mib=2)
    nodes.start("c", capacity_mib=1, **{**disk, "disk_path": tmp_path / "c", "disk_mib": 4})
    prompts = [prompt_blocks(i, 32) for i in range(3 * N_BLOCKS_MIB // 32)]
    async with leaving(nodes, **disk) as (a, web), nodes.client("b") as b, nodes.client("c") as c:
        for each in prompts:
            await a.put(each)
        await b.put(prompts[0])  # has a copy already
        assert (await web.get("/drain")).json()["state"] == "idle"
        began = (await web.post("/drain", json={"deadline_s": 600})).json()
        assert began["state"] == "moving"
        assert (await web.post("/drain", json={})).status_code == 200  # changes nothing
        await told(web)
        log = await ended(nodes, "a")
        assert f"n_moved={(len(prompts) - 1) * 32}" in log and "n_left=0" in log
        await readable([b, c], prompts)
        # Prompts are not torn apart but where a node was full then.
        torn = [each for each in prompts if each not in (await b.get(each), await c.get(each))]
        assert len(torn) <= 2


async def test_a_node_without_a_disk_that_is_to_stop_moves_what_only_it_has(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1)
    nodes.start("b", capacity_mib=1)
    prompts = [prompt_blocks(i, 20) for i in range(5)]
    async with nodes.client("a") as a, nodes.client("b") as b:
        for each in prompts:
            await a.put(each)
        nodes.processes["a"].signal(signal.SIGTERM)
        await ended(nodes, "a")
        for each in prompts:
            assert await b.get(each) == each


async def test_a_node_that_leaves_serves_reads_refuses_puts_and_keeps_its_pace(nodes: Any) -> None:
    nodes.start("b", capacity_mib=1)
    blocks = prompt_blocks(1, 200)  # eight seconds of that bandwidth
    async with leaving(nodes, drain_mib_per_s=0.1) as (a, web), nodes.client("b") as b:
        await a.put(blocks)
        await web.post("/drain", json={"deadline_s": 1.5})
        while not (progress := (await web.get("/drain")).json())["n_moved"]:
            await asyncio.sleep(0.01)
        assert progress["state"] == "moving" and progress["n_left"] > 0
        assert progress["bytes_moved"] == progress["n_moved"] * a.layout.block_bytes
        assert "halfmoon_kvstore_drain_blocks" in (await web.get("/metrics")).text
        assert (await web.get("/ready")).status_code == 200
        assert await a.get(blocks) == blocks
        refused = await a.request(
            ReserveBlocks(Ticket("late"), a.layout, tuple(prompt_blocks(2, 1)), None, (0,) * 16)
        )
        assert isinstance(refused, KvstoreRefused) and "stopping" in refused.reason
        await told(web)
        log = await ended(nodes, "a")
        assert "its 1.5 s were over" in log
        n_moved = len(await b.get(blocks))
        assert 0 < n_moved < 100


async def test_what_finds_no_room_elsewhere_stays_on_the_disk_and_the_reason_is_told(
    nodes: Any, tmp_path: Path
) -> None:
    flags = {"disk_path": tmp_path / "a", "disk_mib": 4}
    blocks, theirs = prompt_blocks(1, 100), prompt_blocks(2, 200)
    async with leaving(nodes, **flags) as (a, web):
        await a.put(blocks)
        wrong = await web.post("/drain", json={"deadline_s": -1})
        assert wrong.status_code == 400 and "deadline_s" in wrong.json()["error"]["message"]
        await web.post("/drain", json={})
        await told(web)
        assert "there is no other kvstore" in await ended(nodes, "a")
    nodes.start("b", capacity_mib=1)
    async with leaving(nodes, promotion_wait_s=60, **flags) as (a, web), nodes.client("b") as b:
        assert await a.get(blocks) == blocks
        await b.put(theirs)
        await web.post("/drain", json={})
        await told(web)
        assert "have no room" in await ended(nodes, "a")
        assert await b.get(theirs) == theirs  # what others have is not given up for it
        assert len(await b.get(blocks)) == int(0.95 * N_BLOCKS_MIB) - 200


async def test_a_node_that_leaves_waits_for_those_who_read_here(nodes: Any) -> None:
    nodes.start("b", capacity_mib=1)
    blocks = prompt_blocks(1, 20)
    async with leaving(nodes, lease_ttl_s=60) as (a, web):
        await a.put(blocks)
        ticket = Ticket("a long read")
        leased = await a.request(LeaseBlocks(ticket, a.layout, tuple(blocks)))
        assert isinstance(leased, BlocksLeased) and len(leased.places) == len(blocks)
        await web.post("/drain", json={"deadline_s": 600})
        await told(web)
        # It has told how it went, and would end at once if it did not wait for readers.
        for _ in range(100):
            assert await a.get(blocks) == blocks
            assert (await web.get("/drain")).json()["state"] == "done"
        assert nodes.processes["a"].exit_code is None
        await a.send(ReleaseLease(ticket))
        await ended(nodes, "a")


class Looked:
    """A node with one reader, who stays until it was looked for three times."""

    def __init__(self, *, has_disk: bool) -> None:
        self.n_looks = 0
        self.tiers = self.memory = self
        self.block_store = SimpleNamespace(
            disk="a disk" if has_disk else None, write_back_all=self.write_back_all
        )
        self.takes_no_more = False

    async def write_back_all(self, limit_s: float) -> None:
        assert self.takes_no_more

    async def stop_accepting(self) -> None:
        self.takes_no_more = True

    @property
    def n_leased(self) -> int:
        self.n_looks += 1
        return int(self.n_looks <= 3)


class Moved:
    """A move that is over at once."""

    progress = DrainProgress()

    def begin(self) -> None:
        self.progress = DrainProgress(state="moving")

    async def run(self, limit_s: float) -> None:
        self.progress = DrainProgress(state="done")


@pytest.mark.parametrize("has_disk", [True, False], ids=["with a disk", "memory alone"])
@pytest.mark.parametrize("how", ["ordered", "told to stop"])
async def test_the_end_comes_after_the_last_reader_however_begun(how: str, has_disk: bool) -> None:
    node: Any = Looked(has_disk=has_disk)
    stopping = asyncio.Event()
    spawned: list[asyncio.Task[None]] = []

    def spawn(leaving: Any) -> asyncio.Task[None]:
        spawned.append(asyncio.create_task(leaving))
        return spawned[-1]

    service: Any = SimpleNamespace(stopping=stopping, spawn=spawn)
    moved: Any = Moved()
    draining = DrainController(node, moved, KvstoreSettings(), service)
    if how == "ordered":
        await draining.start(OperatorRequest({}, body=b"{}"))
        while moved.progress.state != "done":
            await asyncio.sleep(0)
        await draining.progress(OperatorRequest({}))
        await stopping.wait()
        await spawned[0]
    else:
        await draining.shut_down()
    assert node.takes_no_more
    assert node.n_looks == 4, "it did not wait for a reader"
