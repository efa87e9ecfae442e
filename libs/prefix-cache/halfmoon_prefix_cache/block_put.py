"""Put blocks from a worker's pool into a kvstore: reserve room, write, commit with checksums."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from halfmoon_prefix_cache.prefix_fetch import cancel_and_wait
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_prefix_cache.write_settling import settle_writes
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_protocol.regions import Region
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreUnavailable
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Cancelled, Piece, Transfer, TransferError
from halfmoon_transfer.regions.region_table import PoolMemory


@dataclass(frozen=True)
class KvstoreReservation:
    """Room at a kvstore for blocks of one request."""

    kvstore: KvstoreClient
    address: KvstoreAddress
    ticket: Ticket
    region: Region
    #: Block index → where it goes; empty when all are stored there already.
    offsets: dict[int, int]
    #: Seconds until the room is given to others unless it is renewed.
    expires_s: float
    #: Blocks that are not stored and got no room, or that another client is writing.
    n_not_stored: int = 0


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks of one chain in a pool."""

    hashes: tuple[BlockHash, ...]
    #: The block before the first; None at the start of a prompt.
    parent: BlockHash | None
    #: Their tokens.
    token_ids: tuple[int, ...]
    #: The tenant whose quota they count against; empty: none.
    tenant: str
    #: Index of the first block in its prompt.
    first: int = 0


class BlockPutter:
    """Put blocks of one pool; a kvstore that fails is left out for a while."""

    def __init__(
        self,
        replicas: ReplicaSelector,
        transfer: TransferEngine,
        memory: PoolMemory,
        layout: KvLayout,
    ) -> None:
        """Put nothing yet.

        Args:
            replicas: connects to kvstores, and remembers which of them fail.
            transfer: moves the bytes.
            memory: of the pool.
            layout: of a page.
        """
        self._replicas = replicas
        self._transfer = transfer
        self._memory = memory
        self._layout = layout

    async def reserve(self, address: KvstoreAddress, run: BlockRun) -> KvstoreReservation:
        """Reserve room for those blocks of a run that the kvstore lacks.

        Raises:
            KvstoreUnavailable: nothing is reserved.
        """
        kvstore = await self._replicas.client(address)
        reserved = await kvstore.reserve(
            self._layout, run.hashes, run.parent, run.token_ids, run.tenant
        )
        index = {block: i for i, block in enumerate(run.hashes, start=run.first)}
        return KvstoreReservation(
            kvstore,
            address,
            reserved.ticket,
            reserved.region,
            {index[place.hash]: place.offset for place in reserved.places},
            reserved.expires_s,
            n_not_stored=len(reserved.not_stored),
        )

    async def commit(self, put: KvstoreReservation, pages: Sequence[int]) -> None:
        """Commit a reservation whose bytes are written.

        Args:
            put: the reservation.
            pages: of its places, in prefix order; not written to meanwhile.

        Raises:
            KvstoreUnavailable: it is unknown whether the blocks are served.
        """
        await put.kvstore.commit(put.ticket, await asyncio.to_thread(self._checksums, pages))
        self._replicas.answered(put.address)

    async def give_up(self, put: KvstoreReservation) -> None:
        """Return room at a kvstore; no write of ours is under way.

        Bytes of a write that was cancelled may be on their way. If the kvstore does not confirm
        that they are not, the reservation is left to run out.
        """
        if await settle_writes(self._transfer, put.region):
            await put.kvstore.revoke(put.ticket)

    async def put(
        self,
        address: KvstoreAddress,
        run: BlockRun,
        pages: Sequence[int],
        limit_s: float,
        writes: list[Transfer],
    ) -> int:
        """Put a run of blocks; at the end, however it comes, no write is under way.

        Args:
            address: the kvstore.
            run: the blocks.
            pages: one for each block; not written to meanwhile.
            limit_s: seconds after which it is given up.
            writes: empty; gets the write, so that the caller may cancel it.

        Returns:
            Blocks of the run that the kvstore does not have now: another client is writing them,
            or there was no room.

        Raises:
            KvstoreUnavailable: it could not be reached in time, or refused.
            TransferError: the bytes did not get there.
        """
        put: KvstoreReservation | None = None
        try:
            async with asyncio.timeout(limit_s):
                put = await self.reserve(address, run)
                if pieces := self._pieces(put, run, pages):
                    writes.append(self._transfer.submit("write", pieces, deadline_s=limit_s))
                    await writes[0]
                places = sorted(put.offsets)
                await self.commit(put, [pages[place - run.first] for place in places])
                n_lost, put = put.n_not_stored, None
                return n_lost
        except TimeoutError:
            late = KvstoreUnavailable(f"{address.worker_id} took no block in {limit_s} s")
            self._replicas.on_error(address, late)
            raise late from None
        except (TransferError, KvstoreUnavailable) as error:
            if not isinstance(error, Cancelled):
                self._replicas.on_error(address, error)
            raise
        finally:
            await cancel_and_wait(writes)
            if put is not None:
                await self.give_up(put)

    def _pieces(self, put: KvstoreReservation, run: BlockRun, pages: Sequence[int]) -> list[Piece]:
        pool, size = self._memory.region, self._layout.block_bytes
        return [
            Piece(pool, pages[place - run.first] * size, put.region, offset, size)
            for place, offset in put.offsets.items()
        ]

    def _checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Compute xxh3-64 of each page; it reads all their bytes."""
        view, size = self._memory.view, self._layout.block_bytes
        return tuple(
            xxhash.xxh3_64_intdigest(view[page * size : (page + 1) * size]) for page in pages
        )
