"""A soak's clients: links to nodes that come and go, and a listener as conductors have it."""

import asyncio
from collections.abc import Iterable
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
_THERE_WITHIN_S = 60.0


class SoakConnections:
    """One client for each visitor and node, made when needed, and again after trouble."""

    def __init__(self, network: Network, store: MetadataStore) -> None:
        self._network = network
        self._store = store
        self._clients: dict[tuple[str, str], BlockClient] = {}
        self._n_made = 0

    async def read_record(self, name: str) -> WorkerInfo:
        """A node's record.

        Raises:
            PeerUnreachable: it has none.
            MetadataError: the metadata server is away.
        """
        value = await asyncio.to_thread(self._store.get, MEMBERS + name)
        if value is None:
            raise PeerUnreachable(f"{name} has no record")
        return msgspec.json.decode(value, type=WorkerInfo)

    async def client_for(self, visitor: str, name: str, *, anew: bool = False) -> BlockClient:
        """A client of a node; `anew` waits until the node is there, and is connected again.

        Raises:
            PeerUnreachable: there is no such node now.
            MetadataError: the metadata server is away.
        """
        if not anew:
            client = self._clients.get((visitor, name))
            return client or await self._dial(visitor, name)
        await self.hang_up(visitor, name)
        async with asyncio.timeout(_THERE_WITHIN_S):
            while True:
                with suppress(PeerUnreachable, MetadataError, TransferError):
                    client = await self._dial(visitor, name)
                    await client.stored()
                    return client
                await self.hang_up(visitor, name)
                await asyncio.sleep(_RETRY_S)

    async def hang_up(self, visitor: str, name: str) -> None:
        """Hang up, with whatever the client holds."""
        client = self._clients.pop((visitor, name), None)
        if client is not None:
            await client.__aexit__(None, None, None)

    async def close(self) -> None:
        """Hang up everywhere."""
        for visitor, name in list(self._clients):
            await self.hang_up(visitor, name)

    async def _dial(self, visitor: str, name: str) -> BlockClient:
        info = await self.read_record(name)
        self._n_made += 1
        n = self._n_made
        # Every second one from another host, as far as it knows.
        backends = ("tcp",) if n % 2 else ("shm", "tcp")
        client = await BlockClient.dial(
            self._network, self._store, info, f"soak-client-{n}", backends=backends
        )
        self._clients[visitor, name] = client
        return client


class KvEventListener:
    """Follows one node's events, as a conductor does."""

    def __init__(
        self, network: Network, store: MetadataStore, name: str, ledger: KvstoreModel
    ) -> None:
        self._network = network
        self._store = store
        self._name = WorkerId(name)
        self._ledger = ledger
        self._index = PrefixIndex()
        self._follower = KvEventFollower(self._index)
        #: Blocks reserved and leased at the node, as it last said.
        self.n_held = -1

    @property
    def n_known(self) -> int:
        """How many blocks the node has, as far as was heard."""
        return len(self._index)

    def knows(self, block: BlockHash) -> bool:
        """Whether the node has a block, as far as was heard."""
        return bool(self._index.n_holders(block))

    async def run(self) -> None:
        """Listen to one start of the node after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(PeerUnreachable, MetadataError):
                value = await asyncio.to_thread(self._store.get, MEMBERS + self._name)
                if value is not None:
                    info = msgspec.json.decode(value, type=WorkerInfo)
                    n_kills = self._ledger.n_kills(self._name)
                    link = await self._network.dial(info.commands, info.events)
                    try:
                        self._follower.on_joined(self._name, loop.time())
                        await link.send(SnapshotBlocks())
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
                    for event in events:
                        self._on_event(event, n_kills)
                case BlocksSnapshot(sequence=sequence, hashes=hashes):
                    ask |= self._follower.on_snapshot(self._name, sequence, hashes, now)
                case KvstoreLoad(sequence=sequence):
                    ask |= self._follower.on_sequence(self._name, sequence, now)
                    self.n_held = heard.n_reserved + heard.n_leased
                case _:
                    pass
            if ask:
                await link.send(SnapshotBlocks())

    def _on_event(self, event: KvEvent, n_kills: int) -> None:
        """Keep account of what is on the disk.

        A block that moves is removed here, then stored there, without tokens; and it is on the
        disk whichever way it goes.
        """
        match event:
            case BlockStored(block_hashes=hashes, token_ids=()):
                self._ledger.on_saved(self._name, _ours(hashes), n_kills)
            case BlockRemoved(block_hashes=hashes):
                self._ledger.on_erased(self._name, _ours(hashes), n_kills)
            case _:
                pass


def _ours(hashes: Iterable[int | bytes]) -> list[BlockHash]:
    return [BlockHash(block) for block in hashes if isinstance(block, bytes)]
