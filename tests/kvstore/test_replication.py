"""Copies between kvstore nodes, as processes, on the order of whoever plays the conductor."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from halfmoon_metadata import open_store
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksReplicated,
    DropBlocks,
    KvstoreAddress,
    KvstoreRefused,
    Message,
    ReplicateBlocks,
)
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, block_content, prompt_blocks
from halfmoon_testing.damaging_relay import damaging_relay
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint


def n_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def address(nodes: Any, name: str) -> KvstoreAddress:
    info = nodes.info(name)
    return KvstoreAddress(info.worker_id, info.generation, info.commands)


async def order(
    target: BlockClient,
    source: KvstoreAddress,
    hashes: list[BlockHash],
    *,
    parent: BlockHash | None = None,
    layout: KvLayout = SMALL_LAYOUT,
) -> Message:
    tokens = (0,) * len(hashes) * layout.block_size
    ticket = Ticket(f"copy-{hashes[0].hex()}")
    return await target.request(
        ReplicateBlocks(ticket, source, layout, tuple(hashes), parent, tokens)
    )


async def copied(target: BlockClient, source: KvstoreAddress, *args: Any, **more: Any) -> int:
    """How many blocks are there after an order, which must not be refused."""
    answer = await order(target, source, *args, **more)
    assert isinstance(answer, BlocksReplicated)
    return answer.n_blocks


async def test_blocks_are_copied_and_serve_when_their_source_is_killed(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1)
    nodes.start("b", capacity_mib=1)
    assert nodes.info("b").replicates
    blocks, partly = prompt_blocks(1, 20), prompt_blocks(2, 8)
    other = msgspec.structs.replace(SMALL_LAYOUT, dtype="bfloat16")
    source = address(nodes, "a")
    async with nodes.client("a") as a, nodes.client("b") as b:
        await a.put(blocks)
        refused = await order(b, source, blocks, layout=other)
        assert isinstance(refused, KvstoreRefused) and "bfloat16" in refused.reason
        assert await b.stored() == set()
        assert await order(b, source, blocks[:12]) == BlocksReplicated(
            Ticket(f"copy-{blocks[0].hex()}"), 12
        )
        # The rest of it, and again what is there.
        assert await copied(b, source, blocks[10:], parent=blocks[9]) == 10
        # Of what the source lacks, the prefix that it has.
        await a.put(partly[:5])
        assert await copied(b, source, partly) == 5
        nodes.kill("a")
        assert await b.get(blocks) == blocks
        assert await b.get(partly) == partly[:5]
        gone = await order(b, source, prompt_blocks(3, 4))
        assert isinstance(gone, KvstoreRefused) and "a" in gone.reason
        await b.put(prompt_blocks(3, 4))  # nothing is held
        # Copies are dropped on order.
        await b.send(DropBlocks(hashes=tuple(blocks[:2:-1])))
        while set(blocks[3:]) & await b.stored():
            await asyncio.sleep(0.01)
        assert await b.get(blocks) == blocks[:3]


async def test_blocks_on_the_disk_of_the_source_are_copied_too(nodes: Any, tmp_path: Path) -> None:
    nodes.start("a", capacity_mib=1, disk_path=tmp_path / "a", disk_mib=8, promotion_wait_s=60)
    nodes.start("b", capacity_mib=1)
    prompts = [prompt_blocks(i, 32) for i in range(24)]
    async with nodes.client("a") as a, nodes.client("b") as b:
        for each in prompts:
            await a.put(each)
        assert await copied(b, address(nodes, "a"), prompts[0]) == 32
        assert await b.get(prompts[0]) == prompts[0]


async def test_what_three_nodes_hold_survives_that_two_of_them_are_killed(nodes: Any) -> None:
    """Replicas less one, whichever they are; nothing of it was on a disk."""
    prompts = [prompt_blocks(i, 24) for i in range(1, 7)]
    for name in ("a", "b", "c"):
        nodes.start(name, capacity_mib=1)
    async with nodes.client("a") as a, nodes.client("b") as b, nodes.client("c") as c:
        for each in prompts:
            await a.put(each)
        for target in (b, c):
            for each in prompts:
                assert await copied(target, address(nodes, "a"), each) == len(each)
        nodes.kill("a")
        for each in prompts:
            assert await b.get(each) == each
        nodes.kill("b")
        for each in prompts:
            assert await c.get(each) == each
        # And from what is left the others get it back.
        nodes.start("a", capacity_mib=1)
        async with nodes.client("a") as anew:
            assert await anew.stored() == set()
            for each in prompts:
                await copied(anew, address(nodes, "c"), each)
                assert await anew.get(each) == each


async def test_a_node_that_copies_keeps_nothing_of_its_sources_earlier_starts(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1)
    n_open: list[int] = []
    async with nodes.client("a") as a:
        for i in range(1, 5):
            nodes.start("b", capacity_mib=1)
            blocks = prompt_blocks(i, 10)
            async with nodes.client("b") as b:
                await b.put(blocks)
                await copied(a, address(nodes, "b"), blocks)
            nodes.kill("b")
            n_open.append(n_files(nodes.processes["a"].pid))
    assert max(n_open) <= n_open[0] + 3, n_open


async def test_a_block_that_is_damaged_on_the_wire_is_found_and_not_stored(nodes: Any) -> None:
    for name in ("a", "b"):
        nodes.start(name, capacity_mib=1, transfer_backends="tcp")
    blocks = prompt_blocks(1, 20)
    store = open_store(nodes.metadata_url)
    async with nodes.client("a") as a, nodes.client("b") as b:
        await a.put(blocks)
        with damaging_relay() as relay:
            found = store.get(records.PREFIX + "a")
            assert found is not None
            direct = records.decode(found)
            relay.target = addresses.split_address(direct.endpoints["tcp"].address, 0)
            through = {"tcp": Endpoint(f"127.0.0.1:{relay.port}")}
            moved = msgspec.structs.replace(direct, endpoints=through)
            store.put(records.PREFIX + "a", records.encode(moved))
            relay.damage_next(block_content(blocks[5], 16))
            refused = await order(b, address(nodes, "a"), blocks)
            assert isinstance(refused, KvstoreRefused)
            assert f"block {blocks[5].hex()} is not what was put" in refused.reason
            assert await b.stored() == set()
            assert await copied(b, address(nodes, "a"), blocks) == 20
            assert relay.n_damaged == 1
            assert await b.get(blocks) == blocks
    store.close()
