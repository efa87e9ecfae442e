"""A kvstore node as its clients meet it: over a link, with bytes moved by transfer."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol import error_codes
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash, ConductorId, Ticket, WorkerId
from halfmoon_protocol.kv_events import (
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    encode_payload,
)
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    BlocksSnapshot,
    CommitBlocks,
    DropBlocks,
    Hello,
    KvstoreAddress,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    PrefillLoad,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    Welcome,
)
from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.channels.network import WorkerLink
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.membership import list_members
from halfmoon_runtime.observability.otel import OtelTracer
from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, TierOutcome, WriteBack
from halfmoon_testing.full_disk import no_files_above
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece
from tests.kvstore import conftest as kvstore_nodes
from tests.kvstore.conftest import Node

#: Blocks of 64 KiB, so that a store of 1 MiB has 16 slots.
LAYOUT = KvLayout(model="m", n_layers=4, n_kv_heads=4, head_dim=32, dtype="float32", block_size=16)
N_SLOTS = 16


#: Where puts fill the memory, so that half of the blocks leave it.
HALF = {"high_watermark": 0.75, "low_watermark": 0.5}
#: A reader may have to wait for the disk, and is to get everything nevertheless.
PATIENT = {**HALF, "promotion_wait_s": 60}
TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


def chain(n_blocks: int, salt: str = "") -> tuple[tuple[BlockHash, ...], tuple[int, ...]]:
    tokens = tuple(range(n_blocks * 16))
    return tuple(block_hashes(tokens, model="m", salt=salt, block_size=16)), tokens


@dataclass
class Client:
    """One caller, with memory of its own."""

    link: WorkerLink
    transfer: TransferEngine
    n_asked: int = 0

    def ticket(self) -> Ticket:
        self.n_asked += 1
        return Ticket(str(self.n_asked))

    async def ask(self, question: Message) -> Any:
        await self.link.send(question)
        return await self.answer()

    async def answer(self) -> Any:
        while True:
            answer = await self.link.receive()
            if not isinstance(answer, KvEventBatch | KvstoreLoad):
                return answer

    async def reserve(
        self, hashes: tuple[BlockHash, ...], tokens: tuple[int, ...], **more: Any
    ) -> Any:
        fields = {"ticket": self.ticket(), "layout": LAYOUT, "parent": None, **more}
        return await self.ask(ReserveBlocks(hashes=hashes, token_ids=tokens, **fields))

    async def write(self, reserved: BlocksReserved) -> tuple[int, ...]:
        """Write each block's own hash, repeated; the checksums."""
        checksums = []
        memory = self.transfer.allocate(LAYOUT.block_bytes)
        for place in reserved.places:
            memory.view[:] = place.hash * (LAYOUT.block_bytes // len(place.hash))
            checksums.append(xxhash.xxh3_64_intdigest(memory.view))
            piece = Piece(memory.region, 0, reserved.region, place.offset, LAYOUT.block_bytes)
            await self.transfer.submit("write", [piece])
        return tuple(checksums)

    async def put(self, hashes: tuple[BlockHash, ...], tokens: tuple[int, ...]) -> None:
        reserved = await self.reserve(hashes, tokens)
        assert isinstance(reserved, BlocksReserved)
        checksums = await self.write(reserved)
        answer = await self.ask(CommitBlocks(ticket=reserved.ticket, checksums=checksums))
        assert isinstance(answer, BlocksCommitted)

    async def lease(
        self,
        hashes: tuple[BlockHash, ...],
        layout: KvLayout = LAYOUT,
        trace: TraceContext | None = None,
    ) -> Any:
        ticket = self.ticket()
        return await self.ask(LeaseBlocks(ticket=ticket, layout=layout, hashes=hashes, trace=trace))

    async def events(self, n: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < n:
            answer = await self.link.receive()
            if isinstance(answer, KvEventBatch):
                found.extend(answer.events)
        return found


@asynccontextmanager
async def open_node(*disk_and_tracer: Any, **settings: Any) -> AsyncIterator[Node]:
    async with kvstore_nodes.open_node(FakeClock(), *disk_and_tracer, **settings) as node:
        yield node


async def dial(node: Node, name: str = "reader") -> Client:
    transfer = TransferEngine.open(name, metadata=node.store, backends=("memory",))
    node.engines.append(transfer)
    info = node.worker.info
    return Client(await node.network.dial(info.commands, info.events), transfer)


async def test_what_is_put_is_found_by_another_client_byte_for_byte_once_it_is_committed() -> None:
    hashes, tokens = chain(3)
    async with open_node() as node:
        writer, reader = await dial(node, "writer"), await dial(node)
        reserved = await writer.reserve(hashes, tokens)
        checksums = await writer.write(reserved)
        assert (await reader.lease(hashes)).places == ()
        await writer.ask(CommitBlocks(ticket=reserved.ticket, checksums=checksums))
        leased = await reader.lease(hashes)
        assert isinstance(leased, BlocksLeased)
        assert tuple(place.hash for place in leased.places) == hashes
        memory = reader.transfer.allocate(LAYOUT.block_bytes)
        for place in leased.places:
            piece = Piece(memory.region, 0, leased.region, place.offset, LAYOUT.block_bytes)
            await reader.transfer.submit("read", [piece])
            assert bytes(memory.view[:16]) == place.hash
            assert xxhash.xxh3_64_intdigest(memory.view) == place.checksum


async def test_blocks_that_are_stored_or_being_written_are_not_reserved_again() -> None:
    hashes, tokens = chain(4)
    async with open_node() as node:
        first, second = await dial(node, "a"), await dial(node, "b")
        await first.put(hashes[:2], tokens[:32])
        assert [p.hash for p in (await first.reserve(hashes[:3], tokens[:48])).places] == [
            hashes[2]
        ]
        assert [p.hash for p in (await second.reserve(hashes, tokens)).places] == [hashes[3]]


async def test_a_put_that_is_revoked_or_never_committed_gives_its_slots_back() -> None:
    async with open_node(reservation_ttl_s=5) as node:
        client = await dial(node)
        reserved = await client.reserve(*chain(N_SLOTS))
        assert len(reserved.places) == N_SLOTS
        full = await client.reserve(*chain(N_SLOTS, salt="x"))
        assert isinstance(full, KvstoreRefused) and full.retry_after_s > 0
        await client.link.send(RevokeBlocks(ticket=reserved.ticket))
        late = await client.reserve(*chain(N_SLOTS, salt="x"))
        assert len(late.places) == N_SLOTS
        node.clock.advance(6)
        answer = await client.ask(CommitBlocks(ticket=late.ticket, checksums=(1,) * N_SLOTS))
        assert isinstance(answer, KvstoreRefused)
        assert isinstance(await client.reserve(*chain(N_SLOTS)), BlocksReserved)
        assert node.worker.tiers is not None
        node.worker.tiers.check()


async def test_a_leased_block_is_not_evicted_until_it_is_released_or_not_renewed() -> None:
    async with open_node(lease_ttl_s=3, high_watermark=1.0) as node:
        client = await dial(node)
        await client.put(*chain(N_SLOTS))
        lease = await client.lease(chain(N_SLOTS)[0])
        assert isinstance(await client.reserve(*chain(N_SLOTS, salt="x")), KvstoreRefused)
        await client.link.send(ReleaseLease(ticket=lease.ticket))
        await client.put(*chain(N_SLOTS, salt="x"))
        await client.lease(chain(N_SLOTS, salt="x")[0])
        assert isinstance(await client.reserve(*chain(N_SLOTS, salt="y")), KvstoreRefused)
        node.clock.advance(4)
        assert len((await client.reserve(*chain(N_SLOTS, salt="y"))).places) == N_SLOTS


async def test_while_a_long_read_runs_its_lease_is_renewed_and_then_ended() -> None:
    hashes, tokens = chain(3)
    async with open_node(lease_ttl_s=0.6) as node:
        client = await dial(node)
        await client.put(hashes, tokens)
        tiers = node.worker.tiers
        assert tiers is not None
        kvstores = KvstoreClients(node.network, timeout_s=10)
        info = node.worker.info
        order = ReplicateBlocks(
            ticket=client.ticket(),
            source=KvstoreAddress(info.worker_id, info.generation, info.commands),
            layout=LAYOUT,
            hashes=hashes,
            parent=None,
            token_ids=tokens,
        )
        copier = ReplicaReader(kvstores, client.transfer, client.transfer.allocate(1))
        async with asyncio.timeout(60), copier.leased(order) as lease:
            assert len(lease.places) == 3
            for _ in range(4):
                node.clock.advance(0.5)
                while tiers.memory.first_release_s(node.clock.now()) < 0.6:
                    await asyncio.sleep(0.01)
            tiers.on_tick(node.clock.now())
            assert tiers.memory.n_leased == 3
        async with asyncio.timeout(60):
            while tiers.memory.n_leased:
                await asyncio.sleep(0.01)
        await kvstores.close()


async def test_stored_and_removed_blocks_are_announced_with_their_parents() -> None:
    hashes, tokens = chain(N_SLOTS)
    other, other_tokens = chain(1, salt="x")
    async with open_node(high_watermark=1.0) as node:
        listener, client = await dial(node, "listener"), await dial(node)
        await client.put(hashes[:2], tokens[:32])
        await client.put(hashes, tokens)
        await client.put(other, other_tokens)
        first, second, removed, third = await listener.events(4)
        assert first == BlockStored(
            block_hashes=hashes[:2],
            parent_block_hash=None,
            token_ids=(),
            block_size=16,
            medium="CPU",
        )
        assert second.block_hashes == hashes[2:]
        assert second.parent_block_hash == hashes[1]
        # The chain's last block goes first: the others are of no use without their parents.
        assert removed == BlockRemoved(block_hashes=(hashes[-1],), medium="CPU")
        assert third.block_hashes == other


@pytest.mark.parametrize("wanted", [False, True])
async def test_tokens_are_announced_with_each_stored_block_if_a_setting_says_so(
    wanted: bool,
) -> None:
    hashes, tokens = chain(4)
    async with open_node(event_tokens=wanted) as node:
        publish_kv = node.port.publish_kv
        payloads: list[bytes] = []

        async def recorded(events: Sequence[KvEvent]) -> int:
            payloads.append(encode_payload(events, 0.0))
            return await publish_kv(events)

        node.port.publish_kv = recorded  # type: ignore[method-assign]
        client = await dial(node)
        await client.put(hashes[:2], tokens[:32])
        await client.put(hashes, tokens)
        rows = [row for payload in payloads for row in msgspec.msgpack.decode(payload)[1]]
    announced = [(row["block_hashes"], row["token_ids"]) for row in rows]
    assert announced == [
        (list(hashes[:2]), list(tokens[:32]) if wanted else []),
        (list(hashes[2:]), list(tokens[32:]) if wanted else []),
    ]


async def test_above_the_watermark_room_is_made_ahead_of_demand() -> None:
    hashes, tokens = chain(N_SLOTS)
    async with open_node(**HALF) as node:
        listener, client = await dial(node, "listener"), await dial(node)
        await client.put(hashes, tokens)
        stored, removed = await listener.events(2)
        assert stored.block_hashes == hashes
        assert set(removed.block_hashes) == set(hashes[8:])


async def test_a_lease_says_to_its_reader_and_its_span_what_is_from_the_disk(
    tmp_path: Path,
) -> None:
    hashes, tokens = chain(N_SLOTS)
    exporter, tracer = traced()
    disk = SegmentFolder(tmp_path, 4 << 20, generation=1)
    async with open_node(disk, tracer, read_ahead=0, **PATIENT) as node:
        listener, client = await dial(node, "listener"), await dial(node)
        await client.put(hashes, tokens)
        await listener.events(1 + N_SLOTS)  # until half of them are on the disk alone
        leased = await client.lease(hashes[:10], trace=TRACE)
        assert (len(leased.places), leased.n_from_disk) == (10, 2)
        strange = msgspec.structs.replace(LAYOUT, block_size=32)
        assert isinstance(await client.lease(hashes, strange, TRACE), KvstoreRefused)
        assert (await client.lease(hashes[:1])).n_from_disk == 0  # and no span
    held, refused = exporter.get_finished_spans()
    assert (held.attributes or {})["halfmoon.blocks_from_disk"] == 2
    assert "block_size" in (refused.status.description or "")


def traced() -> tuple[InMemorySpanExporter, OtelTracer]:
    exporter = InMemorySpanExporter()
    return exporter, OtelTracer("halfmoon-kvstore", "kvstore-0", SimpleSpanProcessor(exporter))


class StuckDisk(SegmentFolder):
    """Brings nothing back to memory before it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 4 << 20, generation=1)
        self.go = threading.Event()

    def perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> TierOutcome:
        if isinstance(command, Promote):
            assert self.go.wait(60)
        return super().perform(command, view)


@pytest.mark.parametrize("how", ["released", "gone"])
async def test_a_lease_that_waits_may_be_given_up_and_its_span_ends(
    tmp_path: Path, how: str
) -> None:
    hashes, tokens = chain(N_SLOTS)
    exporter, tracer = traced()
    disk = StuckDisk(tmp_path)
    async with open_node(disk, tracer, **PATIENT) as node:
        listener, client = await dial(node, "listener"), await dial(node)
        await client.put(hashes, tokens)
        await listener.events(1 + N_SLOTS)  # until half of them are on the disk alone
        ticket = client.ticket()
        wanted = LeaseBlocks(ticket=ticket, layout=LAYOUT, hashes=hashes, trace=TRACE)
        await client.link.send(wanted)
        if how == "released":
            await client.link.send(ReleaseLease(ticket=ticket))
        else:  # which shows when it is to be answered something
            await client.link.send(SnapshotBlocks())
            await client.link.close()
        async with asyncio.timeout(60):
            while not exporter.get_finished_spans():
                await asyncio.sleep(0.005)
        disk.go.set()
    (span,) = exporter.get_finished_spans()
    assert [event.name for event in span.events] == (["given up"] if how == "released" else [])
    assert span.status.is_ok == (how == "released")


async def test_on_its_way_between_tiers_a_block_is_removed_and_stored(tmp_path: Path) -> None:
    hashes, tokens = chain(N_SLOTS)
    disk = SegmentFolder(tmp_path, 4 << 20, generation=1)
    async with open_node(disk, read_ahead=0, **PATIENT) as node:
        listener, client = await dial(node, "listener"), await dial(node)
        await client.put(hashes, tokens)
        [stored, *moves] = await listener.events(1 + 2 * N_SLOTS // 2)
        assert stored.block_hashes == hashes
        for removed, came in zip(moves[::2], moves[1::2], strict=True):
            assert removed == BlockRemoved(block_hashes=came.block_hashes, medium="CPU")
            [block] = came.block_hashes
            parent = hashes[hashes.index(block) - 1]
            assert came == BlockStored(
                block_hashes=(block,),
                parent_block_hash=parent,
                token_ids=(),
                block_size=16,
                medium="STORAGE",
            )
        assert {m.block_hashes[0] for m in moves} == set(hashes[8:])
        leased = await client.lease(hashes[:9])
        assert [place.hash for place in leased.places] == list(hashes[:9])
        up = await listener.events(2)
        assert [(e.block_hashes[0], e.medium) for e in up] == [
            (hashes[8], "STORAGE"),
            (hashes[8], "CPU"),
        ]
        snapshot = await client.ask(SnapshotBlocks())
        assert set(snapshot.hashes) == set(hashes)
    disk.close()


async def test_a_snapshot_tells_all_that_is_stored_and_the_sequence_it_is_after() -> None:
    hashes, tokens = chain(3)
    async with open_node() as node:
        client = await dial(node)
        assert await client.ask(SnapshotBlocks()) == BlocksSnapshot(
            sequence=-1, hashes=(), room_bytes=1 << 20
        )
        await client.put(hashes[:1], tokens[:16])
        await client.put(hashes, tokens)
        snapshot = await client.ask(SnapshotBlocks())
        assert snapshot.sequence == 1
        assert set(snapshot.hashes) == set(hashes)
        pages = [await client.ask(SnapshotBlocks(page=2)), await client.answer()]
        assert [(page.n_before, page.n_after) for page in pages] == [(0, 1), (2, 0)]
        assert {block for page in pages for block in page.hashes} == set(hashes)


async def test_a_renewal_is_answered_and_one_of_nothing_is_refused() -> None:
    hashes, tokens = chain(1)
    async with open_node() as node:
        client = await dial(node)
        await client.put(hashes, tokens)
        lease = LeaseBlocks(ticket=Ticket("r"), layout=LAYOUT, hashes=hashes)
        leased = await client.ask(lease)
        renewed = await client.ask(RenewLease(ticket=Ticket("r")))
        assert renewed == LeaseRenewed(ticket=Ticket("r"), expires_s=leased.expires_s)
        await client.link.send(ReleaseLease(ticket=Ticket("r")))
        refused = await client.ask(RenewLease(ticket=Ticket("r")))
        assert isinstance(refused, KvstoreRefused)
        assert refused.code == error_codes.NOT_HELD


async def test_the_first_put_fixes_the_layout_and_all_conductors_of_a_name_hear_of_it() -> None:
    async with open_node() as node:
        conductors, client = [await dial(node) for _ in range(2)], await dial(node)
        hello = Hello(conductor_id=ConductorId("c"), session=1)
        for conductor in conductors:
            assert (await conductor.ask(hello)).worker.layout is None
        await client.put(*chain(1))
        for conductor in conductors:
            while not isinstance(welcome := await conductor.link.receive(), Welcome):
                pass
            assert welcome.worker.layout == LAYOUT
            assert welcome.worker.n_blocks == N_SLOTS
        assert (await list_members(node.store))[WorkerId("kvstore-0")].layout == LAYOUT


async def test_what_can_not_be_put_or_read_is_refused_by_name() -> None:
    hashes, tokens = chain(1)
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    huge = msgspec.structs.replace(LAYOUT, n_layers=80, n_kv_heads=8, head_dim=128)
    async with open_node() as node:
        client = await dial(node)
        answer = await client.reserve(hashes, tokens, layout=huge)
        assert isinstance(answer, KvstoreRefused)
        assert str(huge.block_bytes) in answer.reason and str(1 << 20) in answer.reason
        for n_tokens in (0, 15, 17):
            answer = await client.reserve(hashes, tuple(range(n_tokens)))
            assert isinstance(answer, KvstoreRefused), n_tokens
        # What is for others is dropped.
        await client.link.send(PrefillLoad(n_queued=1, queued_tokens=1, free_pages=1, n_pages=1))
        await client.put(hashes, tokens)
        for answer in (
            await client.reserve(hashes, tokens, layout=other),
            await client.lease(hashes, layout=other),
        ):
            assert isinstance(answer, KvstoreRefused)
            assert "float32" in answer.reason and "bfloat16" in answer.reason


def test_every_eviction_policy_there_is_can_be_chosen_and_what_is_no_setting_is_refused() -> None:
    for name in EVICTION_POLICIES:
        assert KvstoreSettings(eviction=name).eviction == name
    with pytest.raises(ValueError, match="eviction"):
        KvstoreSettings(eviction="lur")
    for text in ("lab", "lab=x", "=4", "lab=1,lab=2", "lab=-1", "lab=nan"):
        with pytest.raises(ValueError, match="tenant_quotas_mib"):
            KvstoreSettings(tenant_quotas_mib=text)


async def test_a_tenant_over_its_quota_pays_with_its_own_blocks() -> None:
    theirs, their_tokens = chain(4, salt="shop")
    async with open_node(tenant_quotas_mib="lab=0.25,*=0.5") as node:  # 4 blocks, and 8
        client = await dial(node)
        for name in ("one", "two", "three"):
            hashes, tokens = chain(3, salt=name)
            reserved = await client.reserve(hashes, tokens, tenant="lab")
            await client.ask(CommitBlocks(ticket=reserved.ticket, checksums=(0,) * 3))
        await client.put(theirs, their_tokens)
        assert (await client.lease(theirs)).places != ()
        hashes, tokens = chain(5, salt="four")
        assert len((await client.reserve(hashes, tokens, tenant="lab")).places) == 4
        refused = await client.reserve(*chain(1, salt="five"), tenant="lab")
        assert isinstance(refused, KvstoreRefused) and refused.retry_after_s > 0
        assert "tenant lab has 4 of the 4 blocks" in refused.reason
        assert node.worker.tiers is not None
        node.worker.tiers.check()


# -- what a listener believes ------------------------------------------------------------------


class UnluckyDisk(SegmentFolder):
    """Fails, or has other bytes than were written, now and then."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        super().__init__(path, 4 << 20, generation=1)
        self.dice = dice

    def perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> TierOutcome:
        outcome = super().perform(command, view)
        if isinstance(command, Erase) or self.dice.random() < 0.85:
            return outcome
        return self.dice.choice(("failed", "corrupt"))


class Believer:
    """Hears all KV events, and believes them: one who counts media, one who ignores them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.by_medium: dict[BlockHash, str] = {}
        self.blocks: set[BlockHash] = set()
        self.wrong: list[str] = []

    async def listen(self) -> None:
        while True:
            batch = await self._client.link.receive()
            for event in batch.events if isinstance(batch, KvEventBatch) else ():
                self.hear(event)

    def hear(self, event: Any) -> None:
        for block in event.block_hashes:
            if isinstance(event, BlockStored):
                if block in self.by_medium:
                    self.wrong.append(f"{block.hex()} stored twice")
                self.by_medium[block] = str(event.medium)
                self.blocks.add(block)
            else:
                if self.by_medium.pop(block, None) != event.medium:
                    self.wrong.append(f"{block.hex()} removed from {event.medium}, was not there")
                self.blocks.discard(block)


@pytest.mark.parametrize("watermarks", [(0.75, 0.5), (1.0, 1.0)], ids=["usual", "full"])
@pytest.mark.random_seeds(3)
async def test_what_the_events_say_is_what_the_store_holds_whatever_is_done_to_it(
    tmp_path: Path, seed: int, watermarks: tuple[float, float]
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    high, low = watermarks
    disk = UnluckyDisk(tmp_path, dice)
    async with open_node(
        disk, high_watermark=high, low_watermark=low, promotion_wait_s=60, hard_pin_share=0.2
    ) as node:
        believer = Believer(await dial(node, "listener"))
        listening = asyncio.create_task(believer.listen())
        client = await dial(node)
        known = [chain(dice.randrange(2, 10), salt=str(i)) for i in range(12)]
        held: list[Ticket] = []
        for n_done in range(1500):
            tiers = node.worker.tiers  # there from the first reservation on
            if n_done >= 150 and tiers is not None and tiers.counts.evicted > 10:
                break
            hashes, tokens = dice.choice(known)
            match dice.randrange(8):
                case 0 | 1 | 2:
                    reserved = await client.reserve(hashes, tokens)
                    if isinstance(reserved, BlocksReserved):
                        checksums = await client.write(reserved)
                        if dice.random() < 0.1:
                            await client.link.send(RevokeBlocks(ticket=reserved.ticket))
                        else:
                            await client.ask(CommitBlocks(reserved.ticket, checksums))
                case 3 | 4:
                    leased = await client.lease(hashes[: dice.randrange(1, len(hashes) + 1)])
                    held.append(leased.ticket)
                case 5:
                    while held:
                        await client.link.send(ReleaseLease(ticket=held.pop()))
                case 6:
                    await client.link.send(DropBlocks(hashes=hashes[::-1][: dice.randrange(3)]))
                case 7:
                    node.clock.advance(dice.choice((0.1, 3.0, 40.0)))
        while held:
            await client.link.send(ReleaseLease(ticket=held.pop()))
        node.clock.advance(60)
        assert tiers is not None

        def agree() -> bool:
            here = dict.fromkeys(tiers.memory.hashes(), "CPU")
            below = dict.fromkeys(tiers.disk.hashes(), "STORAGE")
            quiet = not (tiers.n_writing or tiers.n_promoting)
            return quiet and believer.by_medium == below | here

        async with asyncio.timeout(60):
            while not agree():
                await asyncio.sleep(0.01)
        assert not believer.wrong
        snapshot = await client.ask(SnapshotBlocks())
        assert believer.blocks == set(snapshot.hashes)
        assert tiers.counts.evicted > 10, "too little happened for this to mean anything"
        tiers.check()
        listening.cancel()
    disk.close()


async def test_a_node_whose_disk_had_no_room_uses_it_once_there_is_some(tmp_path: Path) -> None:
    def missing(node: Node) -> Any:
        return node.worker.metrics()["halfmoon_kvstore_disk_missing_bytes"][1]

    disk = SegmentFolder(tmp_path, 8 << 20, generation=1)
    async with open_node(disk) as node:
        client = await dial(node)
        with no_files_above(1 << 20):
            await client.put(*chain(1))
        tiers = node.worker.tiers
        assert tiers is not None
        assert missing(node) > 0
        assert tiers.disk.n_slots == 0
        while missing(node) or tiers.disk.n_slots == 0:
            node.clock.advance(30)
            await asyncio.sleep(0.01)
        for i in itertools.count():
            if len(tiers.hashes()) > N_SLOTS:  # more than memory holds
                break
            reserved = await client.reserve(*chain(1, f"prompt {i}"))
            if isinstance(reserved, BlocksReserved):  # else later: others are written first
                checksums = await client.write(reserved)
                await client.ask(CommitBlocks(ticket=reserved.ticket, checksums=checksums))
    disk.close()
