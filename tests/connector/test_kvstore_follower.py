"""What a server knows of the kvstores' blocks, as kvstores come, change and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from structlog.testing import capture_logs

from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksSnapshot, SnapshotBlocks, WorkerInfo
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.channels.network import PeerUnreachable, Port
from halfmoon_runtime.membership import MEMBERS
from halfmoon_vllm.kvstore_follower import KvstoreFollower

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
