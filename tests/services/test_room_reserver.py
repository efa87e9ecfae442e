"""A prefill worker asks a kvstore, played by hand, for cached blocks and for room beside them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksLeased,
    BlocksReserved,
    CachedPrefix,
    Cancel,
    KvstoreAddress,
    LeaseBlocks,
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
    ReleaseLease,
    ReserveBlocks,
    RevokeBlocks,
    StartPrefill,
    VerifyBlocks,
)
from halfmoon_protocol.messages.kvstore import Place
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.network import Port, WorkerLink

LocalCluster = Callable[..., Any]
LAYOUT = FakeEngine().layout
PROMPT = tuple((i * 7) % 990 for i in range(100))
HASHES = tuple(block_hashes(list(PROMPT), model=LAYOUT.model, block_size=16))
N_CACHED = 4
RID = RequestId("r")


@dataclass
class Scene:
    """prefill-0 as a conductor meets it, and the kvstore's end of its connection."""

    cluster: Any
    conductor: WorkerLink
    kvstore: Port

    async def asked(self, kind: type[Any]) -> Any:
        """Return what the kvstore is asked next, which is of this kind."""
        async with asyncio.timeout(20):
            self.peer, message = await self.kvstore.receive()
        assert isinstance(message, kind), message
        return message

    async def answer(self, message: BlocksLeased | BlocksReserved) -> None:
        await self.kvstore.send(self.peer, message)

    @property
    def memory(self) -> Any:
        """Memory that the kvstore says is its own."""
        return self.cluster.memories["kvstore-0"]

    def leased(self, wanted: LeaseBlocks, n_blocks: int) -> BlocksLeased:
        places = tuple(
            Place(block, i * LAYOUT.block_bytes, 1)
            for i, block in enumerate(wanted.hashes[:n_blocks])
        )
        return BlocksLeased(
            ticket=wanted.ticket, region=self.memory.region, places=places, expires_s=30.0
        )

    def reserved(self, wanted: ReserveBlocks) -> BlocksReserved:
        places = tuple(
            Place(block, i * LAYOUT.block_bytes) for i, block in enumerate(wanted.hashes)
        )
        return BlocksReserved(
            ticket=wanted.ticket, region=self.memory.region, places=places, expires_s=30.0
        )

    async def said(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(20):
            while not isinstance(answer := await self.conductor.receive(), kind):
                pass
        return answer


@pytest.fixture
async def scene(local_cluster: LocalCluster) -> AsyncIterator[Scene]:
    async with local_cluster() as cluster:
        decode = cluster.worker("decode-0")
        conductor = await cluster.network.dial(cluster.worker("prefill-0").port.commands)
        kvstore = await cluster.network.bind("by-hand")
        address = KvstoreAddress(WorkerId("by-hand"), 1, kvstore.commands)
        start = StartPrefill(
            request_id=RID,
            token_ids=PROMPT,
            n_prompt=len(PROMPT),
            block_hashes=HASHES,
            landing=Landing(decode.region, tuple(range(7)), LAYOUT),
            landing_expires_s=60.0,
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_new_tokens=3),
            cached=CachedPrefix(address, N_CACHED),
            store_in=address,
        )
        await conductor.send(start)
        yield Scene(cluster, conductor, kvstore)
        await cluster.settled(stores=False)


async def asked_for_both(scene: Scene) -> tuple[LeaseBlocks, ReserveBlocks]:
    lease, room = await scene.asked(LeaseBlocks), await scene.asked(ReserveBlocks)
    assert lease.hashes == HASHES[:N_CACHED]
    assert (room.hashes, room.parent) == (HASHES[N_CACHED:], HASHES[N_CACHED - 1])
    assert room.token_ids == PROMPT[N_CACHED * 16 : len(HASHES) * 16]
    return lease, room


async def test_room_is_asked_for_behind_the_lease_and_before_its_answer(scene: Scene) -> None:
    _, room = await asked_for_both(scene)
    await scene.answer(scene.reserved(room))
    await scene.conductor.send(Cancel(request_id=RID))
    await scene.said(PrefillStopped)
    # The room was granted, and not taken: the blocks that come before it are not leased yet.
    assert await scene.asked(RevokeBlocks) == RevokeBlocks(ticket=room.ticket)


async def test_room_that_was_asked_for_ahead_is_the_requests(scene: Scene) -> None:
    lease, room = await asked_for_both(scene)
    await scene.answer(scene.leased(lease, N_CACHED))
    await scene.answer(scene.reserved(room))
    await scene.said(PrefillFailed)  # these blocks have other checksums
    # No room was asked for anew.
    assert await scene.asked(VerifyBlocks) == VerifyBlocks(hashes=lease.hashes)
    assert await scene.asked(ReleaseLease) == ReleaseLease(ticket=lease.ticket)
    assert await scene.asked(RevokeBlocks) == RevokeBlocks(ticket=room.ticket)


async def test_fewer_cached_blocks_than_thought_need_other_room(scene: Scene) -> None:
    lease, room = await asked_for_both(scene)
    await scene.answer(scene.reserved(room))
    await scene.answer(scene.leased(lease, 0))
    assert await scene.asked(RevokeBlocks) == RevokeBlocks(ticket=room.ticket)
    whole = await scene.asked(ReserveBlocks)
    assert (whole.hashes, whole.parent) == (HASHES, None)
    await scene.answer(scene.reserved(whole))
    done = await scene.said(PrefillDone)
    assert done.n_cached == 0


async def test_room_that_is_granted_too_late_is_revoked(scene: Scene) -> None:
    lease, room = await asked_for_both(scene)
    await scene.answer(scene.leased(lease, 0))
    whole = await scene.asked(ReserveBlocks)
    assert whole.hashes == HASHES
    await scene.answer(scene.reserved(room))
    assert await scene.asked(RevokeBlocks) == RevokeBlocks(ticket=room.ticket)
    await scene.answer(scene.reserved(whole))
    await scene.said(PrefillDone)


async def test_what_a_cancelled_request_asked_for_is_let_go_when_it_comes(scene: Scene) -> None:
    lease, room = await asked_for_both(scene)
    await scene.conductor.send(Cancel(request_id=RID))
    await scene.said(PrefillStopped)
    await scene.answer(scene.reserved(room))
    await scene.answer(scene.leased(lease, N_CACHED))
    assert await scene.asked(RevokeBlocks) == RevokeBlocks(ticket=room.ticket)
    assert await scene.asked(ReleaseLease) == ReleaseLease(ticket=lease.ticket)
