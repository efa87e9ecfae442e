"""What a kvstore makes of messages that nobody should send."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import BlockHash, ConductorId, Ticket, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    CommitBlocks,
    Hello,
    KvstoreAddress,
    KvstoreRefused,
    LeaseBlocks,
    Place,
    ReplicateBlocks,
    ReserveBlocks,
    Unwelcome,
    Welcome,
    WorkerInfo,
)
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, prompt_blocks
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_testing.worker_caller import WorkerCaller
from tests.kvstore import conftest as kvstore_nodes
from tests.kvstore.conftest import Node

BYTES = msgspec.structs.replace(SMALL_LAYOUT, model="halfmoon.bytes", head_dim=64)


def n_failed() -> float:
    """Messages that only the last line of defence has caught."""
    return sum(
        s.value for m in FAILED_MESSAGES.collect() for s in m.samples if s.name.endswith("_total")
    )


async def dial(node: Node) -> WorkerCaller:
    info = node.worker.info
    return await WorkerCaller.dial(node.network, info.commands, info.events)


@asynccontextmanager
async def open_node(model: WorkerInfo | None = None) -> AsyncIterator[Node]:
    """A node that serves a client well throughout."""
    before = n_failed()
    async with kvstore_nodes.open_node(SystemClock(), model=model) as node:
        yield node
        assert not node.task.done()
        async with await BlockClient.dial(
            node.network, node.store, node.worker.info, "victim", backends=("memory",)
        ) as client:
            await client.put(prompt_blocks(99, 5))
            assert len(await client.get(prompt_blocks(99, 5))) == 5
        if node.worker.tiers is not None:
            node.worker.tiers.memory.check()
        assert n_failed() == before


def reserve(
    hashes: tuple[BlockHash, ...] | list[BlockHash], layout: KvLayout = SMALL_LAYOUT, **more: Any
) -> ReserveBlocks:
    fields: dict[str, Any] = {"ticket": Ticket("t"), "parent": None} | more
    n_tokens = len(hashes) * layout.block_size
    return ReserveBlocks(hashes=tuple(hashes), layout=layout, token_ids=(0,) * n_tokens, **fields)


def copy_order(source: str, commands: str, layout: KvLayout, *hashes: BlockHash) -> ReplicateBlocks:
    return ReplicateBlocks(
        ticket=Ticket("c"),
        source=KvstoreAddress(WorkerId(source), 1, commands),
        layout=layout,
        hashes=hashes,
        parent=None,
        token_ids=(),
    )


async def test_the_first_put_is_of_the_model_that_the_cluster_serves() -> None:
    model = msgspec.structs.replace(a_worker("prefill-3"), layout=SMALL_LAYOUT)
    async with open_node(model) as node:
        stranger = await dial(node)
        await stranger.send(reserve(prompt_blocks(1, 2), BYTES))
        (refused,) = await stranger.wait_for(KvstoreRefused)
        assert "halfmoon.bytes" in refused.reason and "prefill-3" in refused.reason
        assert node.worker.info.layout is None
        await stranger.send(copy_order("none", "mem://none", BYTES, *prompt_blocks(1, 1)))
        await stranger.wait_for(KvstoreRefused, 2)


@pytest.mark.parametrize(
    "layout",
    [
        KvLayout(model="m", n_layers=1, n_kv_heads=1, head_dim=1, dtype="float16", block_size=1),
        KvLayout(model="m", n_layers=9999, n_kv_heads=99, head_dim=99, dtype="float16",
                 block_size=9999),
    ],
    ids=["four bytes", "terabytes"],
)  # fmt: skip
async def test_no_layout_takes_the_memory_of_the_process(layout: KvLayout) -> None:
    async with open_node() as node:
        stranger = await dial(node)
        await stranger.send(reserve((BlockHash(b"a" * 16),), layout))
        (refused,) = await stranger.wait_for(KvstoreRefused)
        assert "bytes" in refused.reason


async def test_a_conductor_that_does_not_want_it_costs_a_log_line() -> None:
    async with open_node() as node:
        stranger = await dial(node)
        await stranger.send(Hello(conductor_id=ConductorId("c"), session=1))
        await stranger.send(Unwelcome(reason="another layout"))
        await stranger.send(Hello(conductor_id=ConductorId("c"), session=1))
        await stranger.wait_for(Welcome, 2)


async def test_a_commit_with_wrong_sums_can_be_said_again_rightly() -> None:
    async with open_node() as node:
        stranger = await dial(node)
        await stranger.send(reserve(prompt_blocks(1, 2)))
        await stranger.wait_for(BlocksReserved)
        await stranger.send(CommitBlocks(ticket=Ticket("t"), checksums=(1,)))
        await stranger.wait_for(KvstoreRefused)
        await stranger.send(CommitBlocks(ticket=Ticket("t"), checksums=(1, 2)))
        await stranger.wait_for(BlocksCommitted)
        await stranger.send(CommitBlocks(ticket=Ticket("t"), checksums=(1, 2)))
        await stranger.wait_for(KvstoreRefused, 2)


async def test_a_block_that_would_come_before_itself_is_refused() -> None:
    a, b, c = prompt_blocks(1, 3)
    async with open_node() as node:
        stranger = await dial(node)
        await stranger.send(reserve((a, b, a)), reserve((a,), parent=a))
        for refused in await stranger.wait_for(KvstoreRefused, 2):
            assert "named twice" in refused.reason
        await stranger.send(reserve((b,), parent=a, ticket=Ticket("1")))
        await stranger.send(reserve((c,), parent=b, ticket=Ticket("2")))
        await stranger.send(reserve((a,), parent=c, ticket=Ticket("3")))
        assert "ancestor" in (await stranger.wait_for(KvstoreRefused, 3))[-1].reason


async def test_a_source_that_leases_nonsense_costs_its_order() -> None:
    async with open_node() as node:
        liar = await node.network.bind("liar")
        stranger = await dial(node)
        asked_for = prompt_blocks(1, 2)
        await stranger.send(copy_order("liar", liar.commands, SMALL_LAYOUT, *asked_for))
        peer, asked = await liar.receive()
        assert isinstance(asked, LeaseBlocks)
        places = (Place(prompt_blocks(2, 1)[0], 0, 1),)
        region = node.worker.block_store.region
        leased = BlocksLeased(ticket=asked.ticket, region=region, places=places, expires_s=9.0)
        await liar.send(peer, leased)
        (refused,) = await stranger.wait_for(KvstoreRefused)
        assert "not asked for" in refused.reason
