"""Between a kvstore and its clients: prefill workers, and conductors for the index.

A put is two-phase: reserve, write by one-sided transfer, then commit or revoke. A get takes a
lease on the blocks, reads them by one-sided transfer, and releases it. Blocks are immutable;
putting one that is there already is success.
"""

import msgspec

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.layout import KvLayout
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.prefill import KvstoreAddress
from halfmoon_protocol.regions import Region
from halfmoon_protocol.traces import TraceContext

# client -> kvstore


class ReserveBlocks(Message, frozen=True, tag="reserve_blocks"):
    """Make room for blocks; answered by `BlocksReserved` or `KvstoreRefused`."""

    ticket: Ticket
    layout: KvLayout
    #: In prefix order: block i+1 is the child of block i.
    hashes: tuple[BlockHash, ...]
    #: Hash of the block before the first of `hashes`; none for the start of a prompt.
    parent: BlockHash | None
    #: The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events.
    token_ids: tuple[int, ...]
    #: Whose blocks they are, where tenants have quotas; empty: nobody's.
    tenant: str = ""


class CommitBlocks(Message, frozen=True, tag="commit_blocks"):
    """The bytes are written: these blocks may be served. Answered by `BlocksCommitted`."""

    ticket: Ticket
    #: xxh3-64 of each written block's bytes, in the order of `BlocksReserved.places`.
    checksums: tuple[int, ...]


class RevokeBlocks(Message, frozen=True, tag="revoke_blocks"):
    """Give the reservation back; nothing is answered."""

    ticket: Ticket


class LeaseBlocks(Message, frozen=True, tag="lease_blocks"):
    """Hold the longest prefix of these blocks; answered by `BlocksLeased`."""

    ticket: Ticket
    layout: KvLayout
    hashes: tuple[BlockHash, ...]
    #: Of the request that wants them, if it is sampled.
    trace: TraceContext | None = None


class RenewLease(Message, frozen=True, tag="renew_lease"):
    """A long read is still running; nothing is answered."""

    ticket: Ticket


class ReleaseLease(Message, frozen=True, tag="release_lease"):
    """The read is over; nothing is answered."""

    ticket: Ticket


class ReplicateBlocks(Message, frozen=True, tag="replicate_blocks"):
    """Please copy these blocks from another kvstore: they are asked for often. Answered by
    `BlocksReplicated` or `KvstoreRefused`: whoever owns the memory decides.

    Only for kvstores whose record says `replicates`.
    """

    ticket: Ticket
    source: KvstoreAddress
    layout: KvLayout
    #: In prefix order: block i+1 is the child of block i.
    hashes: tuple[BlockHash, ...]
    #: Hash of the block before the first of `hashes`; none for the start of a prompt.
    parent: BlockHash | None
    #: The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events. Empty
    #: when who orders does not know them: a kvstore that moves its blocks elsewhere.
    token_ids: tuple[int, ...]
    #: Whose blocks they are, if that is known. Copies count, and are not refused for a quota.
    tenant: str = ""


class DropBlocks(Message, frozen=True, tag="drop_blocks"):
    """These copies have become cold and others hold them too: give up those that nobody
    reads. Nothing is answered; KV events say what went.

    Only for kvstores whose record says `replicates`.
    """

    #: Children before parents.
    hashes: tuple[BlockHash, ...]


class VerifyBlocks(Message, frozen=True, tag="verify_blocks"):
    """What was read of these is not what their checksums say: look at them. Nothing is
    answered; KV events say what went."""

    hashes: tuple[BlockHash, ...]


class SnapshotBlocks(Message, frozen=True, tag="snapshot_blocks"):
    """Tell all that is stored; answered by `BlocksSnapshot`."""

    #: Comes back with the answer.
    ticket: Ticket = Ticket("")


# kvstore -> client


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one block is, or is to be written."""

    hash: BlockHash
    #: Bytes from the region's start.
    offset: int
    #: xxh3-64 of its bytes; 0 in a reservation.
    checksum: int = 0


class BlocksReserved(Message, frozen=True, tag="blocks_reserved"):
    """Write these. Of the hashes asked for and missing in `places`, those in `not_stored` are
    not served: somebody else is writing them, or there is no room now. The rest is stored."""

    ticket: Ticket
    region: Region
    places: tuple[Place, ...]
    #: Seconds after which an uncommitted reservation is discarded.
    expires_s: float
    #: Who must know them stored asks again; who fills a cache need not care.
    not_stored: tuple[BlockHash, ...] = ()


class BlocksCommitted(Message, frozen=True, tag="blocks_committed"):
    """The blocks are served from now on."""

    ticket: Ticket


class BlocksLeased(Message, frozen=True, tag="blocks_leased"):
    """The longest prefix that is here, perhaps empty, held until the lease runs out."""

    ticket: Ticket
    region: Region
    places: tuple[Place, ...]
    expires_s: float
    #: Of `places`, those that were not in memory when they were asked for.
    n_from_disk: int = 0


class BlocksReplicated(Message, frozen=True, tag="blocks_replicated"):
    """The first `n_blocks` of the blocks asked for are served here from now on; those that
    were there before count."""

    ticket: Ticket
    n_blocks: int


class KvstoreRefused(Message, frozen=True, tag="kvstore_refused"):
    """No; the text says why and what would help."""

    ticket: Ticket
    reason: str
    retry_after_s: float = 0.0


class BlocksSnapshot(Message, frozen=True, tag="blocks_snapshot"):
    """All blocks that are served, and the KV event sequence number that this state is after.

    Events with a sequence number of at most `sequence` are contained in it.
    """

    #: -1 before the first event.
    sequence: int
    hashes: tuple[BlockHash, ...]
    #: Of the question.
    ticket: Ticket = Ticket("")
    #: Bytes of blocks that fit here without others being given up.
    room_bytes: int = 0


class KvstoreLoad(Message, frozen=True, tag="kvstore_load"):
    """How full a kvstore is, and how far its KV events are; published."""

    n_stored: int
    n_reserved: int
    n_leased: int
    n_blocks: int
    #: Number of a KV event that was published before this; -1: none, or not told. Events and
    #: this come in order, so a listener who has not heard of it has missed it.
    sequence: int = -1
    #: The same of the disk; 0 without one.
    n_disk_stored: int = 0
    n_disk_blocks: int = 0
    #: Blocks asked for since the start, by where they were.
    n_found_in_memory: int = 0
    n_found_on_disk: int = 0
    n_missing: int = 0
