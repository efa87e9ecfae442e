"""Store bytes under keys in the blocks of a cluster's kvstores.

An object lies at one node, in blocks of that node's size (`halfmoon_protocol.objects`).
Each key orders the nodes by a hash. A put goes to the first node that accepts it, and a get tries
the nodes in that order. Objects never change: a put of the same bytes succeeds, a put of others is
an error. Objects are cache content: blocks that are not pinned may be evicted, from the object's
end. Then a get reports that the object is incomplete.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import BinaryIO

import msgspec
import xxhash

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress, WorkerInfo
from halfmoon_protocol.objects import OBJECT_HEAD_BYTES, ObjectHead, object_hashes
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreClients, KvstoreUnavailable
from halfmoon_runtime.membership import first_model_worker, list_members
from halfmoon_transfer import (
    ClusterKey,
    TransferEngine,
    TransferSettings,
    encryption_from_environment,
)
from halfmoon_transfer.interface import Piece, TransferError
from halfmoon_transfer.regions.region_table import Memory

#: Called with the number of bytes moved since the last call.
OnProgress = Callable[[int], None]

_TIMEOUT_S = 10.0
#: Approximate bytes of one batch.
_BATCH_BYTES = 32 * 1024 * 1024
#: Tries of a put that a node refuses for the moment.
_MAX_TRIES = 100
_READ_BYTES = 1 << 20


class ObjectError(Exception):
    """Base of an object's errors; the text names its key.

    ObjectError
    ├── NoSuchObject       no node has its first block
    ├── IncompleteObject   some of its blocks were evicted, or are damaged
    ├── ConflictingObject  other bytes are there under this key
    └── NoRoomForObject    no node takes it
    """


class NoSuchObject(ObjectError, KeyError):
    """No node has its first block."""

    def __str__(self) -> str:
        return str(self.args[0])


class IncompleteObject(ObjectError):
    """Some of its blocks were evicted, or are damaged."""


class ConflictingObject(ObjectError):
    """Other bytes are there under this key."""


class NoRoomForObject(ObjectError):
    """No node takes it."""


class FoundObject(msgspec.Struct, frozen=True):
    """An object at a node."""

    node: str
    n_bytes: int
    n_blocks: int
    block_bytes: int


def bytes_layout(block_kib: int) -> KvLayout:
    """Return the layout of blocks of so many KiB that hold bytes rather than KV."""
    return KvLayout(
        model="halfmoon.bytes", n_layers=1, n_kv_heads=1, head_dim=8 * block_kib,
        dtype="float32", block_size=16,
    )  # fmt: skip


class ObjectClient:
    """Client of the objects in a cluster; see `open_object_client`.

    Make one call at a time: calls share memory.
    """

    def __init__(
        self,
        store: MetadataStore,
        kvstores: KvstoreClients,
        transfer: TransferEngine,
        block_kib: int,
    ) -> None:
        self._store = store
        self._kvstores = kvstores
        self._transfer = transfer
        self._block_kib = block_kib
        #: Registered memory of one transfer at a time.
        self._room: Memory | None = None

    async def put(
        self, key: str, source: BinaryIO, *, node: str = "", progress: OnProgress | None = None
    ) -> FoundObject:
        """Store the bytes of a source, from its start to its end; they are read twice.

        Args:
            key: its name.
            source: can be set back to its start.
            node: name of the node; empty: chosen by the key.
            progress: called with bytes stored.

        Raises:
            ConflictingObject: there is an object of this key with other bytes.
            NoRoomForObject: no node accepts it; the text has the reason of each.
            TransferError: bytes could not be moved.
            MetadataError: the metadata server does not list the nodes.
            MalformedMessage: the key is empty or too long.
        """
        object_hashes(key, 0, 1)  # raises before anything is read
        head = await asyncio.to_thread(_head_of, source)
        reasons: list[str] = []
        model = first_model_worker((await list_members(self._store)).values())
        for info in await self._nodes(key, node):
            try:
                layout = info.layout or self._layout_of_first(info, model)
            except NoRoomForObject as error:
                reasons.append(str(error))
                continue
            if info.draining:
                reasons.append(f"{info.worker_id}: it is leaving")
                continue
            try:
                client = await self._kvstores.client_for(_address(info))
                there = await self._head_at(client, key, layout)
                if there is not None and there != head:
                    raise ConflictingObject(
                        f"{key}: other bytes ({there.n_bytes} of them) are at {info.worker_id}"
                    )
                await self._put_at(client, key, layout, head, source, progress)
            except KvstoreUnavailable as error:
                reasons.append(str(error))
                continue
            return _found(info, head, layout)
        raise NoRoomForObject(f"{key}: {'; '.join(reasons) or 'there is no kvstore'}")

    async def get(
        self, key: str, sink: BinaryIO, *, progress: OnProgress | None = None
    ) -> FoundObject:
        """Write the verified bytes of an object to a sink.

        Args:
            key: its name.
            sink: gets the bytes in order; after an error, a part of them.
            progress: called with bytes written.

        Raises:
            NoSuchObject: no node has it.
            IncompleteObject: a part was evicted, or differs from the bytes that were put.
            TransferError: bytes could not be moved.
            MetadataError: the metadata server does not list the nodes.
            MalformedMessage: the key is empty or too long.
        """
        client, info, layout, head = await self._find(key)
        digest = xxhash.xxh3_128()
        left = head.n_bytes
        hashes = object_hashes(key, head.n_blocks(layout.block_bytes), layout.block_bytes)
        batch, at = _blocks_at_once(layout), 0
        while at < len(hashes):
            data = await self._read(client, layout, hashes[at : at + batch])
            if not data:  # perhaps they were moved apart when a node left
                other, data = await self._read_elsewhere(key, layout, hashes[at : at + batch])
                client = other or client
            if not data:
                raise IncompleteObject(f"{key}: {at} of its {len(hashes)} blocks are left")
            part = memoryview(data)[OBJECT_HEAD_BYTES if at == 0 else 0 :][:left]
            at += len(data) // layout.block_bytes
            left -= len(part)
            digest.update(part)
            await asyncio.to_thread(sink.write, part)
            if progress is not None:
                progress(len(part))
        if digest.digest() != head.digest:
            raise IncompleteObject(f"{key}: its bytes are not what was put")
        return _found(info, head, layout)

    async def stat(self, key: str) -> FoundObject:
        """Return the node and the size of an object.

        Raises:
            NoSuchObject: no node has it.
            MetadataError: the metadata server does not list the nodes.
        """
        _, info, layout, head = await self._find(key)
        return _found(info, head, layout)

    # -- inside ------------------------------------------------------------------------------

    async def _nodes(self, key: str, only: str = "") -> list[WorkerInfo]:
        """Return the kvstores in the order of this key."""
        infos = (await list_members(self._store)).values()
        nodes = [i for i in infos if i.role == "kvstore" and only in ("", i.worker_id)]
        return sorted(nodes, key=lambda i: xxhash.xxh3_64_digest(f"{i.worker_id}\0{key}".encode()))

    def _layout_of_first(self, info: WorkerInfo, model: WorkerInfo | None) -> KvLayout:
        """Return the layout of a node without blocks: the model's, where one is served.

        Raises:
            NoRoomForObject: there is no model and no size was given, or another than the model's.
        """
        asked = bytes_layout(self._block_kib) if self._block_kib else None
        if model is None or model.layout is None:
            if asked is None:
                raise NoRoomForObject(
                    f"{info.worker_id}: it has no block size yet, give one (--block-size-kib)"
                )
            return asked
        if asked is not None and asked.block_bytes != model.layout.block_bytes:
            raise NoRoomForObject(
                f"{info.worker_id}: it holds nothing yet, and is to keep KV as {model.worker_id} "
                f"makes it, in blocks of {model.layout.block_bytes / 1024:g} KiB (model "
                f"{model.layout.model}); blocks of {self._block_kib} KiB would shut that out: "
                "leave --block-size-kib out"
            )
        return model.layout

    async def _find(self, key: str) -> tuple[KvstoreClient, WorkerInfo, KvLayout, ObjectHead]:
        reasons: list[str] = []
        for info in await self._nodes(key):
            layout = info.layout
            if layout is None:
                continue
            try:
                client = await self._kvstores.client_for(_address(info))
                head = await self._head_at(client, key, layout)
            except KvstoreUnavailable as error:
                reasons.append(str(error))
                continue
            if head is not None:
                return client, info, layout, head
        told = f" ({'; '.join(reasons)})" if reasons else ""
        raise NoSuchObject(f"{key}: no kvstore has it{told}")

    async def _read_elsewhere(
        self, key: str, layout: KvLayout, hashes: list[BlockHash]
    ) -> tuple[KvstoreClient | None, bytearray]:
        """Read the first of these blocks from any node that has them; return it and the bytes."""
        for info in await self._nodes(key):
            if info.layout == layout:
                with suppress(KvstoreUnavailable):
                    client = await self._kvstores.client_for(_address(info))
                    if data := await self._read(client, layout, hashes):
                        return client, data
        return None, bytearray()

    async def _head_at(
        self, client: KvstoreClient, key: str, layout: KvLayout
    ) -> ObjectHead | None:
        data = await self._read(client, layout, object_hashes(key, 1, layout.block_bytes))
        return ObjectHead.decode(memoryview(data)) if data else None

    def _scratch(self, n_bytes: int) -> Memory:
        """Return memory for so many bytes, the previous one if it is large enough."""
        if self._room is None or self._room.region.length < n_bytes:
            if self._room is not None:
                self._transfer.unregister(self._room.region)
            self._room = self._transfer.allocate(n_bytes)
        return self._room

    async def _read(
        self, client: KvstoreClient, layout: KvLayout, hashes: list[BlockHash]
    ) -> bytearray:
        """Read the longest available prefix of these blocks under one lease, verified."""
        lease = await client.lease(layout, tuple(hashes))
        if not lease.places:
            return bytearray()
        size = layout.block_bytes
        memory = self._scratch(len(lease.places) * size)
        pieces = [
            Piece(memory.region, i * size, lease.region, place.offset, size)
            for i, place in enumerate(lease.places)
        ]
        async with client.hold_lease(lease):
            await self._transfer.submit("read", pieces)
        data = bytearray(memory.view[: len(lease.places) * size])
        for i, place in enumerate(lease.places):
            if xxhash.xxh3_64_intdigest(memoryview(data)[i * size : (i + 1) * size]) != (
                place.checksum
            ):
                raise IncompleteObject(f"block {place.hash.hex()} from {client.name} is damaged")
        return data

    async def _put_at(
        self,
        client: KvstoreClient,
        key: str,
        layout: KvLayout,
        head: ObjectHead,
        source: BinaryIO,
        progress: OnProgress | None,
    ) -> None:
        size = layout.block_bytes
        hashes = object_hashes(key, head.n_blocks(size), size)
        batch = _blocks_at_once(layout)
        await asyncio.to_thread(source.seek, 0)
        ahead = head.encode()
        for start in range(0, len(hashes), batch):
            wanted = hashes[start : start + batch]
            room = len(wanted) * size - len(ahead)
            part = await asyncio.to_thread(_read_up_to, source, room)
            parent = hashes[start - 1] if start else None
            data = (ahead + part).ljust(len(wanted) * size, b"\0")
            await self._write(client, layout, wanted, parent, memoryview(data))
            ahead = b""
            if progress is not None:
                progress(len(part))

    async def _write(
        self,
        client: KvstoreClient,
        layout: KvLayout,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        data: memoryview,
    ) -> None:
        """Store blocks, in as many parts as the node asks for."""
        size, tokens = layout.block_bytes, (0,) * (len(hashes) * layout.block_size)
        index = {block: i for i, block in enumerate(hashes)}
        for _ in range(_MAX_TRIES):
            try:
                reserved = await client.reserve(layout, tuple(hashes), parent, tokens)
            except KvstoreUnavailable as error:
                if not error.retry_after_s:
                    raise
                await asyncio.sleep(min(error.retry_after_s, 0.5))
                continue
            if not reserved.places:
                await client.commit(reserved.ticket, ())
                return
            memory = self._scratch(len(reserved.places) * size)
            checksums, pieces = [], []
            for i, place in enumerate(reserved.places):
                at = index[place.hash] * size
                memory.view[i * size : (i + 1) * size] = data[at : at + size]
                checksums.append(xxhash.xxh3_64_intdigest(data[at : at + size]))
                pieces.append(Piece(memory.region, i * size, reserved.region, place.offset, size))
            try:
                await self._transfer.submit("write", pieces, deadline_s=reserved.expires_s)
            except TransferError:
                # Otherwise it runs out: bytes may be on their way to places of others then.
                if not self._transfer.is_unsettled(reserved.region):
                    await client.revoke(reserved.ticket)
                raise
            await client.commit(reserved.ticket, tuple(checksums))
        raise KvstoreUnavailable(f"{client.name}: it had no room in {_MAX_TRIES} tries")


@asynccontextmanager
async def open_object_client(
    store: MetadataStore, *, cluster_key: str = "", bind: str = "127.0.0.1", block_kib: int = 0
) -> AsyncIterator[ObjectClient]:
    """Open a client of a cluster's kvstores.

    Args:
        store: the cluster's metadata server.
        cluster_key: key of the cluster, if it has one.
        bind: address of this machine at which kvstores could reach it.
        block_kib: block size that nodes without blocks get, in a cluster that serves no model;
            0: such nodes are left out.
    """
    async with AsyncExitStack() as stack:
        network = ZmqNetwork(cluster_key=cluster_key)
        stack.push_async_callback(network.close)
        kvstores = KvstoreClients(network, _TIMEOUT_S)
        stack.push_async_callback(kvstores.close)
        transfer = stack.enter_context(
            TransferEngine.open(
                f"objects-{os.getpid()}-{secrets.token_hex(4)}",
                metadata=store,
                bind=bind,
                settings=TransferSettings(
                    cluster_key=ClusterKey.given(cluster_key),
                    encryption=encryption_from_environment(),
                ),
            )
        )
        yield ObjectClient(store, kvstores, transfer, block_kib)


def _head_of(source: BinaryIO) -> ObjectHead:
    source.seek(0)
    digest, n_bytes = xxhash.xxh3_128(), 0
    while part := source.read(_READ_BYTES):
        digest.update(part)
        n_bytes += len(part)
    return ObjectHead(n_bytes, digest.digest())


def _read_up_to(source: BinaryIO, n_bytes: int) -> bytes:
    parts: list[bytes] = []
    while n_bytes and (part := source.read(min(n_bytes, _READ_BYTES))):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _blocks_at_once(layout: KvLayout) -> int:
    return max(1, _BATCH_BYTES // layout.block_bytes)


def _address(info: WorkerInfo) -> KvstoreAddress:
    return KvstoreAddress(info.worker_id, info.generation, info.commands, info.key_id)


def _found(info: WorkerInfo, head: ObjectHead, layout: KvLayout) -> FoundObject:
    return FoundObject(
        info.worker_id, head.n_bytes, head.n_blocks(layout.block_bytes), layout.block_bytes
    )
