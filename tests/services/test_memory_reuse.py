"""Memory is given to others only once nobody touches it any more, and no byte is sent twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    CachedPrefix,
    Cancel,
    DecodeReserved,
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
)
from halfmoon_protocol.regions import Region
from halfmoon_runtime.channels.network import WorkerLink
from halfmoon_transfer import Lost
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from tests.services.asking import (
    ORACLE,
    GatedEngine,
    address_of,
    chain_of,
    prompt_of,
    reserve,
    start_decode,
    start_prefill,
)

LocalCluster = Callable[..., Any]
R = RequestId("r")


async def said(link: WorkerLink, kind: type) -> Any:
    """The next answer of a kind."""
    async with asyncio.timeout(20):
        while not isinstance(answer := await link.receive(), kind):
            pass
    return answer


async def reserved(cluster: Any, n_tokens: int = 100) -> tuple[WorkerLink, DecodeReserved]:
    """A landing at decode-0, asked for without a conductor."""
    link = await cluster.network.dial(cluster.worker("decode-0").port.commands)
    await link.send(reserve(R, n_tokens, 50))
    return link, await said(link, DecodeReserved)


async def prefilling(cluster: Any, n_tokens: int = 100, **more: Any) -> WorkerLink:
    """Start to prefill a prompt into a landing, without a conductor."""
    _, landed = await reserved(cluster, n_tokens)
    link: WorkerLink = await cluster.network.dial(cluster.worker("prefill-0").port.commands)
    await link.send(start_prefill(R, prompt_of(n_tokens), landed.landing, 50, **more))
    return link


def unsettled(monkeypatch: pytest.MonkeyPatch, transfer: Any, *, owner_answers: bool) -> list[str]:
    """Give up all writes of a transfer engine; the segments that were asked to confirm it."""
    settled: list[str] = []

    def settle(region: Region, timeout_s: float) -> None:
        settled.append(region.segment)
        if not owner_answers:
            raise Lost(f"segment {region.segment}: no answer in {timeout_s} s")

    monkeypatch.setattr(transfer, "is_unsettled", lambda region: True)
    monkeypatch.setattr(transfer, "settle", settle)
    return settled


async def test_a_cancelled_prefill_keeps_its_pages_until_its_pass_is_over_and_writes_no_layer(
    local_cluster: LocalCluster,
) -> None:
    """Its forward pass may go on for longer than decode keeps the pages aside."""
    async with local_cluster(GatedEngine) as cluster:
        prefill, transfer = cluster.worker("prefill-0"), cluster.members["prefill-0"].transfer
        engine = cluster.members["prefill-0"].engine
        engine.gate.clear()
        link = await prefilling(cluster)
        await cluster.until(engine.inside.is_set)
        await link.send(Cancel(request_id=R))
        for _ in range(20):  # time enough to go wrong
            await link.send(Cancel(request_id=RequestId("another")))
            assert (await said(link, PrefillStopped)).request_id == "another"
        assert prefill.pages.n_free < prefill.pages.n_pages
        engine.gate.set()
        assert (await said(link, PrefillStopped)).request_id == R
        assert prefill.pages.n_free == prefill.pages.n_pages
        stats = transfer.stats()
        assert (stats.bytes_written, stats.n_failures) == (0, 0)


async def test_a_cancelled_prefill_says_so_only_when_its_transfers_are_over(
    local_cluster: LocalCluster,
) -> None:
    slow = FaultInjection("memory", FaultPlan(delay_s=0.3))
    async with local_cluster(backends=(slow,)) as cluster:
        transfer = cluster.members["prefill-0"].transfer
        link = await prefilling(cluster)
        await cluster.until(lambda: transfer.stats().n_live > 0)
        await link.send(Cancel(request_id=R))
        await said(link, PrefillStopped)
        assert transfer.stats().n_live == 0


@pytest.mark.parametrize("owner_answers", [True, False])
async def test_a_prefill_says_that_it_has_stopped_once_no_write_can_land_or_that_one_may(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, owner_answers: bool
) -> None:
    """Over TCP bytes of a cancelled write are on their way still: the owner must cut them off."""
    slow = FaultInjection("tcp", FaultPlan(delay_s=0.3))
    async with local_cluster(backends=(slow,)) as cluster:
        transfer = cluster.members["prefill-0"].transfer
        settled = unsettled(monkeypatch, transfer, owner_answers=owner_answers)
        link = await prefilling(cluster)
        await cluster.until(lambda: transfer.stats().n_live > 0)
        await link.send(Cancel(request_id=R))
        stopped = await said(link, PrefillStopped)
        assert settled == ["decode-0"]
        assert stopped.landing_in_doubt is not owner_answers


@pytest.mark.parametrize("owner_answers", [True, False])
async def test_kv_that_was_written_again_is_done_once_the_first_writes_can_land_no_more(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, owner_answers: bool
) -> None:
    lossy = FaultInjection("tcp", FaultPlan(seed=3, drop_rate=0.5))
    async with local_cluster(backends=(lossy,)) as cluster:
        transfer = cluster.members["prefill-0"].transfer
        settled = unsettled(monkeypatch, transfer, owner_answers=owner_answers)
        link = await prefilling(cluster)
        if owner_answers:
            await said(link, PrefillDone)
        else:
            failed = await said(link, PrefillFailed)
            assert (failed.culprit, failed.landing_in_doubt) == ("decode-0", True)
        assert transfer.stats().n_retries > 0 and settled


@pytest.mark.parametrize("owner_answers", [True, False])
async def test_room_at_a_kvstore_is_returned_once_no_byte_can_land_there_or_runs_out(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, owner_answers: bool
) -> None:
    """Otherwise bytes of a put that was given up could land in the block of another one."""
    async with local_cluster(GatedEngine) as cluster:
        kvstore, prefill = cluster.worker("kvstore-0"), cluster.members["prefill-0"]
        engine = prefill.engine
        settled = unsettled(monkeypatch, prefill.transfer, owner_answers=owner_answers)

        def n_reserved() -> int:
            tiers = kvstore.block_store.tiers
            return 0 if tiers is None else tiers.memory.n_reserved

        engine.gate.clear()
        hashes = chain_of(prompt_of(100))
        link = await prefilling(cluster, block_hashes=hashes, store_in=address_of(cluster))
        await cluster.until(lambda: engine.inside.is_set() and n_reserved() > 0)
        await link.send(Cancel(request_id=R))
        engine.gate.set()
        await said(link, PrefillStopped)
        assert settled == ["decode-0", "kvstore-0"]
        assert (n_reserved() == 0) is owner_answers


async def test_a_cancelled_decode_keeps_its_pages_until_its_step_is_over(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(GatedEngine) as cluster:
        decode = cluster.worker("decode-0")
        engine = cluster.members["decode-0"].engine
        link, landed = await reserved(cluster, 40)
        prefill = await cluster.network.dial(cluster.worker("prefill-0").port.commands)
        await prefill.send(start_prefill(R, prompt_of(40), landed.landing, 50))
        done = await said(prefill, PrefillDone)
        engine.gate.clear()
        start = start_decode(R, done.first_token, 40, 50)
        await link.send(start)
        await cluster.until(engine.inside.is_set)
        await link.send(Cancel(request_id=R))
        await link.send(reserve("other", 1, 2))
        fresh = (await said(link, DecodeReserved)).landing.pages
        assert not set(fresh) & set(landed.landing.pages)
        assert decode.pages.n_free == decode.pages.n_pages - len(landed.landing.pages) - 1
        engine.gate.set()
        await cluster.until(lambda: decode.pages.n_free == decode.pages.n_pages - 1)
        await link.send(Cancel(request_id=RequestId("other")))
        await cluster.settled()


async def test_every_block_is_sent_once_whatever_the_chunks(local_cluster: LocalCluster) -> None:
    n_tokens = 16 * 9 + 5
    for chunk_tokens in (7, 40, 512):
        async with local_cluster(chunk_tokens=chunk_tokens) as cluster:
            await cluster.generate(prompt_of(n_tokens), 1)
            await cluster.settled()
            sent = cluster.members["prefill-0"].transfer.stats().bytes_written
            # Nine whole blocks and the last one to decode, the whole ones to the kvstore.
            assert sent == (10 + 9) * ORACLE.layout.block_bytes


async def test_a_prompt_that_is_cached_to_its_last_token_computes_at_least_one(
    local_cluster: LocalCluster,
) -> None:
    """Also when whoever places it says that all of it is cached."""
    prompt = prompt_of(64)
    async with local_cluster() as cluster:
        await cluster.generate(prompt, 1)
        await cluster.settled()
        cached = CachedPrefix(address_of(cluster), 4)
        link = await prefilling(cluster, 64, block_hashes=chain_of(prompt), cached=cached)
        done = await said(link, PrefillDone)
        assert (done.first_token, done.n_cached) == (ORACLE.expected(prompt, 1)[0], 48)
