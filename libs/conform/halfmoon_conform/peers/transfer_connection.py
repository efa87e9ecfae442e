"""Dial a transfer owner over TCP as an initiator that may misbehave."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.peers.encrypted_stream import EncryptedStream, KeyShare, prove
from halfmoon_conform.peers.transfer_frames import ReplyHead, RequestHead, SliceEntry
from halfmoon_conform.verdict import CheckFailed

_REPLY_S = 20.0
_PROOF_HINT = (
    "A proof is over four parts: the text, the prover's role, the initiator's map and the owner's,"
    " as they were sent. Each but the first comes after its length, a u32 in little-endian"
)
#: A region of a message: segment, generation, key and length.
RegionMap = dict[str, Any]


class HungUp(Exception):
    """The owner closed the connection."""


class RepliedInstead(CheckFailed):
    """The owner sent a reply where its hello or proof was due."""


class TransferConnection:
    """One connection to an owner; `open` dials and says hello."""

    def __init__(self, stream: EncryptedStream) -> None:
        self.stream = stream
        self._n_requests = 0
        #: The owner's hello, and its answer to our proof.
        self.owner: dict[str, Any] = {}
        self.proof_answer: dict[str, Any] = {}

    @classmethod
    async def dial(cls, address: str) -> "TransferConnection":
        """Open a connection without a hello."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        return cls(EncryptedStream(reader, writer))

    @classmethod
    async def open(
        cls,
        address: str,
        segment: str,
        generation: int,
        *,
        cluster_key: str = "",
        encrypt: bool = True,
        hello: dict[str, Any] | None = None,
    ) -> "TransferConnection":
        """Dial and say hello, with the proofs and records of a cluster key if there is one.

        Raises:
            CheckFailed: the owner refuses, proves nothing, or speaks another protocol.
        """
        opened = await cls.dial(address)
        await opened.greet(
            segment, generation, cluster_key=cluster_key, encrypt=encrypt, hello=hello
        )
        return opened

    async def greet(
        self,
        segment: str,
        generation: int,
        *,
        cluster_key: str = "",
        encrypt: bool = True,
        hello: dict[str, Any] | None = None,
        proof: bytes | None = None,
    ) -> None:
        """Say hello and, with a key, exchange proofs; `hello` and `proof` replace parts.

        Raises:
            CheckFailed: the owner refuses, or its answer is not right.
            HungUp: it closed the connection.
        """
        share = KeyShare() if cluster_key and encrypt else None
        asked = {
            "segment": segment,
            "generation": generation,
            "session": secrets.token_bytes(16),
            "number": 0,
            "over": [],
            "origin": "conform",
            "origin_generation": 1,
            "nonce": secrets.token_bytes(32) if cluster_key else b"",
            "share": share.public if share else b"",
            "a_field_of_the_future": 1,
            **(hello or {}),
        }
        sent = msgspec.msgpack.encode(asked)
        await self.stream.write(frames.encode_start(frames.HELLO, sent))
        answered = await self.read_start(frames.HELLO)
        self.owner = msgspec.msgpack.decode(answered)
        if self.owner.get("refused"):
            raise CheckFailed(f"refused the hello: {self.owner['refused']}")
        if not cluster_key:
            return
        ours = prove(cluster_key, b"initiator", sent, answered) if proof is None else proof
        body = msgspec.msgpack.encode({"proof": ours, "refused": ""})
        await self.stream.write(frames.encode_start(frames.PROOF, body))
        theirs = msgspec.msgpack.decode(await self.read_start(frames.PROOF))
        self.proof_answer = theirs
        if theirs.get("refused"):
            raise CheckFailed(f"refused the proof: {theirs['refused']}. {_PROOF_HINT}")
        if theirs.get("proof") != prove(cluster_key, b"owner", sent, answered):
            raise CheckFailed(
                f"its proof is not the owner's proof under the cluster key. {_PROOF_HINT}"
            )
        if share is not None:
            if len(self.owner.get("share", b"")) != 32:
                raise CheckFailed("its hello has no share of 32 bytes, and ours has one")
            salt = prove(cluster_key, b"records", sent, answered)
            self.stream.encrypt(*share.record_keys(self.owner["share"], salt))

    # -- good behaviour ------------------------------------------------------------------------

    async def write_bytes(self, region: RegionMap, parts: Sequence[tuple[int, bytes]]) -> list[int]:
        """Write these parts, each at its offset, and return their statuses."""
        entries = [
            SliceEntry(bytes(region["key"]), offset, len(data), frames.checksum(data))
            for offset, data in parts
        ]
        await self.send(
            frames.WRITE, region["generation"], entries, b"".join(data for _, data in parts)
        )
        reply = await self.reply()
        if (reply.op, len(reply.entries)) != (frames.WRITE, len(entries)):
            raise CheckFailed(f"answered a write of {len(entries)} slices by {reply}")
        return [status for status, _ in reply.entries]

    async def read_bytes(
        self, region: RegionMap, parts: Sequence[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        """Read these parts, offset and length each, and return statuses and bytes."""
        entries = [SliceEntry(bytes(region["key"]), offset, length) for offset, length in parts]
        await self.send(frames.READ, region["generation"], entries)
        reply = await self.reply()
        if (reply.op, len(reply.entries)) != (frames.READ, len(entries)):
            raise CheckFailed(f"answered a read of {len(entries)} slices by {reply}")
        return await self.read_payload(reply, [length for _, length in parts])

    async def read_payload(
        self, reply: ReplyHead, lengths: Sequence[int]
    ) -> list[tuple[int, bytes]]:
        """Receive the bytes of a reply's good slices and compare their checksums."""
        found = []
        for (status, detail), length in zip(reply.entries, lengths, strict=True):
            data = b""
            if status == frames.OK:
                data = await self._read(length)
                if frames.checksum(data) != detail:
                    raise CheckFailed("the detail of a slice is not the xxh3-64 of its bytes")
            found.append((status, data))
        return found

    # -- any behaviour -------------------------------------------------------------------------

    async def send(
        self, op: int, generation: int, entries: Sequence[SliceEntry], payload: bytes = b""
    ) -> int:
        """Send a request with the next number, and return the number."""
        number = self._n_requests
        self._n_requests += 1
        head = RequestHead(op, number, generation, list(entries)).encode()
        await self.stream.write(head + payload)
        return number

    async def reply(self) -> ReplyHead:
        """Receive the head of the next reply.

        Raises:
            HungUp: the owner closed the connection.
            CheckFailed: it is no reply, or none came.
        """
        header = await self._read(frames.HEADER.size)
        magic, version, op, n, n_text, _, number, _ = frames.HEADER.unpack(header)
        if (magic, version) != (frames.REPLY, 1):
            raise CheckFailed(
                f"a reply begins with {header[:5]!r}, not with {frames.REPLY!r} and version 1"
            )
        rest = await self._read(n * frames.ANSWERED.size)
        (found,) = frames.SUM.unpack(await self._read(frames.SUM.size))
        if found != (right := frames.checksum(header + rest)):
            raise CheckFailed(
                f"a reply with the checksum {found:#x}; the xxh3-64 of the {len(header + rest)} "
                f"bytes before it is {right:#x}"
            )
        text = (await self._read(n_text)).decode() if op == frames.FAILED else ""
        return ReplyHead(op, number, list(frames.ANSWERED.iter_unpack(rest)), text)

    async def expect_end(self) -> str:
        """Wait until the owner hangs up, and return the text of its last reply, if any.

        Raises:
            CheckFailed: it goes on.
        """
        text = ""
        try:
            while True:
                reply = await self.reply()
                if reply.op != frames.FAILED:
                    raise CheckFailed(f"answered what can't be read by {reply}")
                text = reply.text
        except HungUp:
            return text

    async def close(self) -> None:
        """Hang up."""
        await self.stream.close()

    async def read_start(self, magic: bytes) -> bytes:
        """Receive a hello or a proof, and return its map as it was sent.

        Raises:
            RepliedInstead: a reply came.
            CheckFailed: it is neither, or longer than it may be.
            HungUp: the owner closed the connection.
        """
        header = await self._read(frames.START.size)
        found, version, _, length = frames.START.unpack(header)
        if found == frames.REPLY:
            raise RepliedInstead(f"a reply came, not {magic!r}")
        if wrong := frames.start_fault(magic, found, version, length):
            raise CheckFailed(f"{header!r}: {wrong}")
        return await self._read(length)

    async def _read(self, n_bytes: int) -> bytes:
        try:
            return await asyncio.wait_for(self.stream.read(n_bytes), _REPLY_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HungUp from None
        except TimeoutError:
            raise CheckFailed(f"sent nothing on a transfer connection for {_REPLY_S:g} s") from None
