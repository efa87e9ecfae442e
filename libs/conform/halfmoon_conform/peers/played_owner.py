"""Play a transfer owner over TCP to a subject that dials, and record each access.

It keeps the protocol unless a check sets one of its faults: statuses of its choice, replies that
are held back, connections that it cuts in the middle of a write, wrong proofs, damaged bytes.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.peers.encrypted_stream import EncryptedStream, KeyShare, prove
from halfmoon_conform.peers.transfer_frames import ReplyHead, SliceEntry
from halfmoon_metadata.store_interface import MetadataStore

GENERATION = 1


@dataclass(frozen=True)
class OwnerAccess:
    """One slice of a request that arrived."""

    op: int
    key: bytes
    offset: int
    length: int
    #: On the event loop's clock.
    at_s: float
    status: int


class PlayedOwner:
    """A segment of the kit's own."""

    def __init__(self, name: str, cluster_key: str = "") -> None:
        self.name = name
        self._cluster_key = cluster_key
        self.regions: dict[bytes, bytearray] = {}
        self.accesses: list[OwnerAccess] = []
        #: What the subject did against the protocol, if anything.
        self.faults: list[str] = []
        #: Maps of the hellos that arrived.
        self.hellos: list[dict[str, Any]] = []
        self._server: asyncio.Server | None = None
        self._streams: set[EncryptedStream] = set()
        #: Tasks of the connections.
        self._serving: set[asyncio.Task[None]] = set()
        #: Replies to writes wait for this.
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        #: Replies to reads wait for this.
        self.may_serve = asyncio.Event()
        self.may_serve.set()
        #: Chooses a status other than the protocol's; None: the protocol's.
        self.status_of: Callable[[int, SliceEntry], int | None] = lambda _op, _entry: None
        #: So many of the next write requests are cut in the middle of their bytes.
        self.n_cuts = 0
        #: Bytes of reads are changed, and the status says that they are as they should be.
        self.damages_reads = False
        self.proves_wrongly = False
        self.hides_nonce = False

    async def open(self, store: MetadataStore) -> None:
        """Listen, and publish the segment's record."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        record = {
            "name": self.name,
            "generation": GENERATION,
            "host_id": "conform",
            "endpoints": {"tcp": {"address": f"127.0.0.1:{port}", "origin": "conform"}},
        }
        key, value = f"halfmoon/segments/{self.name}", msgspec.json.encode(record)
        await asyncio.to_thread(store.put, key, value, ttl_s=600.0)

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams):
            stream.abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def allocate(self, n_bytes: int) -> dict[str, Any]:
        """Make a region of so many bytes, all 0xA5, and return it as messages name it."""
        key = secrets.token_bytes(16)
        self.regions[key] = bytearray(b"\xa5" * n_bytes)
        return {"segment": self.name, "generation": GENERATION, "key": key, "length": n_bytes}

    def writes(self, key: bytes) -> list[OwnerAccess]:
        """Return the writes to a region."""
        return [a for a in self.accesses if a.op == frames.WRITE and a.key == key]

    # -- connections ---------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = EncryptedStream(reader, writer)
        self._streams.add(stream)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            if await self._greet(stream):
                while True:
                    await self._answer(stream)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._streams.discard(stream)
            stream.abort()

    async def _greet(self, stream: EncryptedStream) -> bool:
        asked = await self._read_start(stream, frames.HELLO)
        hello = msgspec.msgpack.decode(asked)
        self.hellos.append(hello)
        refused = ""
        if (hello.get("segment"), hello.get("generation")) != (self.name, GENERATION):
            refused = f"this is {self.name}, generation {GENERATION}"
        share = KeyShare() if self._cluster_key and hello.get("share") else None
        answer = {
            "segment": self.name,
            "generation": GENERATION,
            "refused": refused,
            "nonce": secrets.token_bytes(32) if self._cluster_key and not self.hides_nonce else b"",
            "share": share.public if share and not self.hides_nonce else b"",
        }
        answered = msgspec.msgpack.encode(answer)
        await stream.write(frames.encode_start(frames.HELLO, answered))
        if refused or not self._cluster_key:
            return not refused
        return await self._exchange_proofs(stream, share, hello, asked, answered)

    async def _exchange_proofs(
        self,
        stream: EncryptedStream,
        share: KeyShare | None,
        hello: dict[str, Any],
        asked: bytes,
        answered: bytes,
    ) -> bool:
        theirs = msgspec.msgpack.decode(await self._read_start(stream, frames.PROOF))
        if theirs.get("proof") != prove(self._cluster_key, b"initiator", asked, answered):
            self.faults.append("its proof is not the initiator's proof under the cluster key")
            return False
        ours = prove(self._cluster_key, b"owner", asked, answered)
        if self.proves_wrongly:
            ours = secrets.token_bytes(32)
        body = msgspec.msgpack.encode({"proof": ours, "refused": ""})
        await stream.write(frames.encode_start(frames.PROOF, body))
        if share is not None:
            salt = prove(self._cluster_key, b"records", asked, answered)
            initiator, owner = share.record_keys(hello["share"], salt)
            stream.encrypt(owner, initiator)
        return True

    async def _answer(self, stream: EncryptedStream) -> None:
        header = await stream.read(frames.HEADER.size)
        magic, version, op, n, flags, _, number, generation = frames.HEADER.unpack(header)
        if (magic, version) != (frames.REQUEST, 1) or not 1 <= n <= frames.MAX_SLICES:
            self.faults.append(f"sent {header[:8]!r}, which begins no request")
            raise ConnectionError
        rest = await stream.read(n * frames.ASKED.size)
        (found,) = frames.SUM.unpack(await stream.read(frames.SUM.size))
        if found != (right := frames.checksum(header + rest)):
            self.faults.append(
                f"sent a request with the checksum {found:#x}; the xxh3-64 of the "
                f"{len(header + rest)} bytes before it is {right:#x}"
            )
        entries = [
            SliceEntry(key, offset, length, total)
            for key, offset, length, _, total in frames.ASKED.iter_unpack(rest)
        ]
        if op == frames.NOTIFY:
            await stream.read(entries[0].length)
            await stream.write(ReplyHead(op, number, [(0, 0)]).encode())
        elif op == frames.WRITE:
            await self._on_write(stream, number, generation, flags, entries)
        else:
            await self._on_read(stream, number, generation, entries)

    async def _on_write(
        self,
        stream: EncryptedStream,
        number: int,
        generation: int,
        flags: int,
        entries: list[SliceEntry],
    ) -> None:
        if self.n_cuts:
            self.n_cuts -= 1
            await stream.read(max(1, entries[0].length // 2))
            raise ConnectionError
        statuses = []
        for entry in entries:
            data = await stream.read(entry.length)
            status = self._status(frames.WRITE, generation, entry)
            is_checked = status == frames.OK and flags & frames.CHECKSUMS
            if is_checked and frames.checksum(data) != entry.sum:
                self.faults.append("sent a slice whose sum is not the xxh3-64 of its bytes")
                status = frames.CHECKSUM_MISMATCH
            if status == frames.OK:
                self.regions[entry.key][entry.offset : entry.offset + entry.length] = data
            self._record(frames.WRITE, entry, status)
            statuses.append((status, 0))
        await self.may_reply.wait()
        await stream.write(ReplyHead(frames.WRITE, number, statuses).encode())

    async def _on_read(
        self, stream: EncryptedStream, number: int, generation: int, entries: list[SliceEntry]
    ) -> None:
        await self.may_serve.wait()
        answers, parts = [], []
        for entry in entries:
            status, total = self._status(frames.READ, generation, entry), 0
            if status == frames.OK:
                data = bytes(self.regions[entry.key][entry.offset : entry.offset + entry.length])
                if self.damages_reads:
                    data = bytes([data[0] ^ 0xFF]) + data[1:]
                total = frames.checksum(data)
                parts.append(data)
            self._record(frames.READ, entry, status)
            answers.append((status, total))
        await stream.write(ReplyHead(frames.READ, number, answers).encode() + b"".join(parts))

    def _status(self, op: int, generation: int, entry: SliceEntry) -> int:
        chosen = self.status_of(op, entry)
        if chosen is not None:
            return chosen
        if generation != GENERATION:
            return frames.OTHER_GENERATION
        if entry.key not in self.regions:
            return frames.UNKNOWN_KEY
        if entry.offset + entry.length > len(self.regions[entry.key]):
            return frames.OUT_OF_BOUNDS
        return frames.OK

    def _record(self, op: int, entry: SliceEntry, status: int) -> None:
        now = asyncio.get_running_loop().time()
        self.accesses.append(OwnerAccess(op, entry.key, entry.offset, entry.length, now, status))

    async def _read_start(self, stream: EncryptedStream, magic: bytes) -> bytes:
        header = await stream.read(frames.START.size)
        found, version, _, length = frames.START.unpack(header)
        if wrong := frames.start_fault(magic, found, version, length):
            self.faults.append(f"{header!r}: {wrong}")
            raise ConnectionError
        return await stream.read(length)
