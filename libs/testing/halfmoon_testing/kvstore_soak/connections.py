"""Connect a soak's clients to nodes that restart, and follow a node's events."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEventBatch
from halfmoon_protocol.messages import BlocksSnapshot, KvstoreLoad, SnapshotBlocks, WorkerInfo
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.membership import MEMBERS
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_testing.block_client import BlockClient
from halfmoon_testing.kvstore_soak.model import KvstoreModel
from halfmoon_transfer.interface import TransferError

_RETRY_S = 0.1
#: Hashes in a page of a snapshot.
_PAGE = 16
_THERE_WITHIN_S = 60.0


class SoakConnections:
    """Keep one connection per client and node, opened when needed and after failures."""

    def __init__(self, network: Network, store: MetadataStore) -> None:
        self._network = network
        self._store = store
        self._clients: dict[tuple[str, str], BlockClient] = {}
        self._n_made = 0

    async def read_record(self, name: str) -> WorkerInfo:
        """Read a node's record.

        Raises:
            PeerUnreachable: the node has no record.
            MetadataError: the metadata server is unreachable.
        """
        value = await asyncio.to_thread(self._store.get, MEMBERS + name)
        if value is None:
            raise PeerUnreachable(f"{name} has no record")
        return msgspec.json.decode(value, type=WorkerInfo)

    async def client_for(self, client_name: str, name: str, *, anew: bool = False) -> BlockClient:
        """Return a client of a node; `anew` waits for the node, and reconnects.

        Raises:
            PeerUnreachable: the node is not registered now.
            MetadataError: the metadata server is unreachable.
        """
        if not anew:
            client = self._clients.get((client_name, name))
            return client or await self._dial(client_name, name)
        await self.hang_up(client_name, name)
        async with asyncio.timeout(_THERE_WITHIN_S):
            while True:
                with suppress(PeerUnreachable, MetadataError, TransferError):
                    client = await self._dial(client_name, name)
                    await client.stored()
                    return client
                await self.hang_up(client_name, name)
                await asyncio.sleep(_RETRY_S)

    async def hang_up(self, client_name: str, name: str) -> None:
        """Disconnect abruptly, with any leases and reservations that the client holds."""
        client = self._clients.pop((client_name, name), None)
        if client is not None:
            await client.__aexit__(None, None, None)

    async def close(self) -> None:
        """Close all connections."""
        for client_name, name in list(self._clients):
            await self.hang_up(client_name, name)

    async def _dial(self, client_name: str, name: str) -> BlockClient:
        info = await self.read_record(name)
        self._n_made += 1
        n = self._n_made
        # Every second client uses TCP alone, as from another host.
        backends = ("tcp",) if n % 2 else ("shm", "tcp")
        client = await BlockClient.dial(
            self._network, self._store, info, f"soak-client-{n}", backends=backends
        )
        self._clients[client_name, name] = client
        return client


class KvEventListener:
    """Follow one node's events, as a conductor does."""

    def __init__(
        self, network: Network, store: MetadataStore, name: str, model: KvstoreModel
    ) -> None:
        self._network = network
        self._store = store
        self._name = WorkerId(name)
        self._model = model
        self._index = PrefixIndex()
        self._follower = KvEventFollower(self._index)
        #: Blocks reserved and leased at the node, by its last load message.
        self.n_held = -1

    @property
    def n_known(self) -> int:
        """Number of blocks that the node has, by its events."""
        return len(self._index)

    def knows(self, block: BlockHash) -> bool:
        """Return whether the node has a block, by its events."""
        return bool(self._index.n_holders(block))

    async def run(self) -> None:
        """Follow one start of the node after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(PeerUnreachable, MetadataError):
                value = await asyncio.to_thread(self._store.get, MEMBERS + self._name)
                if value is not None:
                    info = msgspec.json.decode(value, type=WorkerInfo)
                    n_kills = self._model.n_kills(self._name)
                    link = await self._network.dial(info.commands, info.events, key_id=info.key_id)
                    try:
                        self._follower.on_joined(self._name, loop.time())
                        await link.send(SnapshotBlocks(page=_PAGE))
                        await self._listen(link, n_kills)
                    finally:
                        self._follower.on_lost(self._name)
                        self.n_held = -1
                        await link.close()
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, link: WorkerLink, n_kills: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            heard = await link.receive()
            now = loop.time()
            ask = bool(self._follower.overdue(now, 5.0))
            match heard:
                case KvEventBatch(events=events):
                    ask |= self._follower.on_events(self._name, heard, now)
                    self._on_events(events, n_kills)
                case BlocksSnapshot():
                    ask |= self._follower.on_snapshot(self._name, heard, now)
                case KvstoreLoad(sequence=sequence):
                    ask |= self._follower.on_sequence(self._name, sequence, now)
                    self.n_held = heard.n_reserved + heard.n_leased
                case _:
                    pass
            if ask:
                await link.send(SnapshotBlocks(page=_PAGE))

    def _on_events(self, events: Sequence[KvEvent], n_kills: int) -> None:
        """Record which blocks are on the disk, from the events of one publication.

        A block that moves between tiers is announced as removed from one, then as stored in the
        other. It is on the disk whichever way it moves. Both events are in one publication, unless
        that is full. A put of a block that has left the disk is announced in a later one, since
        its reservation is answered in between.
        """
        from_disk: set[BlockHash] = set()
        for event in events:
            match event:
                case BlockStored(block_hashes=hashes, medium="STORAGE"):
                    self._model.on_saved(self._name, _ours(hashes), n_kills)
                case BlockStored(block_hashes=hashes):
                    moved = from_disk.intersection(_ours(hashes))
                    self._model.on_saved(self._name, moved, n_kills)
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    self._model.on_erased(self._name, _ours(hashes), n_kills)
                    if medium == "STORAGE":
                        from_disk |= {*_ours(hashes)}
                case _:
                    pass


def _ours(hashes: Iterable[int | bytes]) -> list[BlockHash]:
    return [BlockHash(block) for block in hashes if isinstance(block, bytes)]
