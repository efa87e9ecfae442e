"""Keep a kvstore's blocks in a disk that may be slow, full, torn or failing.

It is what `SegmentFolder` is to a kvstore, but for the file format: that has tests of its own,
and files would make a run slow.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.tiers.disk_map import BlockRecord, DiskBlock
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, TierOutcome, WriteBack
from halfmoon_testing.sim_cluster.virtual_threads import sleep_in_thread


class VirtualDisk:
    """The disk of one kvstore node; it outlives the node's process."""

    def __init__(self, dice: random.Random, n_slots: int) -> None:
        """Start empty."""
        self._dice = dice
        self.n_slots = n_slots
        self.path = "a simulated disk"
        self.direct = True
        #: Share of operations that fail, and whether writes find no room.
        self.failure_rate = 0.0
        self.is_full = False
        #: Seconds of a call, at the least and at the most; None: it does not wait for the disk.
        self.slow_s: tuple[float, float] | None = None
        #: Share of writes that a kill tears.
        self.torn_rate = 0.0
        self._layout: KvLayout | None = None
        self._slots: dict[int, tuple[BlockRecord, bytes]] = {}
        #: The slot written last, until another operation.
        self._newest: int | None = None

    def on_started(self) -> None:
        """Begin another start of the node."""

    def on_killed(self) -> None:
        """Lose the bytes of the latest write, perhaps: its header is there."""
        if self._newest in self._slots and self._dice.random() < self.torn_rate:
            record, stored = self._slots[self._newest]
            self._slots[self._newest] = record, stored[: len(stored) // 2].ljust(len(stored))

    @property
    def missing_bytes(self) -> int:
        """Return 0: a simulated disk has all its slots."""
        return 0

    def grow(self) -> int:
        """Return 0, as no slot is missing."""
        return 0

    def layout(self) -> KvLayout | None:
        """See `SegmentFolder.layout`."""
        return self._layout

    def open(self, layout: KvLayout) -> None:
        """See `SegmentFolder.open`."""
        with self._call():
            if self._layout not in (None, layout):
                self._slots.clear()
            self._layout = layout

    def blocks(self) -> Iterator[DiskBlock]:
        """See `SegmentFolder.blocks`."""
        with self._call():
            found = [DiskBlock(record, slot) for slot, (record, _) in self._slots.items()]
        yield from found

    def perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> TierOutcome:
        """See `SegmentFolder.perform`."""
        with self._call():
            return self._perform(command, view)

    def close(self) -> None:
        """See `SegmentFolder.close`."""

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Let a slow call take its time; the block runs at a drawn moment of it."""
        if self.slow_s is None:
            yield
            return
        seconds = self._dice.uniform(*self.slow_s)
        before_s = seconds * self._dice.random()
        sleep_in_thread(before_s)
        yield
        sleep_in_thread(seconds - before_s)

    def _perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> TierOutcome:
        slot = command.disk_slot
        if self._dice.random() < self.failure_rate:
            return "failed"
        match command:
            case WriteBack(record=record):
                if xxhash.xxh3_64_intdigest(view) != record.checksum:
                    return "corrupt"
                if self.is_full:
                    return "failed"
                self._slots.pop(slot, None)
                self._slots[slot] = record, bytes(view)
                self._newest = slot
            case Promote(record=record):
                if slot not in self._slots:
                    return "failed"
                stored = self._slots[slot][1]
                view[:] = stored
                if xxhash.xxh3_64_intdigest(stored) != record.checksum:
                    return "corrupt"
            case Erase():
                self._slots.pop(slot, None)
        return "ok"
