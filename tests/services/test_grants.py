"""Keys that open one landing, or one lease, and nothing else: bytes go over real TCP connections.

Each test holds what a peer of the cluster may hold, a key that it was given, and goes beyond it.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import BlockHash, RequestId, Ticket
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    Cancel,
    CommitBlocks,
    DecodeFailed,
    DecodeReserved,
    KvstoreRefused,
    LeaseBlocks,
    PrefillDone,
    PrefillFailed,
    ReleaseLease,
    RenewLease,
    ReserveBlocks,
    RevokeBlocks,
    TokensProduced,
)
from halfmoon_protocol.regions import Region
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import SliceRequest, TcpHello, TcpRequest
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.interface import Op, Overloaded, Piece, Rejected
from halfmoon_workers.decode.nearby_writers import has_writers_nearby
from tests.services.asking import (
    LAYOUT,
    ORACLE,
    GatedEngine,
    chain_of,
    dial,
    prompt_of,
    reserve,
    start_decode,
    start_prefill,
)

LocalCluster = Callable[..., Any]
SIZE = LAYOUT.block_bytes
N_NEW = 50


class Scene:
    """A cluster over TCP, and a peer that has its own memory and connections to its workers."""

    def __init__(self, cluster: Any, peer: TransferEngine) -> None:
        self.cluster, self.peer = cluster, peer
        self.room = peer.allocate(4 * SIZE)
        self.callers: dict[str, WorkerCaller] = {}

    async def caller(self, name: str) -> WorkerCaller:
        if name not in self.callers:
            self.callers[name] = await dial(self.cluster, name)
        return self.callers[name]

    async def say(self, name: str, *messages: Any) -> None:
        await (await self.caller(name)).send(*messages)

    async def ask(self, name: str, question: Any, kind: type) -> Any:
        """The answer of this kind to a question."""
        caller = await self.caller(name)
        n_before = sum(isinstance(message, kind) for message in caller.received)
        await caller.send(question)
        return (await caller.wait_for(kind, n_before + 1))[-1]

    async def move(self, op: Op, region: Region, offset: int, n_bytes: int = SIZE) -> None:
        """Write twos to this place, or read it."""
        if op == "write":
            self.room.view[:n_bytes] = b"\2" * n_bytes
        await self.peer.submit(op, [Piece(self.room.region, 0, region, offset, n_bytes)])

    async def refused(self, op: Op, region: Region, offset: int, why: str) -> None:
        """Check that an access is refused, and changes no byte of its owner."""
        view = self.cluster.memories[region.segment].view
        before, mine = bytes(view[:]), bytes(self.room.view)
        with pytest.raises(Rejected, match=why):
            await self.move(op, region, offset)
        assert bytes(view[:]) == before
        if op == "read":
            assert bytes(self.room.view) == mine

    # -- landings --------------------------------------------------------------------------

    async def reserve(
        self, request_id: str = "a", n_tokens: int = 40, **more: Any
    ) -> DecodeReserved:
        wanted = reserve(request_id, n_tokens, N_NEW, **more)
        landed = await self.ask("decode-0", wanted, DecodeReserved)
        assert isinstance(landed, DecodeReserved)
        return landed

    async def prefill(
        self, landed: DecodeReserved, prompt: list[int], worker: str = "prefill-0"
    ) -> PrefillDone:
        start = start_prefill(landed.request_id, prompt, landed.landing, N_NEW)
        done = await self.ask(worker, start, PrefillDone)
        assert isinstance(done, PrefillDone)
        return done

    # -- blocks ----------------------------------------------------------------------------

    async def reserve_blocks(self, ticket: str, name: int, n_blocks: int = 1) -> BlocksReserved:
        hashes = tuple(BlockHash(bytes([name, i]) * 8) for i in range(n_blocks))
        tokens = (0,) * (n_blocks * LAYOUT.block_size)
        put = ReserveBlocks(Ticket(ticket), LAYOUT, hashes, None, tokens)
        reserved = await self.ask("kvstore-0", put, BlocksReserved)
        assert isinstance(reserved, BlocksReserved)
        return reserved

    async def put(self, ticket: str, name: int, n_blocks: int = 1) -> BlocksReserved:
        reserved = await self.reserve_blocks(ticket, name, n_blocks)
        commit = CommitBlocks(Ticket(ticket), (0,) * n_blocks)
        await self.ask("kvstore-0", commit, BlocksCommitted)
        return reserved

    async def lease(self, ticket: str, name: int, n_blocks: int = 1) -> BlocksLeased:
        hashes = tuple(BlockHash(bytes([name, i]) * 8) for i in range(n_blocks))
        asked = LeaseBlocks(Ticket(ticket), LAYOUT, hashes)
        leased = await self.ask("kvstore-0", asked, BlocksLeased)
        assert isinstance(leased, BlocksLeased)
        return leased


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    @asynccontextmanager
    async def open_scene(engine: Callable[[], Any] = FakeEngine, **settings: Any) -> Any:
        settings = {"backends": ("tcp",), "n_pages": 64, "kvstore_mib": 1, **settings}
        async with local_cluster(engine, **settings) as cluster:
            peer = TransferEngine.open("peer", metadata=cluster.store, backends=("tcp",))
            cluster.stack.callback(peer.close)
            at = Scene(cluster, peer)
            yield at
            for name in ("a", "b", "mine", "victim"):
                await at.say("decode-0", Cancel(request_id=RequestId(name)))
            await cluster.settled()
            for caller in at.callers.values():
                await caller.close()
            for name in ("decode-0", "kvstore-0"):
                cluster.members[name].transfer._regions.check()

    return open_scene


# -- landings ------------------------------------------------------------------------------------


async def test_a_landings_key_writes_its_pages_and_nothing_else(scene: Any) -> None:
    async with scene() as at:
        victim, mine = await at.reserve("victim"), await at.reserve("mine")
        for page in mine.landing.pages:
            await at.move("write", mine.landing.region, page * SIZE)
        for page in set(range(64)) - set(mine.landing.pages):
            await at.refused("write", mine.landing.region, page * SIZE, "grants other ranges")
        last = max(mine.landing.pages)
        await at.refused("write", mine.landing.region, last * SIZE + 1, "grants other ranges")
        await at.refused(
            "read", mine.landing.region, mine.landing.pages[0] * SIZE, "the other direction"
        )
        assert mine.landing.region.key != victim.landing.region.key
        assert mine.landing.region.key != at.cluster.memories["decode-0"].region.key


async def test_pages_that_others_read_are_not_among_those_that_a_landing_writes(
    scene: Any,
) -> None:
    prompt = prompt_of(40)
    async with scene() as at:
        assert await at.cluster.generate(prompt, 4) == ORACLE.expected(prompt, 4)
        landed = await at.reserve(block_hashes=chain_of(prompt))
        assert landed.n_held_blocks == 2
        held, own = landed.landing.pages[:2], landed.landing.pages[2:]
        for page in held:
            await at.refused("write", landed.landing.region, page * SIZE, "grants other ranges")
        await at.move("write", landed.landing.region, own[0] * SIZE)


@pytest.mark.parametrize("end", ["cancelled", "in doubt", "connection lost", "run out"])
async def test_a_write_after_a_landings_end_is_refused_and_the_next_owners_bytes_stay(
    scene: Any, end: str
) -> None:
    ttl_s = 0.3 if end == "run out" else 600.0
    settings = {"landing_ttl_s": ttl_s, "quarantine_s": 600.0}
    async with scene(decode_settings=settings) as at:
        first = await at.reserve("a")
        region, page = first.landing.region, first.landing.pages[0]
        if end != "run out":  # it may have, before a busy machine writes
            await at.move("write", region, page * SIZE)
        if end == "connection lost":
            at.cluster.worker("decode-0")._on_owner_lost(RequestId("a"))
        elif end == "run out":
            await (await at.caller("decode-0")).wait_for(DecodeFailed)
        else:
            cancel = Cancel(request_id=RequestId("a"), landing_in_doubt=end == "in doubt")
            await at.say("decode-0", cancel)
        # A thread of decode may let go of the last write a moment after it was acknowledged.
        batch = at.cluster.worker("decode-0").batch
        await at.cluster.until(lambda: batch.free_pages == 64)
        second = await at.reserve("b")
        assert set(second.landing.pages) == set(first.landing.pages), "they need no rest"
        if end != "run out":
            await at.move("write", second.landing.region, page * SIZE)
        await at.refused("write", region, page * SIZE, "no region of this key")


async def test_a_landing_is_closed_once_it_is_decoded_from(scene: Any) -> None:
    async with scene(GatedEngine) as at:
        landed = await at.reserve("a")
        done = await at.prefill(landed, prompt_of(40))
        engine = at.cluster.members["decode-0"].engine
        engine.gate.clear()
        await at.say("decode-0", start_decode("a", done.first_token, 40, N_NEW))
        await at.cluster.until(engine.inside.is_set)
        region, page = landed.landing.region, landed.landing.pages[0]
        await at.refused("write", region, page * SIZE, "no region of this key")
        engine.gate.set()
        await at.say("decode-0", Cancel(request_id=RequestId("a")))


async def test_a_prefill_that_nobody_can_stop_writes_nothing_into_anothers_pages(
    scene: Any,
) -> None:
    """It has lost its conductor, and decode has given its pages to another request."""
    settings = {"quarantine_s": 600.0}
    async with scene(GatedEngine, n_prefill=2, decode_settings=settings) as at:
        landed = await at.reserve("a")
        cut_off = at.cluster.members["prefill-0"].engine
        cut_off.gate.clear()
        await at.say("prefill-0", start_prefill("a", [5] * 40, landed.landing, N_NEW))
        await at.cluster.until(cut_off.inside.is_set)
        await at.say("decode-0", Cancel(request_id=RequestId("a"), landing_in_doubt=True))
        again = await at.reserve("b")
        assert set(again.landing.pages) == set(landed.landing.pages)
        done = await at.prefill(again, prompt_of(40), "prefill-1")
        pool = at.cluster.memories["decode-0"].view
        before = bytes(pool[:])
        cut_off.gate.set()
        (failed,) = await (await at.caller("prefill-0")).wait_for(PrefillFailed)
        assert "no region of this key" in failed.reason
        assert bytes(pool[:]) == before
        assert done.first_token == ORACLE.expected(prompt_of(40), 1)[0]


class StalledWrite:
    """A write of half a slice, and no more: over a real connection, which only its end ends."""

    def __init__(self, at: Scene, landed: DecodeReserved) -> None:
        transfer = at.cluster.members["decode-0"].transfer
        owner = transfer.descriptor
        address = split_address(owner.endpoints["tcp"].address, 0)
        self.worker = at.cluster.worker("decode-0")
        self.key = landed.landing.region.key
        part = SliceRequest(self.key, landed.landing.pages[0] * SIZE, SIZE)
        write = TcpRequest(tcp_frames.WRITE, 1, owner.generation, False, (part,))
        self.entry = transfer._regions.index._entries[self.key]
        self._socket = socket.create_connection(address)
        self._socket.sendall(
            tcp_frames.encode_hello(TcpHello(owner.name, owner.generation))
            + tcp_frames.encode_request(write)
            + bytes(self.entry.view[part.offset :][: SIZE // 2])  # what is there
        )
        #: Set to let decode cut the connection.
        self.may_be_cut = threading.Event()
        #: Keys whose connections were to be cut.
        self.cuts: list[bytes] = []
        backend = transfer._router.backends["tcp"]
        self._evict, backend.evict = backend.evict, self._evict_later

    def _evict_later(self, key: bytes) -> None:
        """Stand in for all that may take its time: a thread that gets no turn, a busy lock."""
        self.cuts.append(key)
        assert self.may_be_cut.wait(90), "the event loop stood still, or the test failed"
        self._evict(key)

    @property
    def has_begun(self) -> bool:
        return bool(self.entry.n_leases)


async def stalled_write(at: Scene, landed: DecodeReserved) -> StalledWrite:
    """Begin a write that stalls, after those that were acknowledged are over for decode too."""
    index = at.cluster.members["decode-0"].transfer._regions.index
    entry = index._entries[landed.landing.region.key]
    await at.cluster.until(lambda: not entry.n_leases)
    stalled = StalledWrite(at, landed)
    await at.cluster.until(lambda: stalled.has_begun)
    return stalled


async def test_a_write_that_does_not_end_is_cut_off_and_holds_no_other_request(
    scene: Any,
) -> None:
    """Decode waits for it in a thread: its steps go on, and it answers all others."""
    prompt = prompt_of(40)
    async with scene() as at:
        landed = await at.reserve("a")
        stalled = await stalled_write(at, landed)
        await at.say("decode-0", Cancel(request_id=RequestId("a"), landing_in_doubt=True))
        await at.cluster.until(lambda: bool(stalled.cuts))
        assert await at.cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
        again = await at.reserve("b")
        assert set(again.landing.pages).isdisjoint(landed.landing.pages), "they are written to"
        assert stalled.worker.batch.pages_quarantined == len(landed.landing.pages)
        stalled.may_be_cut.set()
        await at.cluster.until(lambda: not stalled.worker.batch.pages_quarantined)
        assert not stalled.has_begun and stalled.cuts == [stalled.key]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_start_waits_for_the_end_of_a_write_and_no_other_request_does(
    scene: Any, cancelled: bool
) -> None:
    prompt = prompt_of(40)
    async with scene() as at:
        landed = await at.reserve("a")
        done = await at.prefill(landed, prompt)
        stalled = await stalled_write(at, landed)
        caller = await at.caller("decode-0")
        start = start_decode("a", done.first_token, 40, N_NEW)
        await caller.send(start)
        await at.cluster.until(lambda: bool(stalled.cuts))
        await caller.send(start)  # said twice, it starts once
        assert await at.cluster.generate(prompt[1:], 20) == ORACLE.expected(prompt[1:], 20)
        batch = stalled.worker.batch
        assert not batch.is_running(RequestId("a")), "its pages are being written to"
        if cancelled:
            await caller.send(Cancel(request_id=RequestId("a")))
            await at.cluster.until(lambda: RequestId("a") not in batch)
            assert batch.pages_quarantined
        stalled.may_be_cut.set()
        if cancelled:
            await at.cluster.until(lambda: batch.free_pages == 64)
            assert not any(isinstance(each, TokensProduced) for each in caller.received)
            return
        (produced, *_) = await caller.wait_for(TokensProduced)
        assert produced.produced[0].token == ORACLE.expected(prompt, 2)[1]


async def test_a_replayed_start_after_its_landings_end_changes_no_request(scene: Any) -> None:
    async with scene() as at:
        landed = await at.reserve("a")
        await at.prefill(landed, [5] * 40)
        await at.say("decode-0", Cancel(request_id=RequestId("a")))
        old = start_prefill("a", [5] * 40, landed.landing, N_NEW)
        for _ in range(3):
            victim = asyncio.create_task(at.cluster.generate(prompt_of(40), 20))
            failed = await at.ask("prefill-0", old, PrefillFailed)
            assert "no region of this key" in failed.reason
            assert await victim == ORACLE.expected(prompt_of(40), 20)


# -- leases --------------------------------------------------------------------------------------


async def test_a_puts_key_opens_its_places_and_nothing_else(scene: Any) -> None:
    async with scene() as at:
        mine = await at.reserve_blocks("1", 1, 2)
        other = await at.reserve_blocks("2", 2)
        for place in mine.places:
            await at.move("write", mine.region, place.offset)
            await at.move("read", mine.region, place.offset)
            await at.refused("read", other.region, place.offset, "grants other ranges")
            await at.refused("write", other.region, place.offset, "grants other ranges")
        await at.refused("write", mine.region, other.places[0].offset, "grants other ranges")
        caller = await at.caller("kvstore-0")
        await caller.send(RevokeBlocks(Ticket("1")), RevokeBlocks(Ticket("2")))


async def test_a_leases_key_reads_its_blocks_and_no_other_leases(scene: Any) -> None:
    async with scene() as at:
        await at.put("1", 1, 2)
        await at.put("2", 2)
        mine, other = await at.lease("3", 1, 2), await at.lease("4", 2)
        for place in mine.places:
            await at.move("read", mine.region, place.offset)
            await at.refused("write", mine.region, place.offset, "the other direction")
            await at.refused("read", other.region, place.offset, "grants other ranges")
        await at.refused("read", mine.region, other.places[0].offset, "grants other ranges")
        nothing = await at.lease("5", 9)
        assert not nothing.places
        await at.refused("read", nothing.region, 0, "no region of this key")
        await at.say("kvstore-0", ReleaseLease(Ticket("3")), ReleaseLease(Ticket("4")))


@pytest.mark.parametrize("end", ["committed", "revoked", "connection lost", "run out"])
async def test_a_write_after_a_puts_end_is_refused_and_the_blocks_stay(
    scene: Any, end: str
) -> None:
    ttl_s = 0.5 if end == "run out" else 600.0
    async with scene(kvstore_settings={"reservation_ttl_s": ttl_s}) as at:
        put = await at.reserve_blocks("1", 1)
        (place,) = put.places
        if end != "run out":  # it may have, before a busy machine writes
            await at.move("write", put.region, place.offset)
        caller = await at.caller("kvstore-0")
        memory = at.cluster.worker("kvstore-0").tiers.memory
        if end == "committed":
            await at.ask("kvstore-0", CommitBlocks(Ticket("1"), (0,)), BlocksCommitted)
        elif end == "revoked":
            await caller.send(RevokeBlocks(Ticket("1")))
        elif end == "connection lost":
            memory.forget_owner(next(iter(memory._reservations))[0])
        await at.cluster.until(lambda: not memory.n_reserved)
        if end != "committed":  # the slot is another's now
            second = await at.reserve_blocks("2", 2)
            assert second.places[0].offset == place.offset
        await at.refused("write", put.region, place.offset, "no region of this key")
        await caller.send(RevokeBlocks(Ticket("2")))


async def test_a_leases_key_ends_with_it_and_lives_on_when_it_is_renewed(scene: Any) -> None:
    async with scene(kvstore_settings={"lease_ttl_s": 1.0}) as at:
        await at.put("1", 1)
        kept, released = await at.lease("2", 1), await at.lease("3", 1)
        (place,) = kept.places
        caller = await at.caller("kvstore-0")
        await caller.send(ReleaseLease(Ticket("3")))
        memory = at.cluster.worker("kvstore-0").tiers.memory
        ran_out = await at.lease("4", 1)
        await at.refused("read", released.region, place.offset, "no region of this key")
        while len(memory._leases) > 1:  # until the fourth has run out
            await caller.send(RenewLease(Ticket("2")))
            await asyncio.sleep(0.05)
        await at.refused("read", ran_out.region, place.offset, "no region of this key")
        await at.move("read", kept.region, place.offset)
        await caller.send(ReleaseLease(Ticket("2")))


async def test_a_node_without_keys_left_refuses_for_a_time(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene() as at:
        await at.put("1", 1)
        transfer = at.cluster.members["kvstore-0"].transfer

        def grant(*_: object) -> Region:
            raise Overloaded("segment kvstore-0 has 65536 grants, the limit; revoke some")

        monkeypatch.setattr(transfer, "grant", grant)
        held, new = ((BlockHash(bytes([n, 0]) * 8),) for n in (1, 3))
        for asked in (
            LeaseBlocks(Ticket("2"), LAYOUT, held),
            ReserveBlocks(Ticket("3"), LAYOUT, new, None, (0,) * LAYOUT.block_size),
        ):
            refused = await at.ask("kvstore-0", asked, KvstoreRefused)
            assert "revoke some" in refused.reason and refused.retry_after_s > 0


# -- the setting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backends", "choice", "uses_grants"),
    [
        (("tcp",), "auto", True),
        (("memory",), "auto", True),
        (("tcp",), "off", False),
        (("shm", "tcp"), "auto", False),
        (("shm", "tcp"), "on", True),
    ],
)
async def test_requests_are_exact_whatever_keys_they_use(
    local_cluster: LocalCluster, backends: tuple[str, ...], choice: str, uses_grants: bool
) -> None:
    settings = {"transfer_grants": choice}
    prompts = [prompt_of(n, n) for n in (5, 100, 300)]
    async with local_cluster(
        backends=backends, decode_settings=settings, kvstore_settings=settings
    ) as cluster:
        decode = cluster.worker("decode-0")
        assert decode.lender.uses_grants == uses_grants
        for prompt in [*prompts, *prompts]:  # the second time from a kvstore, or from kept pages
            assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
        await cluster.settled()
        carried = cluster.members["prefill-0"].transfer.stats().bytes_by_path
        expected = "tcp" if uses_grants and "tcp" in backends else backends[0]
        assert {path for (path, _), n_bytes in carried.items() if n_bytes} == {expected}
        assert len(decode.lender) == 0


def test_landings_have_keys_of_their_own_while_no_writer_could_share_memory() -> None:
    own = a_worker("decode-0", host="here")
    store, far = a_worker("kvstore-0", host="here"), a_worker("prefill-0", host="there")
    assert not has_writers_nearby(own, [own, store, far])
    assert has_writers_nearby(own, [own, far, a_worker("prefill-1", host="here")])
    with TransferEngine.open("a", metadata=MemoryStore(), backends=("shm", "tcp")) as engine:
        region = engine.allocate(1000).region
        lender = GrantLender[str](engine, region, "auto")
        assert lender.lend("first", [(0, 10)], "write", 60.0) == region
        assert lender.on_peers(nearby=False) and not lender.on_peers(nearby=False)
        granted = lender.lend("second", [(0, 10)], "write", 60.0)
        assert granted == lender.lent_to("second") != region == lender.lent_to("first")
        assert lender.on_peers(nearby=True)
        assert lender.lend("third", [(0, 10)], "write", 60.0) == region
        assert lender.take_back("second"), "what is lent stays lent"
        assert not lender.take_back("first") and not lender.take_back("third")
        always = GrantLender[str](engine, region, "on")
        assert not always.on_peers(nearby=True) and always.uses_grants
        never = GrantLender[str](engine, region, "off")
        assert not never.on_peers(nearby=False) and not never.uses_grants


def test_grants_that_no_path_would_check_are_refused_by_name() -> None:
    with TransferEngine.open("a", metadata=MemoryStore(), backends=("shm",)) as engine:
        region = engine.allocate(1000).region
        with pytest.raises(ValueError, match="name tcp in transfer_backends"):
            GrantLender(engine, region, "on")
        assert not GrantLender[str](engine, region, "auto").uses_grants
