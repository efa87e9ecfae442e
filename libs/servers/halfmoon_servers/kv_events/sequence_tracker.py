"""Put a server's numbered batches in order: fill gaps by replay, and notice a restart.

    live ──a gap, or a new connection──► replaying ──its end, or its failure──► live

Numbers count up by one and start at 0 with each start of the server. A subscriber may join late or
miss batches; the server's replay sends the last ones again, from a number on. While that goes on,
live batches wait. A replay starts with the newest batch that was applied. Where the server has
another one by that number, or none, it has restarted: all that it held is gone.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

#: Live batches and bytes that wait for the end of a replay. More are dropped: a gap.
MAX_WAITING_BATCHES = 16_384
MAX_WAITING_BYTES = 64 * 2**20
#: Applied batches by which a batch that comes twice is told from one of a restarted server. More
#: than any queue between the server and this process holds.
_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class ApplyBatch:
    """Apply this batch."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget all blocks of the server: it has restarted."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Request all batches from this number on."""

    start: int


Step = ApplyBatch | ResetCache | AskReplay


class SequenceTracker:
    """The order of one server's batches, over all connections to it."""

    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        #: The newest batch that was applied; -1: none.
        self._applied = -1
        #: Hashes of the batches that were applied last, by number; bounded.
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._replaying = False
        #: True while the replay still has to show that the server has not restarted.
        self._unproven = False
        #: True when the replay has shown that it has: another one from 0 follows.
        self._restarted = False
        #: Live batches during a replay.
        self._waiting: list[tuple[int, bytes]] = []
        self._n_waiting_bytes = 0
        #: Whether nothing has shown yet that a new connection is to the server of the one before.
        self._is_new = False
        self.n_gaps = 0
        self.n_restarts = 0

    @property
    def is_replaying(self) -> bool:
        """True between `AskReplay` and the end of that replay."""
        return self._replaying

    def on_connected(self) -> list[Step]:
        """Start to follow a new connection: batches may be missing, and the server another."""
        self._drop_waiting()
        self._is_new = True
        return self._ask() if self._can_replay else []

    def on_live(self, sequence: int, payload: bytes) -> list[Step]:
        """Take a published batch."""
        if self._replaying:
            self._wait(sequence, payload)
            return []
        return list(self._in_order(sequence, payload))

    def on_replayed(self, sequence: int, payload: bytes) -> list[Step]:
        """Take a batch of the replay."""
        if not self._replaying or self._restarted:
            return []
        if self._unproven:
            if self._seen.get(sequence) != hash(payload):
                self._restarted = True
                return []
            self._unproven = self._is_new = False
        if sequence <= self._applied:
            return []
        return [self._apply(sequence, payload)]

    def on_replay_ended(self) -> list[Step]:
        """Take the end of the replay."""
        if not self._replaying:
            return []
        if self._restarted or self._unproven:
            return [*self._restart(), *self._ask()]
        return self._live_again()

    def on_replay_failed(self) -> list[Step]:
        """Go on without the rest of a replay, which did not come."""
        if not self._replaying:
            return []
        # Another server's numbers may go on where those of the one before ended.
        other = self._restarted or (self._unproven and self._is_new)
        restarted: list[Step] = self._restart() if other else []
        was_able, self._can_replay = self._can_replay, False
        try:
            return [*restarted, *self._live_again()]
        finally:
            self._can_replay = was_able

    def check(self) -> None:
        """Check the bounds, and that batches wait only for a replay."""
        assert self._replaying or not (self._waiting or self._unproven or self._restarted)
        assert len(self._waiting) <= MAX_WAITING_BATCHES
        assert self._n_waiting_bytes == sum(len(payload) for _, payload in self._waiting)
        assert len(self._seen) <= _REMEMBERED

    def _in_order(self, sequence: int, payload: bytes) -> Iterator[Step]:
        """Apply a live batch, or ask for what is missing before it."""
        if sequence <= self._applied:
            if self._seen.get(sequence) == hash(payload):
                return  # the replay had it too
            yield from self._restart()
        if sequence > self._applied + 1:
            if self._can_replay:
                yield from self._ask()
                self._wait(sequence, payload)
                return
            self.n_gaps += 1
        yield self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> ApplyBatch:
        self._applied = sequence
        self._seen[sequence] = hash(payload)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return ApplyBatch(payload)

    def _ask(self) -> list[Step]:
        self._replaying, self._unproven, self._restarted = True, self._applied >= 0, False
        return [AskReplay(max(self._applied, 0))]

    def _restart(self) -> list[Step]:
        self.n_restarts += 1
        self._is_new = False
        self._applied = -1
        self._seen.clear()
        return [ResetCache()]

    def _live_again(self) -> list[Step]:
        """Apply the batches that waited; a gap among them is one that no replay can fill."""
        self._replaying = self._unproven = self._restarted = False
        waiting = self._waiting
        self._drop_waiting()
        steps: list[Step] = []
        for sequence, payload in waiting:
            if self._replaying:
                self._wait(sequence, payload)
            elif sequence > self._applied + 1:
                self.n_gaps += 1
                steps.append(self._apply(sequence, payload))
            else:
                steps += self._in_order(sequence, payload)
        return steps

    def _wait(self, sequence: int, payload: bytes) -> None:
        if (
            len(self._waiting) == MAX_WAITING_BATCHES
            or self._n_waiting_bytes + len(payload) > MAX_WAITING_BYTES
        ):
            self._drop_waiting()
        if len(payload) <= MAX_WAITING_BYTES:
            self._waiting.append((sequence, payload))
            self._n_waiting_bytes += len(payload)

    def _drop_waiting(self) -> None:
        self._waiting = []
        self._n_waiting_bytes = 0
