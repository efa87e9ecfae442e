"""Define the KV events of a server, in the fields that Halfmoon reads.

The names are vLLM's (``vllm/distributed/kv_events.py``, 0.32.0) with "Server" in front. The fields
stand in the order of vLLM's positional arrays.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import TokenId

#: Blocks of one event; a prompt of a million tokens has 65,536 blocks of 16.
MAX_EVENT_BLOCKS = 65_536
#: Tokens of one event.
MAX_EVENT_TOKENS = 2**21
#: Bytes of one hash; vLLM's SHA-256 has 32.
MAX_SERVER_HASH_BYTES = 64
#: Extra keys of one block; vLLM has one for the adapter, the salt and each image.
MAX_EXTRA_KEYS = 256
MAX_SERVER_BLOCK_SIZE = 2**20
#: Characters of a medium, an adapter or a kind of cache.
MAX_EVENT_NAME = 4096

_HashBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_SERVER_HASH_BYTES)]
#: A chained block hash of the server's own kind: 64 bits, signed or not, or bytes.
ServerHash = int | bytes
_Hashes = Annotated[tuple[int | _HashBytes, ...], Meta(max_length=MAX_EVENT_BLOCKS)]
_Name = Annotated[str, Meta(max_length=MAX_EVENT_NAME)]
_Keys = Annotated[tuple[Any, ...], Meta(max_length=MAX_EXTRA_KEYS)]
_Number = Annotated[int, Meta(ge=0, le=2**48)]


class ServerBlockStored(
    msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", kw_only=True
):
    """Blocks entered a cache of the server, each the child of the block before it."""

    block_hashes: _Hashes
    #: None: the first block is the first one of a prompt.
    parent_block_hash: int | _HashBytes | None
    #: Of all these blocks, one after another. Empty in placeholders, which name only hashes.
    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_EVENT_TOKENS)]
    block_size: Annotated[int, Meta(ge=0, le=MAX_SERVER_BLOCK_SIZE)]
    lora_id: int | None = None
    #: "GPU", "CPU" or "STORAGE"; None: the server has one medium only.
    medium: _Name | None = None
    lora_name: _Name | None = None
    #: One entry for each block: a salt, ``(image, offset)`` pairs, digests of embeddings.
    extra_keys: Annotated[tuple[_Keys | None, ...], Meta(max_length=MAX_EVENT_BLOCKS)] | None = None
    #: Number of the layer group in models with several kinds of layers.
    group_idx: _Number | None = None
    kv_cache_spec_kind: _Name | None = None


class ServerBlockRemoved(
    msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", kw_only=True
):
    """Blocks left one medium of the server."""

    block_hashes: _Hashes
    medium: _Name | None = None
    group_idx: _Number | None = None


class ServerCacheCleared(
    msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared", kw_only=True
):
    """The server's cache is empty."""


ServerEvent = ServerBlockStored | ServerBlockRemoved | ServerCacheCleared
