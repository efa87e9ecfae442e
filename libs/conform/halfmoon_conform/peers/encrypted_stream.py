"""Read and write a transfer connection, in the clear or in encrypted records."""

import asyncio
import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from halfmoon_conform.verdict import CheckFailed

_RECORD_BYTES = 65_536
_TAG_BYTES = 16
_CONTEXT = b"halfmoon transfer 1"


def prove(cluster_key: str, role: bytes, initiator_map: bytes, owner_map: bytes) -> bytes:
    """Return the proof of a role over both hellos' maps."""
    digest = hmac.new(cluster_key.encode(), _CONTEXT, hashlib.sha256)
    for part in (role, initiator_map, owner_map):
        digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


class KeyShare:
    """The kit's private key of one connection."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def record_keys(self, share: bytes, salt: bytes) -> tuple[bytes, bytes]:
        """Return the keys for records of the initiator and of the owner."""
        secret = self._private.exchange(X25519PublicKey.from_public_bytes(share))
        both = HKDF(SHA256(), 64, salt, b"halfmoon transfer records 1").derive(secret)
        return both[:32], both[32:]


class EncryptedStream:
    """A connection's bytes; after `encrypt`, both directions travel in records."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._seal: AESGCM | None = None
        self._open: AESGCM | None = None
        self._n_sealed = self._n_opened = 0
        self._opened = bytearray()

    def encrypt(self, sending: bytes, receiving: bytes) -> None:
        """Encrypt all that follows."""
        self._seal, self._open = AESGCM(sending), AESGCM(receiving)

    @property
    def encrypted(self) -> bool:
        """Return whether records are used."""
        return self._seal is not None

    async def write(self, data: bytes) -> None:
        """Send these bytes."""
        if self._seal is not None:
            parts = [data[i : i + _RECORD_BYTES] for i in range(0, len(data), _RECORD_BYTES)]
            data = b"".join(self.seal(part) for part in parts)
        self._writer.write(data)
        await self._writer.drain()

    async def write_raw(self, data: bytes) -> None:
        """Send these bytes as they are, even where records are expected."""
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, n_bytes: int) -> bytes:
        """Receive exactly so many bytes.

        Raises:
            asyncio.IncompleteReadError: the peer hung up before.
        """
        if self._open is None:
            return await self._reader.readexactly(n_bytes)
        while len(self._opened) < n_bytes:
            self._opened += await self._read_record()
        data = bytes(self._opened[:n_bytes])
        del self._opened[:n_bytes]
        return data

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()

    def abort(self) -> None:
        """Cut the connection."""
        self._writer.transport.abort()

    def seal(self, part: bytes) -> bytes:
        """Return the next record, which holds these bytes."""
        assert self._seal is not None
        length = struct.pack("<I", len(part))
        nonce = struct.pack("<4xQ", self._n_sealed)
        self._n_sealed += 1
        return length + self._seal.encrypt(nonce, part, length)

    async def _read_record(self) -> bytes:
        assert self._open is not None
        length = await self._reader.readexactly(4)
        (n_bytes,) = struct.unpack("<I", length)
        if not 1 <= n_bytes <= _RECORD_BYTES:
            raise CheckFailed(f"a record of {n_bytes} bytes, it has 1 to {_RECORD_BYTES}")
        sealed = await self._reader.readexactly(n_bytes + _TAG_BYTES)
        nonce = struct.pack("<4xQ", self._n_opened)
        self._n_opened += 1
        try:
            return self._open.decrypt(nonce, sealed, length)
        except InvalidTag:
            raise CheckFailed(
                "a record that does not open with the connection's key: the first 32 bytes of the"
                " HKDF are for the initiator's records, the nonce counts from 0, and the 4 bytes of"
                " n are authenticated"
            ) from None
