"""Define the record of an object in the metadata store, changed by compare-and-swap.

    halfmoon/p2p/<name>  ->  JSON: sizes, shard size, a checksum per shard, and its holders

An object is a list of buffers (files), each cut into *shards*. A *holder* is one start of one
segment that has some or all shards: one region per buffer, and a bitmap. Publishers are *gold*
holders, getters *replicas*. (One bitmap per holder rather than a list of locations per shard:
the record is rewritten at each announcement.)

This module has the record and its pure changes. `object_catalog` and `p2p_store` apply them.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from halfmoon_protocol.regions import Region

PREFIX = "halfmoon/p2p/"
MAX_NAME_CHARS = 200
#: A record with more shards would be too large to be rewritten often.
MAX_SHARDS = 100_000
CHECKSUM_BYTES = 16


class ShardSource(msgspec.Struct, frozen=True, order=True):
    """A source of shards: one start of one segment."""

    segment: str
    generation: int


class BufferPlace(msgspec.Struct, frozen=True):
    """The place of a holder's buffer: it begins at this offset of this region."""

    region: Region
    offset: int = 0


class ShardHolder(msgspec.Struct, frozen=True, dict=True):
    """A segment that has shards, and may be read from."""

    source: ShardSource
    gold: bool
    #: By buffer; None for an empty buffer.
    places: tuple[BufferPlace | None, ...]
    #: Bit i % 8 of byte i // 8 is set if the holder has shard i.
    bitmap: bytes

    @cached_property
    def shards(self) -> frozenset[int]:
        """Indices of the shards that the holder has."""
        return frozenset(
            8 * index + bit
            for index, byte in enumerate(self.bitmap)
            for bit in range(8)
            if byte >> bit & 1
        )


class ObjectShard(msgspec.Struct, frozen=True):
    """A contiguous range of one buffer."""

    index: int
    buffer: int
    offset: int
    length: int


class ObjectRecord(msgspec.Struct, frozen=True):
    """One object: its buffers, checksums and holders."""

    name: str
    #: Random id that tells apart publications under the same name.
    publication: str
    #: Bytes of each buffer.
    sizes: tuple[int, ...]
    shard_bytes: int
    #: The xxh3-128 of each shard.
    checksums: tuple[bytes, ...]
    holders: tuple[ShardHolder, ...]
    #: By buffer, for a folder: the file's path in the folder.
    labels: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole object."""
        return sum(self.sizes)

    def same_content(self, other: "ObjectRecord") -> bool:
        """Return True if both have the same bytes, shards and labels."""
        return (self.sizes, self.shard_bytes, self.checksums, self.labels) == (
            other.sizes,
            other.shard_bytes,
            other.checksums,
            other.labels,
        )

    def holder(self, source: ShardSource) -> ShardHolder | None:
        """Return the entry of this source, or None."""
        return next((each for each in self.holders if each.source == source), None)

    def with_holder(self, holder: ShardHolder) -> "ObjectRecord":
        """Return a copy with this entry, which replaces an earlier one of the same source."""
        return msgspec.structs.replace(
            self, holders=(*self.without({holder.source}).holders, holder)
        )

    def without(self, sources: Iterable[ShardSource]) -> "ObjectRecord":
        """Return a copy without the entries of these sources."""
        gone = frozenset(sources)
        left = tuple(each for each in self.holders if each.source not in gone)
        return msgspec.structs.replace(self, holders=left)

    def check(self) -> None:
        """Assert the invariants of every stored record."""
        n_shards = len(cut_shards(self.sizes, self.shard_bytes))
        assert len(self.checksums) == n_shards
        sources = [each.source for each in self.holders]
        assert len(set(sources)) == len(sources), "a holder is listed twice"
        for each in self.holders:
            assert each.shards <= frozenset(range(n_shards))


class ObjectSummary(msgspec.Struct, frozen=True):
    """One line of a listing."""

    name: str
    n_bytes: int
    n_buffers: int
    n_gold: int
    #: Getters that have all shards.
    n_replicas: int
    #: Getters that have only some shards so far.
    n_partial: int


def summarize(record: ObjectRecord) -> ObjectSummary:
    """Return the listing line of a record."""
    n_shards = len(record.checksums)
    replicas = [each for each in record.holders if not each.gold]
    n_whole = sum(len(each.shards) == n_shards for each in replicas)
    return ObjectSummary(
        name=record.name,
        n_bytes=record.n_bytes,
        n_buffers=len(record.sizes),
        n_gold=len(record.holders) - len(replicas),
        n_replicas=n_whole,
        n_partial=len(replicas) - n_whole,
    )


def cut_shards(sizes: Sequence[int], shard_bytes: int) -> tuple[ObjectShard, ...]:
    """Cut buffers of these sizes into shards, in order."""
    ranges = (
        (buffer, offset, min(shard_bytes, size - offset))
        for buffer, size in enumerate(sizes)
        for offset in range(0, size, shard_bytes)
    )
    return tuple(ObjectShard(index, *each) for index, each in enumerate(ranges))


def bitmap(shards: Iterable[int], n_shards: int) -> bytes:
    """Encode shard indices in the format of `ShardHolder.bitmap`."""
    bits = bytearray(-(-n_shards // 8))
    for index in shards:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def check_object_name(name: str) -> str:
    """Return `name` if it may name an object.

    Raises:
        ValueError: it is empty, too long, or holds unprintable characters.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"an object's name has 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.80}"
        )
    return name


def encode(record: ObjectRecord) -> bytes:
    """Encode a record as the value in the metadata store."""
    return msgspec.json.encode(record)


def decode(value: bytes) -> ObjectRecord:
    """Decode and validate a record, so that a broken one fails here and not later.

    Raises:
        ValueError: the value is not a valid record.
    """
    try:
        record = msgspec.json.decode(value, type=ObjectRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an object's record: {error}") from None
    if record.shard_bytes < 1 or any(size < 0 for size in record.sizes):
        raise ValueError("sizes that can't be")
    n_shards = sum(-(-size // record.shard_bytes) for size in record.sizes)
    wrong = (
        n_shards > MAX_SHARDS
        or len(record.checksums) != n_shards
        or any(len(each) != CHECKSUM_BYTES for each in record.checksums)
        or (record.labels and len(record.labels) != len(record.sizes))
    )
    if wrong:
        raise ValueError(f"{len(record.checksums)} checksums for {n_shards} shards, or the like")
    if len({holder.source for holder in record.holders}) < len(record.holders):
        raise ValueError("a holder that is listed twice")
    for holder in record.holders:
        if len(holder.places) != len(record.sizes) or len(holder.bitmap) != -(-n_shards // 8):
            raise ValueError(f"the entry of {holder.source.segment} does not fit the object")
        if holder.shards and max(holder.shards) >= n_shards:
            raise ValueError(f"{holder.source.segment} has shards that there are not")
        for size, place in zip(record.sizes, holder.places, strict=True):
            if size and place is None:
                raise ValueError(f"{holder.source.segment} has no place for a buffer")
    return record
