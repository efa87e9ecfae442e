"""A prefill worker whose cached blocks are at several kvstores, of which some fail."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    CachedPrefix,
    Cancel,
    DecodeReserved,
    KvstoreAddress,
    PrefillDone,
    PrefillFailed,
)
from halfmoon_runtime.channels.network import WorkerLink
from tests.services.asking import (
    ORACLE,
    address_of,
    chain_of,
    prompt_of,
    reserve,
    start_prefill,
)

LocalCluster = Callable[..., Any]
PROMPT = prompt_of(100)
HASHES = chain_of(PROMPT)
#: What a kvstore may take from a prompt whose last token is always computed.
N_CACHED = 96


@dataclass
class Bench:
    """prefill-0 as a conductor meets it, and kvstores that hold the same prompt."""

    cluster: Any
    link: WorkerLink
    decode: WorkerLink
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def address(self, name: str) -> KvstoreAddress:
        return address_of(self.cluster, name)

    async def prefill(
        self,
        cached: Sequence[KvstoreAddress] = (),
        store_in: KvstoreAddress | None = None,
        n_blocks: int = 6,
    ) -> PrefillDone | PrefillFailed:
        rid = RequestId(f"r{next(self.numbers)}")
        await self.decode.send(reserve(rid, len(PROMPT), 50))
        landed = await said(self.decode, DecodeReserved)
        prefix = CachedPrefix(cached[0], n_blocks, tuple(cached[1:])) if cached else None
        more = {"block_hashes": HASHES, "cached": prefix, "store_in": store_in}
        await self.link.send(start_prefill(rid, PROMPT, landed.landing, 50, **more))
        done: PrefillDone | PrefillFailed = await said(self.link, (PrefillDone, PrefillFailed))
        await self.decode.send(Cancel(request_id=rid))
        return done

    async def cached_at(self, *names: str) -> list[KvstoreAddress]:
        for name in names:
            await self.prefill(store_in=self.address(name))
            worker = self.cluster.worker(name)
            await self.cluster.until(
                lambda worker=worker: worker.tiers and worker.tiers.memory.n_stored == len(HASHES)
            )
        return [self.address(name) for name in names]

    @property
    def replicas(self) -> Any:
        return self.cluster.worker("prefill-0").replicas


async def said(link: WorkerLink, kind: Any) -> Any:
    async with asyncio.timeout(20):
        while not isinstance(answer := await link.receive(), kind):
            pass
    return answer


async def bench_on(cluster: Any) -> Bench:
    prefill = await cluster.network.dial(cluster.worker("prefill-0").port.commands)
    decode = await cluster.network.dial(cluster.worker("decode-0").port.commands)
    return Bench(cluster, prefill, decode)


def came_from(done: PrefillDone | PrefillFailed, name: str) -> bool:
    """The right token, made from blocks of this kvstore."""
    assert isinstance(done, PrefillDone), done
    assert done.first_token == ORACLE.expected(PROMPT, 1)[0]
    return (done.fetched_from, done.n_cached) == (WorkerId(name), N_CACHED)


async def test_of_two_that_are_well_the_first_is_read(local_cluster: LocalCluster) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        sources = await bench.cached_at("kvstore-0", "kvstore-1")
        assert came_from(await bench.prefill(sources), "kvstore-0")
        assert came_from(await bench.prefill(sources[::-1]), "kvstore-1")
        assert bench.replicas.reads == {"first": 2, "another": 0, "none": 0}


async def test_one_that_is_dead_costs_nothing_but_the_next_one_and_is_then_left_out(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        sources = await bench.cached_at("kvstore-0", "kvstore-1")
        await cluster.kill("kvstore-0")
        with capture_logs() as logs:
            assert came_from(await bench.prefill(sources), "kvstore-1")
            assert came_from(await bench.prefill(sources), "kvstore-1")
        left_out = [line for line in logs if line["event"] == "kvstore_left_out"]
        assert [line["kvstore"] for line in left_out] == ["kvstore-0"]
        readings = cluster.worker("prefill-0").metrics()
        assert readings["halfmoon_prefill_kvstores_paused"][1] == 1
        assert readings["halfmoon_prefill_cached_reads_total"][1].values["another",] == 2


async def test_one_that_does_not_answer_is_waited_for_once(local_cluster: LocalCluster) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        [well] = await bench.cached_at("kvstore-1")
        port = await cluster.network.bind("silent")
        silent = KvstoreAddress(WorkerId("silent"), 1, port.commands)
        for _ in range(2):
            assert came_from(await bench.prefill([silent, well]), "kvstore-1")
        async with asyncio.timeout(60):
            await port.receive()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await port.receive()


async def test_a_read_that_fails_under_way_goes_on_at_the_next_one(
    local_cluster: LocalCluster,
) -> None:
    """Its leases are good, but its memory can't be reached."""
    keys = {"transfer_grants": "off"}  # it would lend none of memory that it has not
    async with local_cluster(n_kvstore=2, kvstore_settings=keys) as cluster:
        bench = await bench_on(cluster)
        sources = await bench.cached_at("kvstore-0", "kvstore-1")
        transfer = cluster.members["kvstore-0"].transfer
        transfer.unregister(cluster.memories["kvstore-0"].region)
        assert came_from(await bench.prefill(sources), "kvstore-1")
        assert bench.replicas.health.left_out(cluster.clock.now()) == [sources[0]]
        for name in ("kvstore-0", "kvstore-1"):
            memory = cluster.worker(name).tiers.memory
            await cluster.until(lambda memory=memory: memory.n_leased == 0)


async def test_damaged_bytes_are_said_to_come_from_the_one_that_gave_them(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        dead, damaged = await bench.cached_at("kvstore-0", "kvstore-1")
        await cluster.kill("kvstore-0")
        cluster.memories["kvstore-1"].view[100] ^= 1
        failed = await bench.prefill([dead, damaged])
        assert isinstance(failed, PrefillFailed) and failed.retryable
        assert failed.culprit == "kvstore-1"
        await cluster.until(lambda: HASHES[0] not in cluster.worker("kvstore-1").tiers)
        assert set(bench.replicas.health.left_out(cluster.clock.now())) == {dead, damaged}


async def test_without_any_that_is_well_the_prompt_is_computed(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        sources = await bench.cached_at("kvstore-0", "kvstore-1")
        for name in ("kvstore-0", "kvstore-1"):
            await cluster.kill(name)
        done = await bench.prefill(sources, store_in=sources[0])
        assert isinstance(done, PrefillDone)
        assert (done.first_token, done.n_cached) == (ORACLE.expected(PROMPT, 1)[0], 0)
        assert done.fetched_from is None
        assert bench.replicas.reads == {"first": 0, "another": 0, "none": 1}


async def test_one_that_has_less_is_read_only_if_nobody_has_more(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_kvstore=2) as cluster:
        bench = await bench_on(cluster)
        [full] = await bench.cached_at("kvstore-1")
        empty = bench.address("kvstore-0")
        assert came_from(await bench.prefill([empty, full]), "kvstore-1")
        await cluster.kill("kvstore-1")
        done = await bench.prefill([empty, full])
        assert isinstance(done, PrefillDone) and done.n_cached == 0


async def test_a_request_is_served_from_the_other_replica_when_the_first_one_is_damaged(
    local_cluster: LocalCluster,
) -> None:
    """Through a conductor: its next try leaves the culprit out, and the blocks are not computed."""
    async with local_cluster(n_kvstore=2, n_prefill=2) as cluster:
        bench = await bench_on(cluster)
        await bench.cached_at("kvstore-0", "kvstore-1")
        await cluster.until(lambda: all(cluster.core.index.n_holders(h) == 2 for h in HASHES))
        cluster.memories["kvstore-0"].view[100] ^= 1
        cluster.memories["kvstore-0"].view[-100] ^= 1
        for _ in range(4):
            events = [event async for event in cluster.events(PROMPT, 5)]
            assert [event.token for event in events] == ORACLE.expected(PROMPT, 5)
            assert events[0].n_cached == N_CACHED
