"""Define the commands of a kvstore's two tiers, and the outcomes of the I/O."""

from typing import Literal

import msgspec

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.stored_blocks import BlockLocation
from halfmoon_scheduling.tiers.disk_map import BlockRecord

#: How the I/O of a command ended; "corrupt": the bytes do not match the checksum.
TierOutcome = Literal["ok", "corrupt", "failed"]

Tier = Literal["memory", "disk"]


class TierCommand(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all commands."""


class WriteBack(TierCommand, frozen=True, tag="write_back"):
    """Copy a block from memory to the disk, and report to `TieredCache.on_written`."""

    record: BlockRecord
    memory_slot: int
    disk_slot: int


class Promote(TierCommand, frozen=True, tag="promote"):
    """Copy a block from the disk to memory, verify it, report to `TieredCache.on_promoted`."""

    record: BlockRecord
    disk_slot: int
    memory_slot: int


class Erase(TierCommand, frozen=True, tag="erase"):
    """Mark a disk slot as empty for the next start, and report to `TieredCache.on_erased`."""

    disk_slot: int


class AnswerLease(TierCommand, frozen=True, tag="answer"):
    """Answer a lease with its blocks in prefix order; perhaps none."""

    owner: str
    ticket: Ticket
    places: tuple[BlockLocation, ...]
    #: Blocks among them that the lease waited for.
    n_from_disk: int = 0


class AnnounceBlocks(TierCommand, frozen=True, tag="announce"):
    """Announce blocks that left a tier or came to it.

    A block is announced in the fastest tier that holds it. Announce `left` before `came`: then a
    receiver that ignores tiers still knows which blocks are here.
    """

    tier: Tier
    left: tuple[BlockHash, ...] = ()
    came: tuple[BlockRecord, ...] = ()
