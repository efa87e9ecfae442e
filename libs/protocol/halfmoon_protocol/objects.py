"""Store objects, bytes under a key, as blocks of a kvstore: their hashes and their head.

An object is a chain of blocks of equal size, whose hashes follow from its key alone. With ``u32``
and ``u64`` little-endian and ``H`` the first 16 bytes of SHA-256:

    root    = H( "halfmoon.object.v1" | u32 block_bytes | key )
    hash[0] = H( root      | u32 0 )
    hash[i] = H( hash[i-1] | u32 i )

The blocks' bytes, one after the other, are a head of 32 bytes, the object's bytes, and zeros:

    head    = "HMOBJ1\\0\\0" | u64 number of bytes | xxh3-128 of the bytes, big-endian
"""

import hashlib
import struct

import msgspec

from halfmoon_protocol.errors import MalformedMessage
from halfmoon_protocol.ids import BlockHash

MAX_KEY_BYTES = 1024
_DOMAIN = b"halfmoon.object.v1"
_HEAD = struct.Struct("<8sQ16s")
_MAGIC = b"HMOBJ1\0\0"
OBJECT_HEAD_BYTES = _HEAD.size


class ObjectHead(msgspec.Struct, frozen=True):
    """The head of an object, at the beginning of its first block."""

    n_bytes: int
    #: xxh3-128 of all its bytes.
    digest: bytes

    def encode(self) -> bytes:
        """Return the head's bytes."""
        return _HEAD.pack(_MAGIC, self.n_bytes, self.digest)

    @classmethod
    def decode(cls, block: bytes | memoryview) -> "ObjectHead":
        """Read a head from the beginning of an object's first block.

        Raises:
            MalformedMessage: the block is none of an object.
        """
        if len(block) < OBJECT_HEAD_BYTES:
            raise MalformedMessage(
                f"a block of {len(block)} bytes has no head of {OBJECT_HEAD_BYTES}"
            )
        magic, n_bytes, digest = _HEAD.unpack_from(block)
        if magic != _MAGIC:
            raise MalformedMessage("the block is none of an object")
        return cls(n_bytes, digest)

    def n_blocks(self, block_bytes: int) -> int:
        """Count the blocks that the object takes."""
        return -(-(OBJECT_HEAD_BYTES + self.n_bytes) // block_bytes)


def object_hashes(key: str, n_blocks: int, block_bytes: int) -> list[BlockHash]:
    """Return the hashes of an object's first blocks.

    Raises:
        MalformedMessage: the key is empty or too long.
    """
    encoded = key.encode()
    if not 0 < len(encoded) <= MAX_KEY_BYTES:
        raise MalformedMessage(f"a key of {len(encoded)} bytes, 1 to {MAX_KEY_BYTES} are allowed")
    last = _hash(_DOMAIN + struct.pack("<I", block_bytes) + encoded)
    hashes: list[BlockHash] = []
    for i in range(n_blocks):
        last = _hash(last + struct.pack("<I", i))
        hashes.append(last)
    return hashes


def _hash(data: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(data).digest()[:16])
