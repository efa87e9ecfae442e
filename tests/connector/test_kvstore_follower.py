"""What a server knows of the kvstores' blocks as these come and go, and what it loads or stores."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from halfmoon_metadata import MemoryStore
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksSnapshot, KvstoreAddress, SnapshotBlocks, WorkerInfo
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.channels.network import PeerUnreachable, Port
from halfmoon_runtime.membership import MEMBERS
from halfmoon_vllm.cache_layout import CacheLayout
from halfmoon_vllm.kvstore_follower import KvstoreFollower
from halfmoon_vllm.scheduler_side import RequestPart, SchedulerSide

LAYOUT = KvLayout(model="m", n_layers=2, n_kv_heads=2, head_dim=32, dtype="float32", block_size=16)
HASHES = [BlockHash(bytes([i]) * 16) for i in range(6)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


@dataclass
class Kvstore:
    """A kvstore as its clients see it: snapshots and events, no memory."""

    name: str
    port: Port
    held: list[BlockHash]
    sequence: int = -1
    task: "asyncio.Task[None] | None" = None

    async def serve(self) -> None:
        with suppress(PeerUnreachable):
            while True:
                peer, message = await self.port.receive()
                if isinstance(message, SnapshotBlocks):
                    await self.port.send(peer, BlocksSnapshot(self.sequence, tuple(self.held)))

    async def add(self, *hashes: BlockHash) -> None:
        self.held += hashes
        event = BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=(), block_size=16
        )
        self.sequence = await self.port.publish_kv([event])

    async def remove(self, *hashes: BlockHash) -> None:
        self.held = [held for held in self.held if held not in hashes]
        self.sequence = await self.port.publish_kv([BlockRemoved(block_hashes=hashes)])


@dataclass
class Pool:
    """A follower and the kvstores that it follows."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    store: MemoryStore = field(default_factory=MemoryStore)
    kvstores: list[Kvstore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.follower = KvstoreFollower(self.network, self.store, LAYOUT)

    async def join(
        self, name: str, *held: BlockHash, layout: KvLayout | None = LAYOUT, generation: int = 1
    ) -> Kvstore:
        port = await self.network.bind(name)
        kvstore = Kvstore(name, port, list(held))
        kvstore.task = asyncio.create_task(kvstore.serve())
        self.kvstores.append(kvstore)
        info = WorkerInfo(
            worker_id=WorkerId(name),
            role="kvstore",
            generation=generation,
            host="h",
            commands=port.commands,
            events=port.events,
            layout=layout,
        )
        self.store.put(MEMBERS + name, msgspec.json.encode(info))
        return kvstore

    def prefixes(self) -> dict[str, int]:
        return {address.worker_id: n for address, n in self.follower.holders(HASHES)}


@asynccontextmanager
async def following() -> AsyncIterator[Pool]:
    pool = Pool()
    task = asyncio.create_task(pool.follower.run())
    try:
        yield pool
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await pool.network.close()
        for kvstore in pool.kvstores:
            assert kvstore.task is not None
            await kvstore.task


async def test_snapshots_and_events_tell_how_long_a_prefix_each_kvstore_has() -> None:
    async with following() as pool:
        a = await pool.join("a", *HASHES[:2])
        await pool.join("b", *HASHES[:4])
        await until(lambda: pool.prefixes() == {"a": 2, "b": 4})
        assert [address.worker_id for address, _ in pool.follower.holders(HASHES)] == ["b", "a"]
        await a.add(*HASHES[2:])
        await until(lambda: pool.prefixes() == {"a": 6, "b": 4})
        await a.remove(HASHES[1])
        await until(lambda: pool.prefixes() == {"a": 1, "b": 4})


async def test_a_lost_kvstore_is_forgotten_at_once_and_its_next_start_is_followed() -> None:
    async with following() as pool:
        await pool.join("a", *HASHES)
        await until(lambda: pool.prefixes() == {"a": 6})
        for generation, known in ((2, True), (3, False)):
            if not known:  # without a record it is not dialled again
                pool.store.delete(MEMBERS + "a")
            pool.network.kill("a")
            await until(lambda: pool.prefixes() == {} and pool.follower.n_live == 0)
            await pool.join("a", *HASHES[:generation], generation=generation)
            await until(lambda n=generation: pool.prefixes() == {"a": n})  # type: ignore[misc]
            assert pool.follower.holders(HASHES)[0][0].generation == generation


async def test_a_kvstore_of_another_layout_is_not_used_and_named_once() -> None:
    with capture_logs() as logs:
        async with following() as pool:
            await pool.join("a", *HASHES, layout=msgspec.structs.replace(LAYOUT, block_size=32))
            await pool.join("b", *HASHES[:1], layout=None)
            await until(lambda: pool.prefixes() == {"b": 1})
    (line,) = [line for line in logs if line["event"] == "kvstore_not_used"]
    assert "block_size is 16 here, 32 there" in line["reason"]


async def test_all_servers_choose_the_same_home_and_a_preferred_one_comes_first() -> None:
    async with following() as one, following() as other:
        assert one.follower.home_for(HASHES[0], "") is None, "there is none yet"
        for pool in (one, other):
            for name in ("a", "b", "c"):
                await pool.join(name)
            await until(lambda pool=pool: pool.follower.n_live == 3)  # type: ignore[misc]
        homes = [[pool.follower.home_for(h, "") for h in HASHES] for pool in (one, other)]
        names = [[home and home.worker_id for home in found] for found in homes]
        assert names[0] == names[1]
        assert len(set(names[0])) > 1
        preferred = one.follower.home_for(HASHES[0], "b")
        assert preferred is not None and preferred.worker_id == "b"


async def test_a_kvstore_that_changes_its_layout_is_followed_no_more() -> None:
    async with following() as pool:
        await pool.join("a", *HASHES)
        await until(lambda: pool.prefixes() == {"a": 6})
        record = pool.store.get(MEMBERS + "a")
        assert record is not None
        info = msgspec.json.decode(record, type=WorkerInfo)
        other = msgspec.structs.replace(LAYOUT, model="other")
        changed = msgspec.structs.replace(info, layout=other)
        pool.store.put(MEMBERS + "a", msgspec.json.encode(changed))
        await until(lambda: pool.prefixes() == {} and pool.follower.n_live == 0)


async def test_a_lost_record_costs_nothing_while_the_kvstore_answers() -> None:
    async with following() as pool:
        a = await pool.join("a", *HASHES[:2])
        await until(lambda: pool.prefixes() == {"a": 2})
        record = pool.store.get(MEMBERS + "a")
        assert record is not None
        pool.store.delete(MEMBERS + "a")
        await pool.join("b", *HASHES[:1])  # once this one is known, the loss is
        await until(lambda: pool.prefixes() == {"a": 2, "b": 1})
        await a.add(HASHES[2])
        await until(lambda: pool.prefixes() == {"a": 3, "b": 1})
        pool.store.put(MEMBERS + "a", record)
        await pool.join("c", *HASHES[:1])
        await until(lambda: pool.prefixes() == {"a": 3, "b": 1, "c": 1})


async def test_a_kvstore_that_can_not_be_dialled_costs_no_other_one() -> None:
    n_refused = 0
    with capture_logs() as logs:
        async with following() as pool:
            dial = pool.network.dial

            async def dial_all_but_one(commands: str, *where: Any, **more: Any) -> Any:
                nonlocal n_refused
                if commands == bad.port.commands:
                    n_refused += 1
                    raise ValueError("an address that no library takes")
                return await dial(commands, *where, **more)

            pool.network.dial = dial_all_but_one  # type: ignore[method-assign]
            bad = await pool.join("bad", *HASHES[:1])
            await until(lambda: n_refused > 0)
            await pool.join("good", *HASHES[:2])
            await until(lambda: pool.prefixes() == {"good": 2})
            await until(lambda: n_refused > 1)
    failed = [line for line in logs if line["event"] == "kvstore_failed"]
    assert {line["kvstore"] for line in failed} == {"bad"}


#: Two blocks of the pool in one of vLLM's.
CACHE = CacheLayout(LAYOUT, ("layer.0", "layer.1"), 32)
A = KvstoreAddress(WorkerId("a"), 1, "tcp://a")
B = KvstoreAddress(WorkerId("b"), 1, "tcp://b")


@dataclass
class Directory:
    """What kvstores hold, by address."""

    held: dict[KvstoreAddress, set[BlockHash]] = field(default_factory=lambda: {A: set(), B: set()})

    def holders(self, hashes: Sequence[BlockHash]) -> list[tuple[KvstoreAddress, int]]:
        found = []
        for address, held in self.held.items():
            n = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            found += [(address, n)] if n else []
        return sorted(found, key=lambda pair: -pair[1])

    def home_for(self, first: BlockHash, preferred: str) -> KvstoreAddress | None:
        return next(iter(self.held), None)


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def side(directory: Directory) -> SchedulerSide:
    return SchedulerSide(CACHE, directory)


def hashes_of(prompt: Sequence[int], salt: str = "") -> list[BlockHash]:
    return block_hashes(prompt, model="m", salt=salt, block_size=16)


PROMPT = list(range(100, 200))


def part(start: int, stop: int, blocks: Sequence[int] = (7, 3, 9, 4)) -> RequestPart:
    return RequestPart("r", blocks, start == 0, start, stop)


def test_a_hit_is_whole_blocks_and_not_the_last_token(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held[A] = set(hashes_of(PROMPT)[:5])  # 80 tokens: two and a half of its blocks
    side.on_request("r", PROMPT, None)
    assert side.lookup("r", 0) == 64
    assert side.lookup("r", 32) == 32
    assert side.lookup("r", 64) == 0
    directory.held[A] = set(hashes_of(PROMPT[:64]))
    side.on_request("whole", PROMPT[:64], None)
    assert side.lookup("whole", 0) == 32


def test_a_load_names_blocks_places_and_sources(side: SchedulerSide, directory: Directory) -> None:
    hashes = hashes_of(PROMPT)
    directory.held[A], directory.held[B] = set(hashes[:3]), set(hashes[:4])
    side.on_request("r", PROMPT, None)
    assert side.lookup("r", 32) == 32
    side.on_allocated("r", [7, 3], 32)
    (load,) = side.build_orders([], []).loads
    assert load.hashes == tuple(hashes[2:4])
    assert load.places == (6, 7)
    assert load.sources == (B, A)
    later = side.build_orders([], [])
    assert later.loads == () and not later.computes
    assert side.build_orders([part(64, 100)], []).computes


def test_blocks_are_stored_once_in_the_step_in_which_they_begin(side: SchedulerSide) -> None:
    hashes = hashes_of(PROMPT)
    side.on_request("r", PROMPT, None)
    (first,) = side.build_orders([part(0, 40)], []).stores
    assert (first.hashes, first.parent) == (tuple(hashes[:3]), None)
    assert first.places == (14, 15, 6)
    assert first.token_ids == tuple(PROMPT[:48])
    (second,) = side.build_orders([part(40, 100, ())], []).stores
    assert (second.hashes, second.parent) == (tuple(hashes[3:6]), hashes[2])
    assert second.places == (7, 18, 19)
    assert side.build_orders([part(100, 101, ())], []).stores == (), "new tokens are not stored"


def test_what_a_kvstore_has_is_left_out_and_the_rest_goes_there(
    side: SchedulerSide, directory: Directory
) -> None:
    hashes = hashes_of(PROMPT)
    directory.held[B] = set(hashes[:4])
    side.on_request("r", PROMPT, None)
    (order,) = side.build_orders([part(0, 100)], []).stores
    assert order.home == B
    assert (order.hashes, order.parent) == (tuple(hashes[4:6]), hashes[3])


def test_blocks_that_failed_are_not_looked_up_again(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held[A] = set(hashes_of(PROMPT))
    for request in ("lost", "fine"):
        side.on_request(request, PROMPT, None)
        assert side.lookup(request, 0) == 96
    side.on_allocated("lost", [7, 3, 9], 96)
    side.on_allocated("fine", [11, 12, 13], 96)
    side.on_loads_over(["lost", "fine"], {9})
    assert side.lookup("lost", 0) == 0
    assert side.lookup("fine", 0) == 96


def test_salts_and_tenants_have_own_blocks(directory: Directory) -> None:
    directory.held[A] = set(hashes_of(PROMPT))
    for tenant, salt in (("", "s"), ("lab", ""), ("lab", "s")):
        side = SchedulerSide(CACHE, directory, tenant=tenant)
        side.on_request("r", PROMPT, salt)
        assert side.lookup("r", 0) == 0


def test_without_a_kvstore_all_is_counted_as_not_stored(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held.clear()
    side.on_request("r", PROMPT, None)
    assert side.build_orders([part(0, 100)], []).stores == ()
    assert side.counts.take()["blocks_not_stored.no_kvstore"] == 6


def test_a_server_may_only_load_or_only_store(directory: Directory) -> None:
    directory.held[A] = set(hashes_of(PROMPT)[:2])
    loading = SchedulerSide(CACHE, directory, stores=False)
    storing = SchedulerSide(CACHE, directory, loads=False)
    for side in (loading, storing):
        side.on_request("r", PROMPT, None)
    assert (loading.lookup("r", 0), storing.lookup("r", 0)) == (32, 0)
    assert loading.build_orders([part(0, 100)], []).stores == ()
    assert len(storing.build_orders([part(0, 100)], []).stores) == 1


def test_who_was_never_told_of_or_is_preempted_starts_anew(side: SchedulerSide) -> None:
    assert side.lookup("lora", 0) == 0
    assert side.build_orders([part(0, 100)], ["lora"]).stores == ()
    side.on_finished("lora")
    side.on_request("r", PROMPT, None)
    side.build_orders([part(0, 40)], [])
    orders = side.build_orders([part(0, 40, (1, 2, 5, 6))], ["r"])
    assert orders.dropped == ("r",)
    assert orders.stores[0].places == (2, 3, 4)
