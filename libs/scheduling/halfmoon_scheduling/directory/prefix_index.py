"""Which kvstore holds which blocks: the conductor's soft copy of the kvstores' own records.

`PrefixIndex` answers how long a prefix each kvstore holds; `KvEventFollower` keeps it true by
following each kvstore's numbered events, and says when only a snapshot can help.

Memory: one dict entry per block, whose value is a set of workers as the bits of an integer.
Equal sets are one object (most blocks are held by one kvstore), so a block costs its 16-byte
hash and a dict entry, about 110 bytes, however many workers there are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch

#: Batches kept while a snapshot is awaited; past this, they are left to the snapshot.
MAX_BUFFERED_BATCHES = 1024


class PrefixIndex:
    """Blocks to the workers that hold them, and prefixes to their lengths."""

    def __init__(self) -> None:
        #: Bit i of a value: the worker of slot i holds the block. No value is 0, and equal
        #: values are one object, the one in `_sets`.
        self._holders: dict[BlockHash, int] = {}
        #: Each set in use, and by how many blocks.
        self._sets: dict[int, tuple[int, int]] = {}
        #: Slot of each worker that holds anything.
        self._slots: dict[WorkerId, int] = {}
        #: The reverse; None is a slot to use again.
        self._workers: list[WorkerId | None] = []
        #: Blocks of each worker in `_slots`; never 0.
        self._n_blocks: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def n_blocks(self, worker: WorkerId) -> int:
        """Blocks that this worker holds."""
        return self._n_blocks.get(worker, 0)

    def n_holders(self, block: BlockHash) -> int:
        """How many hold this block."""
        return self._holders.get(block, 0).bit_count()

    def holders(self, block: BlockHash) -> Iterator[WorkerId]:
        """Those that hold this block; hold it no longer than until the index changes."""
        return self._members(self._holders.get(block, 0))

    def stored(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these now; again is fine."""
        bit = 1 << self._slot(worker)
        added = 0
        for block in hashes:
            before = self._holders.get(block, 0)
            if not before & bit:
                self._set(block, before, before | bit)
                added += 1
        self._count(worker, added)

    def removed(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these no more; not having held them is fine."""
        if (slot := self._slots.get(worker)) is None:
            return
        bit = 1 << slot
        gone = 0
        for block in hashes:
            before = self._holders.get(block, 0)
            if before & bit:
                self._set(block, before, before & ~bit)
                gone += 1
        self._count(worker, -gone)

    def cleared(self, worker: WorkerId) -> None:
        """The worker holds nothing any more. Walks all blocks once if it held some."""
        if (slot := self._slots.get(worker)) is not None:
            bit = 1 << slot
            self.removed(worker, [block for block, held in self._holders.items() if held & bit])

    def replace(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these and nothing else."""
        self.cleared(worker)
        self.stored(worker, hashes)

    def drop(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self.cleared(worker)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """For each worker that holds the first block: how many it holds without a gap.

        One walk for all of them, to the first block that none of those left holds.
        """
        lengths: dict[WorkerId, int] = {}
        left = self._holders.get(hashes[0], 0) if hashes else 0
        length = 0
        while left:
            length += 1
            following = self._holders.get(hashes[length], 0) & left if length < len(hashes) else 0
            if following != left:
                for worker in self._members(left & ~following):
                    lengths[worker] = length
            left = following
        return lengths

    def check(self) -> None:
        """Audit: counts, sets and slots say the same."""
        counts: dict[int, int] = {}
        per_worker: dict[WorkerId, int] = {}
        for held in self._holders.values():
            assert held, "a block without holders is kept"
            assert self._sets[held][0] is held, "equal sets are two objects"
            counts[held] = counts.get(held, 0) + 1
            for worker in self._members(held):
                per_worker[worker] = per_worker.get(worker, 0) + 1
        assert counts == {held: n for held, (_, n) in self._sets.items()}
        assert per_worker == self._n_blocks
        assert self._slots.keys() == self._n_blocks.keys(), "a slot is kept without blocks"
        assert self._slots == {w: i for i, w in enumerate(self._workers) if w is not None}

    def _slot(self, worker: WorkerId) -> int:
        if (slot := self._slots.get(worker)) is not None:
            return slot
        if None in self._workers:
            slot = self._workers.index(None)
            self._workers[slot] = worker
        else:
            slot = len(self._workers)
            self._workers.append(worker)
        self._slots[worker] = slot
        self._n_blocks[worker] = 0
        return slot

    def _count(self, worker: WorkerId, change: int) -> None:
        self._n_blocks[worker] += change
        if self._n_blocks[worker] == 0:
            del self._n_blocks[worker]
            self._workers[self._slots.pop(worker)] = None

    def _set(self, block: BlockHash, before: int, after: int) -> None:
        if before:
            same, n = self._sets[before]
            if n == 1:
                del self._sets[before]
            else:
                self._sets[before] = (same, n - 1)
        if after:
            same, n = self._sets.get(after, (after, 0))
            self._sets[same] = (same, n + 1)
            self._holders[block] = same
        else:
            del self._holders[block]

    def _members(self, held: int) -> Iterator[WorkerId]:
        while held:
            lowest = held & -held
            worker = self._workers[lowest.bit_length() - 1]
            assert worker is not None, "a block is held by nobody's slot"
            yield worker
            held ^= lowest


@dataclass(slots=True)
class _Stream:
    """What is known of one kvstore's events."""

    #: The newest event applied, or contained in the snapshot.
    applied: int = -1
    #: The newest batch that came; batches come in order, so an older one means a restart.
    newest: KvEventBatch | None = None
    awaits_snapshot: bool = True
    #: When the awaited snapshot was asked for.
    asked_s: float = 0.0
    #: A snapshot of an earlier state than this leaves a gap before `buffered`.
    required: int = -1
    #: What came while a snapshot is awaited, without gaps.
    buffered: list[KvEventBatch] = field(default_factory=list)
    #: A snapshot was too old, and another one was asked for at once.
    asked_again: bool = False
    #: The kvstore began anew while a snapshot was awaited, which may tell of the old start.
    restarted: bool = False


class KvEventFollower:
    """Applies each kvstore's events to an index, in order and without gaps.

    Methods that return a truth value say whether a snapshot must be asked for now. Until it
    comes, the index keeps what it knew of that kvstore: a wrong entry costs one failed lease.
    """

    def __init__(self, index: PrefixIndex, *, max_buffered: int = MAX_BUFFERED_BATCHES) -> None:
        self._index = index
        self._max_buffered = max_buffered
        self._streams: dict[WorkerId, _Stream] = {}
        #: Snapshots that were needed, those of kvstores that joined included.
        self.n_snapshots = 0

    @property
    def behind(self) -> dict[WorkerId, int]:
        """Messages of events that each kvstore is known to have published and that are not in
        the index: kept, or lost and waiting for a snapshot."""
        return {
            worker: max(
                stream.required,
                stream.newest.sequence if stream.newest is not None else -1,
                stream.applied,
            )
            - stream.applied
            for worker, stream in list(self._streams.items())
        }

    def joined(self, worker: WorkerId, now: float) -> bool:
        """A kvstore is there, its contents unknown: always true."""
        self._index.drop(worker)
        self._streams[worker] = _Stream(asked_s=now)
        self.n_snapshots += 1
        return True

    def lost(self, worker: WorkerId) -> None:
        """The kvstore is gone, and with it what it held."""
        self._streams.pop(worker, None)
        self._index.drop(worker)

    def distrust(self, worker: WorkerId, now: float) -> bool:
        """What is known of this kvstore has proven wrong: forget it."""
        if (stream := self._streams.get(worker)) is None:
            return False
        self._index.cleared(worker)
        if stream.awaits_snapshot:
            return False
        return self._await_snapshot(stream, now)

    def overdue(self, now: float, timeout_s: float) -> list[WorkerId]:
        """Those whose snapshot was asked for so long ago that it must be asked for again."""
        late = [
            worker
            for worker, stream in self._streams.items()
            if stream.awaits_snapshot and stream.asked_s + timeout_s <= now
        ]
        for worker in late:
            self._streams[worker].asked_s = now
        return late

    def changed(self, worker: WorkerId, batch: KvEventBatch, now: float) -> bool:
        """A batch of events came. One of a stranger is ignored, as is a batch said twice."""
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
            return False  # contained in the snapshot
        if restarted or batch.sequence > stream.applied + 1:
            self._buffer(stream, batch)
            return self._await_snapshot(stream, now)
        self._apply(worker, stream, batch)
        return False

    def told(self, worker: WorkerId, sequence: int, now: float) -> bool:
        """A kvstore said that it has published this event, after it had.

        So if it has not come, it was lost, and perhaps no further one will show that. An earlier
        number than the newest says nothing: it may have been looked up before that one.
        """
        stream = self._streams.get(worker)
        if stream is None or stream.awaits_snapshot or sequence <= stream.applied:
            return False
        stream.required = sequence
        return self._await_snapshot(stream, now)

    def snapshot(
        self, worker: WorkerId, sequence: int, hashes: Iterable[BlockHash], now: float
    ) -> bool:
        """A snapshot came, the state after event `sequence`.

        One that is too old is asked for once more: several may be under way, and the newest
        need not come last. If that one is too old as well, the next is left to `overdue`: a
        kvstore whose numbers never fit must not keep both sides busy.
        """
        stream = self._streams.get(worker)
        if stream is None or not (stream.awaits_snapshot or sequence > stream.applied):
            return False
        if stream.awaits_snapshot and (stream.restarted or sequence < stream.required):
            stream.restarted = False
            if stream.asked_again:
                stream.asked_s = now
                return False
            stream.asked_again = True
            return self._await_snapshot(stream, now)
        self._index.replace(worker, hashes)
        stream.applied = sequence
        stream.awaits_snapshot = stream.asked_again = False
        for batch in stream.buffered:
            if batch.sequence > stream.applied:
                self._apply(worker, stream, batch)
        stream.buffered = []
        stream.required = -1
        return False

    def check(self) -> None:
        """Audit: only streams that wait have a buffer, bounded, and without gaps."""
        for stream in self._streams.values():
            assert stream.awaits_snapshot or not (stream.buffered or stream.restarted)
            assert len(stream.buffered) <= self._max_buffered
            if stream.buffered:
                first = stream.buffered[0].sequence
                sequences = [batch.sequence for batch in stream.buffered]
                assert sequences == list(range(first, first + len(sequences)))
                assert first == stream.required + 1

    def _await_snapshot(self, stream: _Stream, now: float) -> bool:
        stream.awaits_snapshot = True
        stream.asked_s = now
        self.n_snapshots += 1
        return True

    def _buffer(self, stream: _Stream, batch: KvEventBatch) -> None:
        """Keep a batch; what does not join on to it, or has no room, the snapshot must cover."""
        joins = stream.buffered and stream.buffered[-1].sequence + 1 == batch.sequence
        if not joins or len(stream.buffered) == self._max_buffered:
            stream.buffered = []
            stream.required = batch.sequence - 1
        stream.buffered.append(batch)

    def _apply(self, worker: WorkerId, stream: _Stream, batch: KvEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._index.stored(worker, _ours(event.block_hashes))
                case BlockRemoved():
                    self._index.removed(worker, _ours(event.block_hashes))
                case AllBlocksCleared():
                    self._index.cleared(worker)
        stream.applied = batch.sequence


def _ours(hashes: Iterable[int | bytes]) -> Iterator[BlockHash]:
    """Hashes as we make them; integers are another system's, and match no prompt of ours."""
    return (BlockHash(block) for block in hashes if isinstance(block, bytes))
