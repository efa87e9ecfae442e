"""Prefill workers know their peers before they need them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_metadata import MemoryStore, MetadataUnreachable
from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.membership import SEGMENTS, Membership
from halfmoon_runtime.observability.metrics import LabelledValues
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_transfer import Lost, Piece, TransferEngine
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache, meet_peer

OWN, PEER = WorkerId("prefill-0"), WorkerId("decode-0")


class ShakyStore(MemoryStore):
    """A store that can be away."""

    away = False

    def get(self, key: str) -> bytes | None:
        self._require_there()
        return super().get(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        self._require_there()
        return super().list(prefix)

    def _require_there(self) -> None:
        if self.away:
            raise MetadataUnreachable("away")


def n_looks(acquaintances: PeerEndpointCache, result: str) -> int:
    ((_, shown),) = acquaintances.metrics().values()
    assert isinstance(shown, LabelledValues)
    n = shown.values[result,]
    assert isinstance(n, int)
    return n


async def looked(acquaintances: PeerEndpointCache, result: str, *, n_more: int = 2) -> None:
    """Until a look has begun and ended so; one may have been under way."""
    enough = n_looks(acquaintances, result) + n_more
    async with asyncio.timeout(60):
        while n_looks(acquaintances, result) < enough:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def looking(
    store: MemoryStore, *, look_s: float = 0.01, **more: Any
) -> AsyncIterator[tuple[TransferEngine, PeerEndpointCache]]:
    """A prefill worker's transfer engine, and who looks at all members for it from now on."""
    with TransferEngine.open(OWN, metadata=store, backends=("memory",)) as transfer:
        acquaintances = PeerEndpointCache(store, transfer, OWN, look_s=look_s, **more)
        keeping = asyncio.create_task(acquaintances.keep())
        yield transfer, acquaintances
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_a_peer_that_was_never_written_to_is_reached_while_the_metadata_server_is_away() -> (
    None
):
    store = ShakyStore()
    async with looking(store) as (transfer, acquaintances):
        mine = transfer.allocate(4)
        mine.view[:] = b"moon"
        await looked(acquaintances, "done")
        with TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer:
            theirs = peer.allocate(4)
            await Membership(store, a_worker(PEER, generation=peer.generation)).join()
            await looked(acquaintances, "done")
            store.away = True
            await looked(acquaintances, "failed")
            written = transfer.submit("write", [Piece(mine.region, 0, theirs.region, 0, 4)], 60)
            await asyncio.to_thread(written.result, 60)
            assert bytes(theirs.view) == b"moon"
            store.away = False


async def test_a_member_whose_record_is_not_there_is_looked_up_until_it_is() -> None:
    store = MemoryStore()
    async with looking(store) as (_, acquaintances):
        await Membership(store, a_worker(PEER)).join()
        await looked(acquaintances, "failed")
        with TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer:
            assert peer.generation == 1
            await looked(acquaintances, "done")


async def test_a_peer_that_left_for_good_is_forgotten() -> None:
    store = MemoryStore()
    async with looking(store, forget_after_s=0.02) as (transfer, acquaintances):
        with TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer:
            membership = Membership(store, a_worker(PEER, generation=peer.generation))
            await membership.join()
            await looked(acquaintances, "done")
        await membership.leave()
        with pytest.raises(Lost):
            async with asyncio.timeout(60):
                while True:
                    transfer.resolve_peer(PEER, 1)
                    await asyncio.sleep(0.005)


async def test_a_peer_is_not_forgotten_while_nobody_can_say_whether_it_left() -> None:
    store = ShakyStore()
    async with looking(store, forget_after_s=0.0) as (transfer, acquaintances):
        with TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer:
            await Membership(store, a_worker(PEER, generation=peer.generation), ttl_s=600).join()
            await looked(acquaintances, "done")
            store.away = True
            await looked(acquaintances, "failed")
            transfer.resolve_peer(PEER, peer.generation)
            store.away = False


async def test_where_members_are_many_looks_at_all_of_them_are_rare() -> None:
    store = MemoryStore()
    for number in range(40):
        await Membership(store, a_worker(f"decode-{number}"), ttl_s=600).join()
    async with looking(store, look_s=2.0) as (_, acquaintances):
        assert acquaintances.pause_s() == 2.0
        await looked(acquaintances, "failed", n_more=1)  # none of them has a record
        assert acquaintances.pause_s() == pytest.approx(4.0)


@pytest.mark.parametrize("what", ["the server is away", "the record is lost"])
async def test_an_owner_that_was_not_met_before_is_waited_for(what: str) -> None:
    store = ShakyStore()
    with (
        TransferEngine.open(OWN, metadata=store, backends=("memory",)) as transfer,
        TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer,
    ):
        region = peer.allocate(4).region
        store.away = what == "the server is away"
        if not store.away:
            store.delete(SEGMENTS + PEER)
        n_looks = 0

        def may_wait() -> bool:
            nonlocal n_looks
            n_looks += 1
            return True

        meeting = asyncio.create_task(meet_peer(transfer, region, may_wait))
        async with asyncio.timeout(60):
            while n_looks < 3:
                await asyncio.sleep(0.005)
            assert not transfer.knows_peer(region.segment, region.generation)
            store.away = False
            peer.restore_record()
            await meeting
        assert transfer.knows_peer(region.segment, region.generation)


async def test_an_owner_is_waited_for_no_longer_than_there_is_time_or_hope() -> None:
    store = ShakyStore()
    with (
        TransferEngine.open(OWN, metadata=store, backends=("memory",)) as transfer,
        TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer,
    ):
        region = peer.allocate(4).region
        another = msgspec.structs.replace(region, generation=region.generation + 1)
        await meet_peer(transfer, another, lambda: True)
        transfer.release_peer(PEER)
        store.away = True
        time_left = [True, True]
        await meet_peer(transfer, region, lambda: bool(time_left and time_left.pop()))
        assert not transfer.knows_peer(region.segment, region.generation)
        store.away = False
