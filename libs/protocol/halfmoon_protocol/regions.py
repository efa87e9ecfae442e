"""Name memory in messages: a registered region of a segment, and places in it.

A *segment* is one process's set of regions. The metadata server has its record, with the addresses
by which the process is reached. A *region* is one registered buffer of a segment, addressed by a
key that can't be guessed. Messages carry regions; the bytes move through `halfmoon_transfer`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import MAX_ITEMS, Bytes, Count, Index, Name
from halfmoon_protocol.kv_layout import KvLayout

KEY_BYTES = 16


class Region(msgspec.Struct, frozen=True):
    """A registered buffer of some process, as its peers name it."""

    #: Name of the segment, the key of its record in the metadata server.
    segment: Name
    #: The segment's generation: a restarted process has a higher one, and an access with
    #: an old one is refused rather than applied to other memory.
    generation: Count
    #: 16 random bytes, the right to read and write the region, or what a ticket or landing has of
    #: it. TCP takes 16 bytes alone; at most 64 are read from a message.
    key: Annotated[bytes, Meta(max_length=64)]
    #: Its length; accesses beyond it are refused.
    length: Bytes


class Landing(msgspec.Struct, frozen=True):
    """Where the KV of one request lands in a decode worker's pool."""

    #: The pool, or a part of it that its key opens for this request alone.
    region: Region
    #: Page i of the request's blocks; its bytes start at ``pages[i] * layout.block_bytes``.
    pages: Annotated[tuple[Index, ...], Meta(max_length=MAX_ITEMS)]
    #: How the bytes of a page are laid out.
    layout: KvLayout
