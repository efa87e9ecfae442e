"""A prefill worker asks for its prefix and for room at once, and corrects what it expected."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.messages import (
    BlocksLeased,
    BlocksReserved,
    CachedPrefix,
    KvstoreAddress,
    KvstoreRefused,
    LeaseBlocks,
    Place,
    PrefillDone,
    PrefillFailed,
    ReserveBlocks,
    RevokeBlocks,
    StartPrefill,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_transfer import TransferError
from halfmoon_transfer.engine import TransferEngine
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from tests.services.asking import LAYOUT, ORACLE, dial, start_prefill

LocalCluster = Callable[..., Any]
N_TOKENS = 40
HASHES = (BlockHash(b"h" * 16), BlockHash(b"i" * 16))


def _start(region: Region, address: KvstoreAddress) -> StartPrefill:
    """Start a prompt of which a kvstore has one block, and is to keep the other."""
    landing = Landing(region, tuple(range(8)), LAYOUT)
    more: dict[str, Any] = {
        "block_hashes": HASHES,
        "cached": CachedPrefix(address, 1),
        "store_in": address,
    }
    return start_prefill("mine", range(N_TOKENS), landing, **more)


async def test_a_lease_and_room_are_asked_for_at_once_and_room_again_if_less_was_cached(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(FakeEngine, chunk_tokens=16) as cluster:
        home = await cluster.network.bind("home")
        caller = await dial(cluster, "prefill-0")
        backends = ("memory",)
        with TransferEngine.open("caller", metadata=cluster.store, backends=backends) as transfer:
            region = transfer.allocate(16 * LAYOUT.block_bytes).region
            address = KvstoreAddress(WorkerId("home"), 1, home.commands)
            await caller.send(_start(region, address))
            async with asyncio.timeout(60):
                asker, lease = await home.receive()
                assert isinstance(lease, LeaseBlocks) and lease.hashes == HASHES[:1]
                _, put = await home.receive()  # although the lease is not answered yet
                assert isinstance(put, ReserveBlocks)
                assert (put.hashes, put.parent) == (HASHES[1:], HASHES[0])
                place = Place(HASHES[1], 0)
                await home.send(asker, BlocksReserved(put.ticket, region, (place,), expires_s=60.0))
                await home.send(asker, BlocksLeased(lease.ticket, region, (), expires_s=60.0))
                _, back = await home.receive()
                assert back == RevokeBlocks(ticket=put.ticket), "the first block has no room"
                _, again = await home.receive()
                assert isinstance(again, ReserveBlocks) and again.hashes == HASHES
                await home.send(asker, KvstoreRefused(ticket=again.ticket, reason="full"))
                (done,) = await caller.wait_for(PrefillDone)
            expected = ORACLE.expected(range(N_TOKENS), 1)[0]
            assert (done.n_cached, done.first_token) == (0, expected)
        await home.close()


def not_met() -> Exception:
    return TransferError("the kvstore's segment is not there")


def refused() -> Exception:
    return PrefillRefused(PrefillFailure("no room at all", retryable=False, code="no_room"))


@pytest.mark.parametrize("step", ["fetch", "make_room"])
@pytest.mark.parametrize("make_error", [not_met, refused])
async def test_a_step_of_two_that_run_at_once_fails_with_its_own_error(
    local_cluster: LocalCluster, step: str, make_error: Callable[[], Exception]
) -> None:
    # Made anew: one that outlives the test would keep its cluster by its traceback.
    error = make_error()
    async with local_cluster(FakeEngine, chunk_tokens=16) as cluster:
        worker = cluster.worker("prefill-0")
        home = await cluster.network.bind("home")
        caller = await dial(cluster, "prefill-0")

        async def fail(*_: Any) -> None:
            raise error

        async def go_on(*_: Any) -> None:
            await asyncio.Event().wait()

        for each in ("fetch", "make_room"):
            setattr(worker.caching, each, fail if each == step else go_on)
        backends = ("memory",)
        with TransferEngine.open("caller", metadata=cluster.store, backends=backends) as transfer:
            region = transfer.allocate(16 * LAYOUT.block_bytes).region
            address = KvstoreAddress(WorkerId("home"), 1, home.commands)
            await caller.send(_start(region, address))
            (failed,) = await caller.wait_for(PrefillFailed)
        expected = error.failure if isinstance(error, PrefillRefused) else None
        assert failed.reason == (expected.reason if expected else str(error))
        assert failed.retryable == (expected is None)
        await home.close()
