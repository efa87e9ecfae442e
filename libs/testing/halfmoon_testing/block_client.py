"""Put blocks into a kvstore and get them back, for tests and benchmarks.

A block's bytes follow from its hash, so its reader knows which bytes are right. `InstantTiers` has
the same tiers without bytes and waiting, to compare with.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import xxhash

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    CommitBlocks,
    KvstoreAddress,
    KvstoreRefused,
    LeaseBlocks,
    Message,
    Place,
    ReleaseLease,
    ReplicateBlocks,
    ReserveBlocks,
    SnapshotBlocks,
    VerifyBlocks,
    WorkerInfo,
)
from halfmoon_protocol.regions import Region
from halfmoon_runtime.channels.network import Network, WorkerLink
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull
from halfmoon_scheduling.tiers.disk_map import DiskMap
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, WriteBack
from halfmoon_scheduling.tiers.tier_limits import TierLimits
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece

#: Layout with blocks of 4 KiB, one page of a disk.
SMALL_LAYOUT = KvLayout(
    model="m", n_layers=1, n_kv_heads=1, head_dim=32, dtype="float32", block_size=16
)
_ANSWER_S = 60.0


class WrongBytes(Exception):
    """A leased block has wrong bytes, and its checksum does not show it."""

    def __init__(self, block: BlockHash, what: str) -> None:
        super().__init__(f"{what} of block {block.hex()}")
        self.block = block


class DamagedBytes(WrongBytes):
    """A leased block has wrong bytes, as its checksum shows."""


def prompt_blocks(name: int, n_blocks: int) -> list[BlockHash]:
    """Return the blocks of a prompt, which shares none with prompts of other names."""
    return [BlockHash(name.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(n_blocks)]


def block_content(block: BlockHash, n_bytes: int) -> bytes:
    """Return the right bytes of a block, which follow from its hash."""
    start = xxhash.xxh3_128_digest(block)
    return (start * (n_bytes // len(start) + 1))[:n_bytes]


class BlockClient:
    """Call one kvstore, one request after another; a context manager."""

    def __init__(
        self, link: WorkerLink, transfer: TransferEngine, layout: KvLayout = SMALL_LAYOUT
    ) -> None:
        self._link = link
        self._transfer = transfer
        self.layout = layout
        self._tickets = itertools.count(1)
        #: Blocks that fit into the client's memory, read or written at once.
        self._n_room = 64
        self._room = transfer.allocate(self._n_room * layout.block_bytes)
        self._stack = AsyncExitStack()

    @classmethod
    async def dial(
        cls, network: Network, store: MetadataStore, info: WorkerInfo, name: str,
        layout: KvLayout = SMALL_LAYOUT, backends: Sequence[str] = ("shm", "tcp"),
    ) -> Self:  # fmt: skip
        """Connect to a kvstore by its record."""
        link = await network.dial(info.commands, key_id=info.key_id)
        transfer = TransferEngine.open(name, metadata=store, backends=backends)
        client = cls(link, transfer, layout)
        client._stack.push_async_callback(link.close)
        client._stack.callback(transfer.close)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self._stack.aclose()

    async def request(self, question: Message) -> Message:
        """Send a request and return its answer.

        Raises:
            PeerUnreachable: the kvstore is gone.
            TimeoutError: it does not answer.
        """
        await self._link.send(question)
        wanted = getattr(question, "ticket", None)
        async with asyncio.timeout(_ANSWER_S):
            while True:
                answer = await self._link.receive()
                if isinstance(answer, Message) and getattr(answer, "ticket", None) == wanted:
                    return answer

    async def send(self, message: Message) -> None:
        """Send a message that has no answer."""
        await self._link.send(message)

    async def put(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None = None, n_tries: int = 1000
    ) -> int:
        """Store blocks; when refused, or stored in part, retry up to `n_tries` times.

        Returns:
            The number of blocks written; the others were stored already.
        """
        written = 0
        tokens = (0,) * len(hashes) * self.layout.block_size
        for _ in range(n_tries):
            ticket = self._ticket()
            answer = await self.request(
                ReserveBlocks(ticket, self.layout, tuple(hashes), parent, tokens)
            )
            if isinstance(answer, KvstoreRefused):
                if not answer.retry_after_s:
                    raise ValueError(answer.reason)
                await asyncio.sleep(min(answer.retry_after_s, 0.05))
                continue
            assert isinstance(answer, BlocksReserved)
            checksums = [
                checksum
                for start in range(0, len(answer.places), self._n_room)
                for checksum in await self._write(
                    answer.region, answer.places[start : start + self._n_room]
                )
            ]
            committed = await self.request(CommitBlocks(ticket, tuple(checksums)))
            assert isinstance(committed, BlocksCommitted), committed
            written += len(answer.places)
            if not answer.not_stored:
                return written
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{len(hashes)} blocks not stored in {n_tries} tries")

    async def get(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Lease, read and verify the longest stored prefix, and return its blocks.

        Raises:
            WrongBytes: a block has wrong bytes; `DamagedBytes` if its checksum shows it.
        """
        ticket = self._ticket()
        answer = await self.request(LeaseBlocks(ticket, self.layout, tuple(hashes)))
        assert isinstance(answer, BlocksLeased), answer
        size = self.layout.block_bytes
        try:
            for start in range(0, len(answer.places), self._n_room):
                places = answer.places[start : start + self._n_room]
                pieces = [
                    Piece(self._room.region, i * size, answer.region, place.offset, size)
                    for i, place in enumerate(places)
                ]
                await self._transfer.submit("read", pieces)
                for i, place in enumerate(places):
                    view = self._room.view[i * size : (i + 1) * size]
                    if xxhash.xxh3_64_intdigest(view) != place.checksum:
                        raise DamagedBytes(place.hash, "checksum")
                    if view != block_content(place.hash, size):
                        raise WrongBytes(place.hash, "content")
        finally:
            if answer.places:
                await self._link.send(ReleaseLease(ticket))
        return [place.hash for place in answer.places]

    async def abandon_lease(self, hashes: Sequence[BlockHash]) -> None:
        """Lease blocks, and never release the lease."""
        await self.request(LeaseBlocks(self._ticket(), self.layout, tuple(hashes)))

    async def abandon_reservation(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None = None
    ) -> None:
        """Reserve places for blocks, and never write them."""
        tokens = (0,) * len(hashes) * self.layout.block_size
        await self.request(
            ReserveBlocks(self._ticket(), self.layout, tuple(hashes), parent, tokens)
        )

    async def damage(self, hashes: Sequence[BlockHash]) -> None:
        """Overwrite the bytes of stored blocks, as a client does that writes too late."""
        ticket = self._ticket()
        answer = await self.request(LeaseBlocks(ticket, self.layout, tuple(hashes)))
        assert isinstance(answer, BlocksLeased), answer
        size = self.layout.block_bytes
        self._room.view[:size] = b"\xff" * size
        pieces = [
            Piece(self._room.region, 0, answer.region, place.offset, size)
            for place in answer.places
        ]
        if pieces:
            await self._transfer.submit("write", pieces)
        await self._link.send(ReleaseLease(ticket))

    async def report_damaged(self, hashes: Sequence[BlockHash]) -> None:
        """Report blocks as damaged."""
        await self.send(VerifyBlocks(hashes=tuple(hashes)))

    async def copy(self, source: WorkerInfo, hashes: Sequence[BlockHash]) -> int:
        """Make this kvstore copy blocks from another one; return how many, from the first, it has.

        Raises:
            ValueError: the kvstore refuses; the text is its reason.
        """
        address = KvstoreAddress(
            source.worker_id, source.generation, source.commands, source.key_id
        )
        tokens = (0,) * len(hashes) * self.layout.block_size
        answer = await self.request(
            ReplicateBlocks(self._ticket(), address, self.layout, tuple(hashes), None, tokens)
        )
        if isinstance(answer, BlocksReplicated):
            return answer.n_blocks
        assert isinstance(answer, KvstoreRefused), answer
        raise ValueError(answer.reason)

    async def stored(self) -> set[BlockHash]:
        """Return all blocks in the kvstore's snapshot."""
        answer = await self.request(SnapshotBlocks())
        assert isinstance(answer, BlocksSnapshot), answer
        return set(answer.hashes)

    async def _write(self, region: Region, places: Sequence[Place]) -> list[int]:
        """Write blocks to their places, and return their checksums."""
        size, checksums, pieces = self.layout.block_bytes, [], []
        for i, place in enumerate(places):
            view = self._room.view[i * size : (i + 1) * size]
            view[:] = block_content(place.hash, size)
            checksums.append(xxhash.xxh3_64_intdigest(view))
            pieces.append(Piece(self._room.region, i * size, region, place.offset, size))
        await self._transfer.submit("write", pieces)
        return checksums

    def _ticket(self) -> Ticket:
        return Ticket(str(next(self._tickets)))


class InstantTiers:
    """Run a kvstore's tiers alone: each of their commands succeeds at once."""

    def __init__(self, n_memory: int, n_disk: int, policy: str = "lru") -> None:
        """Start empty, with the default watermarks and limits of a node."""
        limits = TierLimits(max_queued=1 << 20)
        self.tiers = TieredCache(
            BlockCache(n_memory, policy=policy), DiskMap(n_disk, policy=policy), limits
        )
        self._n = 0

    def get(self, hashes: Sequence[BlockHash]) -> int:
        """Lease and release blocks; return the length of the prefix that is in either tier."""
        self._n += 1
        ticket = Ticket(str(self._n))
        before = self.tiers.counts.misses
        self.tiers.lease("client", ticket, hashes, 0.0)
        self._carry()
        self.tiers.release("client", ticket, 0.0)
        self._carry()
        return len(hashes) - (self.tiers.counts.misses - before)

    def put(self, hashes: Sequence[BlockHash], parent: BlockHash | None = None) -> None:
        """Store blocks, in as many reservations as needed."""
        while True:
            self._n += 1
            ticket = Ticket(str(self._n))
            try:
                reserved = self.tiers.reserve("client", ticket, hashes, parent, 0.0)
            except CacheFull:
                self._carry()
                continue
            self._carry()
            self.tiers.commit("client", ticket, [0] * len(reserved.places), 0.0)
            self._carry()
            if not reserved.places:
                return

    def _carry(self) -> None:
        while commands := self.tiers.commands():
            for command in commands:
                match command:
                    case WriteBack(record=record):
                        self.tiers.on_written(record.hash, "ok", 0.0)
                    case Promote(record=record):
                        self.tiers.on_promoted(record.hash, "ok", 0.0)
                    case Erase(disk_slot=slot):
                        self.tiers.on_erased(slot)
                    case _:
                        pass
