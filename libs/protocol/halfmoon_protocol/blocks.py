"""Compute chained block hashes: the keys by which all services name blocks of KV cache.

A prompt is cut into blocks of `block_size` tokens. A block's hash covers its tokens and its
parent's hash, so equal hashes mean equal blocks *and* equal whole prefixes (Mooncake, arXiv
2407.00079, section 3). A last block that is not full has no hash.

Byte for byte, with ``u32`` little-endian and ``H`` the first 16 bytes of SHA-256:

    root     = H( "halfmoon.block.v1" | u32 block_size | u32 len(model) | model
                                      | u32 len(salt)  | salt )
    hash[0]  = H( root      | u32 token[0]          … u32 token[block_size-1] )
    hash[i]  = H( hash[i-1] | u32 token[i*block_size] … )

``model`` is the model's fingerprint and ``salt`` the tenant's salt, both UTF-8. Two tenants
with different salts share no hash, so neither can probe the other's cache.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from sys import byteorder

from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.ids import BlockHash

HASH_BYTES = 16
MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 512
_DOMAIN = b"halfmoon.block.v1"


def check_block_size(block_size: int) -> int:
    """Return `block_size` if it is allowed.

    Raises:
        ProtocolError: outside 16–512 tokens (the range of Mooncake, FAST'25, section 3).
    """
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ProtocolError(
            f"block_size is {block_size}, allowed are {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE} tokens"
        )
    return block_size


@lru_cache(maxsize=1024)
def root_hash(*, model: str, salt: str, block_size: int) -> BlockHash:
    """Return the parent of every first block of a model, tenant and block size."""
    check_block_size(block_size)
    parts = [_DOMAIN, struct.pack("<I", block_size)]
    for text in (model, salt):
        encoded = text.encode()
        parts += [struct.pack("<I", len(encoded)), encoded]
    return _hash(b"".join(parts))


def block_hashes(
    token_ids: Sequence[int], *, model: str, salt: str = "", block_size: int
) -> list[BlockHash]:
    """Return the hashes of the full blocks of a prompt, in order.

    Args:
        token_ids: the whole prompt; each id must fit an unsigned 32-bit integer.
        model: the model's fingerprint (`KvLayout.model`).
        salt: the tenant's salt; empty for the shared cache.
        block_size: tokens per block, 16 to 512.

    Raises:
        ProtocolError: a bad block size, or a token id that is negative or too large.
    """
    root = root_hash(model=model, salt=salt, block_size=block_size)
    return child_hashes(root, token_ids, block_size=block_size)


def child_hashes(
    parent: BlockHash, token_ids: Sequence[int], *, block_size: int
) -> list[BlockHash]:
    """Return the hashes of the full blocks that follow `parent`, in order.

    Args:
        parent: the hash of the block before them, or `root_hash`.
        token_ids: the tokens after that block; each id must fit an unsigned 32-bit integer.
        block_size: tokens per block, 16 to 512.

    Raises:
        ProtocolError: a bad block size, or a token id that is negative or too large.
    """
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ProtocolError(f"token ids must be integers from 0 to 2^32-1: {error}") from None
    if byteorder == "big":
        words.byteswap()
    raw = words.tobytes()
    step = 4 * check_block_size(block_size)
    hashes: list[BlockHash] = []
    for start in range(0, len(raw) - step + 1, step):
        parent = _hash(parent + raw[start : start + step])
        hashes.append(parent)
    return hashes


def _hash(data: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(data).digest()[:HASH_BYTES])
