"""Define the messages between a kvstore and its clients: prefill workers and conductors.

Conductors need them for their index. A put is two-phase: reserve, write by one-sided transfer, then
commit or revoke. A get takes a lease on the blocks, reads them by one-sided transfer, and releases
it. Blocks are immutable; a put of a block that is stored already succeeds.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_ITEMS,
    Blocks,
    Bytes,
    Checksum,
    ErrorCode,
    HashBytes,
    Hashes,
    Name,
    Reason,
    Seconds,
    Sequence,
    TicketName,
    TokenIds,
)
from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.prefill import KvstoreAddress
from halfmoon_protocol.regions import Region
from halfmoon_protocol.trace_context import TraceContext

# client -> kvstore


class ReserveBlocks(Message, frozen=True, tag="reserve_blocks"):
    """Make room for blocks; answered by `BlocksReserved` or `KvstoreRefused`."""

    ticket: TicketName
    #: How the bytes of the blocks are laid out.
    layout: KvLayout
    #: In prefix order: block i+1 is the child of block i.
    hashes: Hashes
    #: Hash of the block before the first of `hashes`; none for the start of a prompt.
    parent: HashBytes | None
    #: The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events.
    token_ids: TokenIds
    #: The tenant whose quota they count against; empty: none.
    tenant: Name = ""


class CommitBlocks(Message, frozen=True, tag="commit_blocks"):
    """The bytes are written: these blocks may be served. Answered by `BlocksCommitted`."""

    ticket: TicketName
    #: xxh3-64 of each written block's bytes, in the order of `BlocksReserved.places`.
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_ITEMS)]


class RevokeBlocks(Message, frozen=True, tag="revoke_blocks"):
    """Give the reservation back; nothing is answered."""

    ticket: TicketName


class LeaseBlocks(Message, frozen=True, tag="lease_blocks"):
    """Hold the longest prefix of these blocks; answered by `BlocksLeased`."""

    ticket: TicketName
    #: How the bytes of the blocks are laid out.
    layout: KvLayout
    #: In prefix order: block i+1 is the child of block i.
    hashes: Hashes
    #: Of the request that needs the blocks, if it is sampled.
    trace: TraceContext | None = None


class RenewLease(Message, frozen=True, tag="renew_lease"):
    """A long read, or a put that is not committed, is still running.

    Answered by `LeaseRenewed`, or by `KvstoreRefused` if there is no such ticket any more.
    """

    ticket: TicketName


class ReleaseLease(Message, frozen=True, tag="release_lease"):
    """The read is over; nothing is answered."""

    ticket: TicketName


class ReplicateBlocks(Message, frozen=True, tag="replicate_blocks"):
    """Please copy these blocks from another kvstore: they are asked for often. Answered by
    `BlocksReplicated` or `KvstoreRefused`: the owner of the memory decides.

    Only for kvstores whose record says `replicates`.
    """

    ticket: TicketName
    #: The kvstore to read them from.
    source: KvstoreAddress
    #: How the bytes of the blocks are laid out.
    layout: KvLayout
    #: In prefix order: block i+1 is the child of block i.
    hashes: Hashes
    #: Hash of the block before the first of `hashes`; none for the start of a prompt.
    parent: HashBytes | None
    #: The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events. Empty
    #: when the sender does not know them: a kvstore that moves its blocks elsewhere.
    token_ids: TokenIds
    #: The tenant of the blocks, if known. Copies count against its quota, and are never refused
    #: for it.
    tenant: Name = ""


class DropBlocks(Message, frozen=True, tag="drop_blocks"):
    """These copies have become cold and others hold them too: give up those that no
    lease holds. Nothing is answered; KV events say what went.

    Only for kvstores whose record says `replicates`.
    """

    #: Children before parents.
    hashes: Hashes


class VerifyBlocks(Message, frozen=True, tag="verify_blocks"):
    """What was read of these is not what their checksums say: look at them. Nothing is
    answered; KV events say what went."""

    #: In any order.
    hashes: Hashes


class SnapshotBlocks(Message, frozen=True, tag="snapshot_blocks"):
    """Tell all that is stored; answered by `BlocksSnapshot`, or by several, its pages."""

    #: Repeated in the answer.
    ticket: TicketName = Ticket("")
    #: Hashes that a page shall have at most; 0: all in one answer, or what fits one. A kvstore may
    #: answer in larger pages.
    page: Blocks = 0


# kvstore -> client


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one block is, or is to be written."""

    #: The block.
    hash: HashBytes
    #: Bytes from the region's start.
    offset: Bytes
    #: xxh3-64 of its bytes; 0 in a reservation.
    checksum: Checksum = 0


_Places = Annotated[tuple[Place, ...], Meta(max_length=MAX_ITEMS)]


class BlocksReserved(Message, frozen=True, tag="blocks_reserved"):
    """Write these. Of the hashes asked for and missing in `places`, those in `not_stored` are
    not served: another client is writing them, or there is no room now. The rest is stored."""

    ticket: TicketName
    #: The memory to write to.
    region: Region
    #: One for each block to write.
    places: _Places
    #: Seconds, from this answer's sending, after which an uncommitted reservation is discarded.
    expires_s: Seconds
    #: A client that needs these stored asks again; one that fills a cache may ignore them.
    not_stored: Hashes = ()


class BlocksCommitted(Message, frozen=True, tag="blocks_committed"):
    """The blocks are served from now on."""

    ticket: TicketName


class BlocksLeased(Message, frozen=True, tag="blocks_leased"):
    """The longest prefix that is here, perhaps empty, held until the lease runs out."""

    ticket: TicketName
    #: The memory to read from.
    region: Region
    #: One for each block of the prefix, in its order.
    places: _Places
    #: Seconds, from this answer's sending, after which the lease ends, unless it is renewed.
    expires_s: Seconds
    #: Blocks of `places` that were not in memory when they were requested.
    n_from_disk: Blocks = 0


class LeaseRenewed(Message, frozen=True, tag="lease_renewed"):
    """The lease, or the reservation, is held for as long again."""

    ticket: TicketName
    #: Seconds from this answer's sending.
    expires_s: Seconds


class BlocksReplicated(Message, frozen=True, tag="blocks_replicated"):
    """The first `n_blocks` of the blocks asked for are served here from now on; those that
    were there before count."""

    ticket: TicketName
    #: How many of the blocks are served here.
    n_blocks: Blocks


class KvstoreRefused(Message, frozen=True, tag="kvstore_refused"):
    """No; the text says why and what would help."""

    ticket: TicketName
    #: Why, for people.
    reason: Reason
    #: Seconds after which a further try may help; 0: not said.
    retry_after_s: Seconds = 0.0
    code: ErrorCode = ""


class BlocksSnapshot(Message, frozen=True, tag="blocks_snapshot"):
    """All blocks that are served, and the KV event sequence number that this state is after.

    Events with a sequence number of at most `sequence` are contained in it.
    """

    #: Number of the last KV event that is contained; -1: there was none.
    sequence: Sequence
    #: Blocks of memory and disk, in any order.
    hashes: Hashes
    #: The ticket of `SnapshotBlocks`.
    ticket: TicketName = Ticket("")
    #: Bytes of blocks that fit without evicting others.
    room_bytes: Bytes = 0
    #: Hashes in the pages before this one.
    n_before: Blocks = 0
    #: Hashes in the pages after this one; 0: it is the last.
    n_after: Blocks = 0


class KvstoreLoad(Message, frozen=True, tag="kvstore_load"):
    """How full a kvstore is, and how far its KV events are; published."""

    #: Blocks in memory that can be read.
    n_stored: Blocks
    #: Blocks of memory that are being written.
    n_reserved: Blocks
    #: Stored blocks that are being read.
    n_leased: Blocks
    #: Blocks that the memory holds.
    n_blocks: Blocks
    #: Number of a KV event that was published before this report; -1: none, or not stated. Events
    #: and reports arrive in order, so a listener that has not received the event has missed it.
    sequence: Sequence = -1
    #: Blocks on disk; 0 without one.
    n_disk_stored: Blocks = 0
    #: Blocks that the disk holds; 0 without one.
    n_disk_blocks: Blocks = 0
    #: Requested blocks since the start that were in memory.
    n_found_in_memory: Blocks = 0
    #: Requested blocks since the start that only the disk had.
    n_found_on_disk: Blocks = 0
    #: Requested blocks since the start that were not here.
    n_missing: Blocks = 0
