"""What a kvstore's two tiers want done, in the imperative, and how it is said to have gone."""

from typing import Literal

import msgspec

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockLocation
from halfmoon_scheduling.tiers.disk_map import BlockRecord

#: ok, or: the bytes are not what the checksum says; or: the disk said no.
TierOutcome = Literal["ok", "corrupt", "failed"]

Tier = Literal["memory", "disk"]


class TierCommand(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all commands."""


class WriteBack(TierCommand, frozen=True, tag="write_back"):
    """Copy a block from memory to the disk. Comes back as `TieredCache.written`."""

    record: BlockRecord
    memory_slot: int
    disk_slot: int


class Promote(TierCommand, frozen=True, tag="promote"):
    """Copy a block from the disk to memory and verify it. Comes back as `TieredCache.promoted`."""

    record: BlockRecord
    disk_slot: int
    memory_slot: int


class Erase(TierCommand, frozen=True, tag="erase"):
    """See that what is in this slot is not found after a restart. Comes back as `on_erased`."""

    disk_slot: int


class AnswerLease(TierCommand, frozen=True, tag="answer"):
    """A lease is decided: on these blocks, in prefix order; perhaps on none."""

    owner: str
    ticket: Ticket
    places: tuple[BlockLocation, ...]
    #: Of these, those that the lease waited for.
    n_from_disk: int = 0


class AnnounceBlocks(TierCommand, frozen=True, tag="announce"):
    """Blocks left a tier, or came to it. A block is announced in the fastest tier it is in.

    `left` is to be told before `came`: who ignores tiers then still knows what is here.
    """

    tier: Tier
    left: tuple[BlockHash, ...] = ()
    came: tuple[BlockRecord, ...] = ()
