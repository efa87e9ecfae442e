"""Register the bytes of an object with the transfer engine: memory, or published files.

A publisher's bytes are registered read-only for peers. Memory that the engine allocated is
the exception: it is shared as it is. A getter's buffers are registered twice: writable for
the engine alone, and read-only under the published key.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from halfmoon_protocol.regions import Region
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Rejected
from halfmoon_transfer.p2p.object_record import BufferPlace, ObjectShard
from halfmoon_transfer.p2p.p2p_errors import WrongBuffers
from halfmoon_transfer.regions.region_table import Memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

    #: Input of a publication: memory, or the path of a file that does not change.
    Given: TypeAlias = Buffer | Memory | Path


def object_checksum(data: memoryview) -> bytes:
    """Return the xxh3-128 of these bytes."""
    return xxhash.xxh3_128_digest(data)


class ObjectBuffers:
    """One object's buffers, registered as regions of an engine until `close`."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        #: By buffer: the place where peers read it; None for an empty buffer.
        self.places: list[BufferPlace | None] = []
        #: By buffer: its memory, or the path of its file.
        self.contents: list[memoryview | Path] = []
        #: By buffer: the region that fetched shards are written to; getters only.
        self.landings: list[Region | None] = []
        self._undo = ExitStack()

    @classmethod
    def published(cls, engine: TransferEngine, given: "Sequence[Given]") -> "ObjectBuffers":
        """Register the buffers of a publisher.

        Raises:
            ValueError: a buffer is not contiguous.
            OSError: a file can't be opened.
        """
        buffers = cls(engine)
        with buffers._undo as undo:
            for each in given:
                if isinstance(each, Path):
                    buffers._publish_file(each)
                else:
                    buffers._publish_memory(each)
            buffers._undo = undo.pop_all()
        return buffers

    @classmethod
    def to_fill(cls, engine: TransferEngine, given: "Sequence[Buffer | Memory]") -> "ObjectBuffers":
        """Register the buffers of a getter.

        Raises:
            WrongBuffers: a buffer is read-only.
            ValueError: a buffer is not contiguous.
        """
        buffers = cls(engine)
        with buffers._undo as undo:
            for each in given:
                buffers._publish_memory(each)
                content = buffers.contents[-1]
                assert isinstance(content, memoryview)
                if content.readonly:
                    raise WrongBuffers("a buffer to fetch into is read-only")
                if isinstance(each, Memory):
                    buffers.landings.append(each.region)
                elif content:
                    buffers.landings.append(buffers._register(content))
                else:
                    buffers.landings.append(None)
            buffers._undo = undo.pop_all()
        return buffers

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer."""
        return tuple(
            each.stat().st_size if isinstance(each, Path) else len(each) for each in self.contents
        )

    def view(self, shard: ObjectShard) -> memoryview:
        """Return a shard's bytes; its buffer must be in memory."""
        content = self.contents[shard.buffer]
        assert isinstance(content, memoryview)
        return content[shard.offset : shard.offset + shard.length]

    def checksums(
        self, shards: Sequence[ObjectShard], progress: Callable[[int], None]
    ) -> tuple[bytes, ...]:
        """Compute the checksum of each shard; this reads every buffer once.

        Raises:
            OSError: a file can't be read, or got shorter.
        """
        room = memoryview(bytearray(max((each.length for each in shards), default=0)))
        sums = []
        for shard in shards:
            content = self.contents[shard.buffer]
            view = _read(content, shard, room) if isinstance(content, Path) else self.view(shard)
            sums.append(object_checksum(view))
            progress(shard.length)
        return tuple(sums)

    def close(self) -> None:
        """Unregister the regions; after it returns, no peer reads them."""
        self._undo.close()

    def _publish_memory(self, given: "Buffer | Memory") -> None:
        if isinstance(given, Memory):
            self.contents.append(given.view)
            self.places.append(BufferPlace(given.region))
            return
        view = memoryview(given)
        # An empty view can't be cast, nor registered.
        view = view.cast("B") if view.nbytes else memoryview(bytearray())
        self.contents.append(view)
        self.places.append(BufferPlace(self._register(view.toreadonly())) if view else None)

    def _publish_file(self, path: Path) -> None:
        self.contents.append(path)
        if path.stat().st_size == 0:
            self.places.append(None)
            return
        # Several getters read the file soon after each other: serve it from the page cache.
        region = self.engine.register_file(path, writable=False, direct=False)
        self._undo.callback(self._unregister, region)
        self.places.append(BufferPlace(region))

    def _register(self, view: memoryview) -> Region:
        region = self.engine.register(view)
        self._undo.callback(self._unregister, region)
        return region

    def _unregister(self, region: Region) -> None:
        # An engine that was closed before has unregistered all regions.
        with suppress(Rejected):
            self.engine.unregister(region)


def _read(path: Path, shard: ObjectShard, room: memoryview) -> memoryview:
    view = room[: shard.length]
    with path.open("rb", buffering=0) as file:
        n_read = 0
        while n_read < shard.length:
            n_more = os.preadv(file.fileno(), [view[n_read:]], shard.offset + n_read)
            if n_more == 0:
                raise OSError(f"{path} got shorter while it was read")
            n_read += n_more
    return view
