"""Define what operators are answered: blocks, memory, files and pins, as JSON objects."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

HashText = Annotated[
    str, Meta(pattern="^([0-9a-fA-F]{2}){1,64}$", description="A block's hash, in hexadecimal.")
]


class BlockPage(msgspec.Struct, frozen=True):
    """Hashes of stored blocks, in their order."""

    #: Blocks that the node stores in all.
    n_blocks: int
    #: Of this page.
    hashes: list[str]


class PinReport(msgspec.Struct, frozen=True):
    """The pin of a block."""

    #: A hard pin is kept whatever happens; a soft one until nothing else can go.
    kind: str
    #: Seconds until it ends; none: it stays until it is removed.
    remaining_s: float | None


class BlockReport(msgspec.Struct, frozen=True):
    """One block of this node."""

    #: Its hash, in hexadecimal.
    hash: str
    #: Hash of the block before it; none: it begins a prompt.
    parent: str | None
    #: Blocks before it.
    depth: int
    #: Where readers get it from.
    tier: Literal["memory", "disk"]
    #: True if the disk has it, beside memory or alone.
    on_disk: bool
    #: Of its KV.
    bytes: int
    #: Seconds since it came to memory; none: it is on disk only.
    age_s: float | None
    #: The tenant whose quota it counts against; empty: none.
    tenant: str
    #: Readers that hold it now.
    leases: int
    #: Its own pin; none: it has none.
    pin: PinReport | None
    #: True if a hard pin, its own or of a block behind it, keeps it.
    held: bool
    #: Name of the node.
    worker_id: str
    #: Counts the starts of the node.
    generation: int


class MemoryReport(msgspec.Struct, frozen=True):
    """The memory of the node. Without a first put, nothing is known of slots."""

    #: Name of its segment in the metadata server.
    segment: str
    #: Length of the memory.
    bytes: int
    #: Places for one block each.
    n_slots: int
    #: Bytes beside the slots.
    lost_bytes: int
    #: Their share of the memory.
    fragmentation: float
    #: Slots that hold a block, or are promised to one.
    used: int | UnsetType = UNSET
    #: Slots that hold none.
    free: int | UnsetType = UNSET
    #: Used slots whose blocks are served.
    stored: int | UnsetType = UNSET
    #: Used slots whose blocks are being written.
    reserved: int | UnsetType = UNSET
    #: Blocks that are being read.
    leased: int | UnsetType = UNSET


class FileReport(msgspec.Struct, frozen=True):
    """One file of the disk tier."""

    #: Name in the node's folder.
    file: str
    #: Length of the file.
    bytes: int
    #: Places for one block each.
    n_slots: int
    #: Slots that hold a block.
    used: int
    #: Slots that hold none.
    free: int
    #: Bytes beside the slots, or lost to page rounding.
    lost_bytes: int
    #: Their share of the file.
    fragmentation: float
    #: True if it is read and written past the page cache.
    direct: bool


class PinCounts(msgspec.Struct, frozen=True):
    """Pins of the node, and the blocks that they keep."""

    #: Blocks with a soft pin.
    soft: int = 0
    #: Blocks with a hard pin.
    hard: int = 0
    #: Blocks that hard pins keep.
    held: int = 0
    #: The most that they may keep.
    max_held: int = 0


class TenantUse(msgspec.Struct, frozen=True):
    """The blocks of one tenant."""

    #: Stored blocks that count against its quota.
    n_blocks: int
    #: The most that it may have; none: no limit.
    quota_blocks: int | None


class SegmentsReport(msgspec.Struct, frozen=True):
    """Memory and files of the node."""

    #: Name of the node.
    worker_id: str
    #: Counts the starts of the node.
    generation: int
    #: True while the node takes no puts and is about to leave.
    draining: bool
    #: Bytes of one block; 0 before the first put.
    block_bytes: int
    #: Blocks in memory or on disk.
    n_blocks: int
    #: Its memory.
    memory: MemoryReport
    #: The files of its disk tier.
    disk: list[FileReport]
    #: True while the disk is paused because writes failed.
    disk_off: bool
    #: Bytes of its files for which the file system has had no room yet.
    disk_missing_bytes: int
    #: Its pins.
    pins: PinCounts
    #: By tenant.
    tenants: dict[str, TenantUse]
