"""Follow the numbered KV events of each kvstore, and keep a prefix index up to date.

Events may be lost or come twice, and a kvstore may restart. The follower notices gaps and says
when only a snapshot can fill them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from halfmoon_protocol.messages import BlocksSnapshot
from halfmoon_scheduling.directory.prefix_index import PrefixIndex

#: Most batches kept while a snapshot is awaited; beyond that the snapshot must cover them.
MAX_BUFFERED_BATCHES = 1024


@dataclass(slots=True)
class _Stream:
    """The state of one kvstore's event stream."""

    #: Number of the newest event that was applied, or that the snapshot contains.
    applied: int = -1
    #: The newest batch received; batches arrive in order, so an older one means a restart.
    newest: KvEventBatch | None = None
    awaits_snapshot: bool = True
    #: When the awaited snapshot was requested.
    asked_s: float = 0.0
    #: A snapshot of an earlier state than this leaves a gap before `buffered`.
    required: int = -1
    #: Batches received while a snapshot is awaited, without gaps.
    buffered: list[KvEventBatch] = field(default_factory=list)
    #: Whether a snapshot was too old, and another one was requested at once.
    asked_again: bool = False
    #: Number and hashes so far of the snapshot whose pages arrive; None: none has begun.
    reading: tuple[int, int] | None = None
    #: Whether the kvstore restarted while a snapshot was awaited, which may be of the old start.
    restarted: bool = False


class KvEventFollower:
    """Apply each kvstore's events to an index, in order and without gaps.

    Methods that return a bool tell whether a snapshot must be requested now. Until it arrives, the
    index keeps that kvstore's entries: a wrong one costs a failed lease.
    """

    def __init__(self, index: PrefixIndex, *, max_buffered: int = MAX_BUFFERED_BATCHES) -> None:
        self._index = index
        self._max_buffered = max_buffered
        self._streams: dict[WorkerId, _Stream] = {}
        #: Snapshots that were needed, including those of kvstores that joined.
        self.n_snapshots = 0

    @property
    def behind(self) -> dict[WorkerId, int]:
        """Batches that each kvstore is known to have published and that are not in the index.

        They are buffered, or lost until a snapshot arrives.
        """
        return {
            worker: max(
                stream.required,
                stream.newest.sequence if stream.newest is not None else -1,
                stream.reading[0] if stream.reading is not None else -1,
                stream.applied,
            )
            - stream.applied
            for worker, stream in list(self._streams.items())
        }

    def on_joined(self, worker: WorkerId, now: float) -> bool:
        """Follow a kvstore that joined, with unknown contents: always returns True."""
        self._index.drop(worker)
        self._streams[worker] = _Stream(asked_s=now)
        self.n_snapshots += 1
        return True

    def on_lost(self, worker: WorkerId) -> None:
        """Forget a kvstore that is gone, with its blocks."""
        self._streams.pop(worker, None)
        self._index.drop(worker)

    def distrust(self, worker: WorkerId, now: float) -> bool:
        """Clear the entries of a kvstore that have proven wrong."""
        if (stream := self._streams.get(worker)) is None:
            return False
        self._index.clear(worker)
        if stream.awaits_snapshot and stream.reading is None:
            return False
        return self._await_snapshot(stream, now)

    def overdue(self, now: float, timeout_s: float) -> list[WorkerId]:
        """Return the kvstores whose snapshot is late and must be requested again."""
        late = [
            worker
            for worker, stream in self._streams.items()
            if stream.awaits_snapshot and stream.asked_s + timeout_s <= now
        ]
        for worker in late:
            self._streams[worker].asked_s = now
            self._streams[worker].reading = None
        return late

    def on_events(self, worker: WorkerId, batch: KvEventBatch, now: float) -> bool:
        """Apply a batch of events. Ignore batches of unknown kvstores, and duplicates."""
        stream = self._streams.get(worker)
        if stream is None or batch == stream.newest:
            return False
        restarted = stream.newest is not None and batch.sequence <= stream.newest.sequence
        stream.newest = batch
        if stream.awaits_snapshot:
            stream.restarted |= restarted
            self._buffer(stream, batch)
            return False
        if batch.sequence <= stream.applied and not restarted:
            return False  # the snapshot contains it
        if restarted or batch.sequence > stream.applied + 1:
            self._buffer(stream, batch)
            return self._await_snapshot(stream, now)
        self._apply(worker, stream, batch)
        return False

    def on_sequence(self, worker: WorkerId, sequence: int, now: float) -> bool:
        """Compare with the number of an event that a kvstore says it has published.

        An event that has not arrived by now was lost, and perhaps no further one will reveal that.
        A number below the newest proves nothing: it may have been read before that one.
        """
        stream = self._streams.get(worker)
        if stream is None or stream.awaits_snapshot or sequence <= stream.applied:
            return False
        stream.required = sequence
        return self._await_snapshot(stream, now)

    def on_snapshot(self, worker: WorkerId, page: BlocksSnapshot, now: float) -> bool:
        """Apply a page of a snapshot, the state after event `page.sequence`.

        The first page replaces what is known, and batches wait for the last one. A page that does
        not continue the one before is ignored: `overdue` tells when to ask again.

        A snapshot that is too old is requested once more: several may be under way, and the newest
        need not arrive last. If that one is too old as well, the next is left to `overdue`. So a
        kvstore whose numbers never fit does not keep both sides busy.
        """
        stream = self._streams.get(worker)
        if stream is None or not (stream.awaits_snapshot or page.sequence > stream.applied):
            return False
        if page.n_before and stream.reading != (page.sequence, page.n_before):
            return False
        if stream.awaits_snapshot and (stream.restarted or page.sequence < stream.required):
            stream.restarted = False
            stream.reading = None
            if stream.asked_again:
                stream.asked_s = now
                return False
            stream.asked_again = True
            return self._await_snapshot(stream, now)
        if not page.n_before:
            self._index.clear(worker)
        self._index.add(worker, page.hashes)
        if page.n_after:
            stream.awaits_snapshot = True
            stream.asked_s = now
            stream.reading = page.sequence, page.n_before + len(page.hashes)
            return False
        stream.applied = page.sequence
        stream.awaits_snapshot = stream.asked_again = False
        stream.reading = None
        for batch in stream.buffered:
            if batch.sequence > stream.applied:
                self._apply(worker, stream, batch)
        stream.buffered = []
        stream.required = -1
        return False

    def check(self) -> None:
        """Check that only waiting streams have a buffer, which is bounded and without gaps."""
        for stream in self._streams.values():
            awaited = stream.buffered or stream.restarted or stream.reading
            assert stream.awaits_snapshot or not awaited
            assert len(stream.buffered) <= self._max_buffered
            if stream.buffered:
                first = stream.buffered[0].sequence
                sequences = [batch.sequence for batch in stream.buffered]
                assert sequences == list(range(first, first + len(sequences)))
                assert first == stream.required + 1

    def _await_snapshot(self, stream: _Stream, now: float) -> bool:
        stream.awaits_snapshot = True
        stream.reading = None
        stream.asked_s = now
        self.n_snapshots += 1
        return True

    def _buffer(self, stream: _Stream, batch: KvEventBatch) -> None:
        """Keep a batch; the snapshot must cover earlier ones with a gap, or without room."""
        joins = stream.buffered and stream.buffered[-1].sequence + 1 == batch.sequence
        if not joins or len(stream.buffered) == self._max_buffered:
            stream.buffered = []
            stream.required = batch.sequence - 1
        stream.buffered.append(batch)

    def _apply(self, worker: WorkerId, stream: _Stream, batch: KvEventBatch) -> None:
        """Apply the last event of each block: a block that moves between tiers has two."""
        is_held: dict[BlockHash, bool] = {}
        for event in batch.events:
            match event:
                case BlockStored():
                    is_held.update(dict.fromkeys(_ours(event.block_hashes), True))
                case BlockRemoved():
                    is_held.update(dict.fromkeys(_ours(event.block_hashes), False))
                case AllBlocksCleared():
                    self._index.clear(worker)
                    is_held.clear()
        self._index.remove(worker, [block for block, held in is_held.items() if not held])
        self._index.add(worker, [block for block, held in is_held.items() if held])
        stream.applied = batch.sequence


def _ours(hashes: Iterable[int | bytes]) -> Iterator[BlockHash]:
    """Yield hashes of our format; integers are another system's, and match no prompt of ours."""
    return (BlockHash(block) for block in hashes if isinstance(block, bytes))
