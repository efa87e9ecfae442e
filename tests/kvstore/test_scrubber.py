"""Blocks whose bytes in memory somebody wrote over: readers notice and say so."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.messages import BlocksLeased, LeaseBlocks, ReleaseLease
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, DamagedBytes

BLOCKS = [BlockHash(bytes(15) + bytes([i])) for i in range(8)]


async def given_up(client: BlockClient, *blocks: BlockHash) -> None:
    """Wait until a node does not have these any more."""
    async with asyncio.timeout(30):
        while not (await client.stored()).isdisjoint(blocks):
            await asyncio.sleep(0.02)


async def test_damaged_blocks_alone_are_given_up_and_after_those_who_read_them(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1)
    async with nodes.client("a") as reader, nodes.client("a") as client:
        await client.put(BLOCKS)
        lease = await reader.request(LeaseBlocks(Ticket("read"), SMALL_LAYOUT, tuple(BLOCKS[:1])))
        assert isinstance(lease, BlocksLeased) and lease.places
        await client.damage(BLOCKS[:3])
        with pytest.raises(DamagedBytes):
            await client.get(BLOCKS)
        unknown = BlockHash(b"unknown".ljust(16))
        await client.report_damaged([unknown, *BLOCKS])
        await given_up(client, *BLOCKS[1:3])
        assert BLOCKS[0] in await client.stored()
        await reader.send(ReleaseLease(ticket=Ticket("read")))
        await given_up(client, BLOCKS[0])
        assert await client.stored() == set(BLOCKS[3:]), "those that are good stay"
        await client.put(BLOCKS)
        assert await client.get(BLOCKS) == BLOCKS
        await client.damage(BLOCKS[-1:])
        await client.report_damaged(BLOCKS)
        await given_up(client, BLOCKS[-1])  # the last one that was looked at
        assert await client.get(BLOCKS) == BLOCKS[:-1]


async def test_a_damaged_block_on_the_disk_too_comes_from_there(nodes: Any, tmp_path: Path) -> None:
    nodes.start("a", capacity_mib=1, disk_path=tmp_path / "a", disk_mib=8, promotion_wait_s=60)
    more = [BlockHash(bytes(14) + bytes([1, i])) for i in range(250)]
    async with nodes.client("a") as client:
        await client.put(BLOCKS)
        await client.put(more)  # so that the first ones are written back
        assert await client.get(BLOCKS) == BLOCKS
        await client.damage(BLOCKS[:3])
        await client.report_damaged(BLOCKS[:3])
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await client.get(BLOCKS) == BLOCKS
                    break
                except DamagedBytes:
                    await asyncio.sleep(0.02)
