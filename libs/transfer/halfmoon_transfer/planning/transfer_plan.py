"""Plan one transfer: cut it into slices, choose paths, retry, finish exactly once.

Pure: facts come in (`on_resolved`, `on_carried`, `stop`), commands come out, without sockets,
threads or clocks. A transfer's pieces are merged where they touch and cut into *slices*, the
unit of retry. Slices travel in *batches*, each to one peer over one path. A path is a backend
that reaches the peer; paths are tried in order.

A slice is in one place at a time:

    waiting (its peer is being resolved) -> in flight (in one batch) -> applied
         ^                                      |
         +---- its peer may have moved ---------+---- tried again, here or on the next path

A transfer may leave a notification with its peers. Once all slices are applied, one more batch
goes to each peer, with the notification instead of bytes. It is retried over the same paths as
slices are.

The transfer ends when all of this is done. After a final failure, or after `stop`, it ends when
no batch is in flight any more. Its memory is not accessed after the end.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.interface import (
    Corrupted,
    Lost,
    Op,
    Piece,
    Rejected,
    TransferError,
    Untrusted,
)

#: Lookups of a peer per transfer: one, and one more when the peer may have moved.
_MAX_RESOLVES = 2


class PeerKey(msgspec.Struct, frozen=True):
    """One start of one segment."""

    segment: str
    generation: int


class TransferPath(msgspec.Struct, frozen=True):
    """A backend that reaches a peer, and the size of slices that suits it."""

    name: str
    slice_bytes: int
    #: Rails of the backend; large transfers are spread over them.
    n_rails: int = 1


class Slice(msgspec.Struct, frozen=True):
    """A range of bytes that is moved, retried and acknowledged as one."""

    #: Index of the slice in its transfer.
    number: int
    local: Region
    local_offset: int
    remote: Region
    remote_offset: int
    length: int
    #: Index into the peer's paths.
    path: int = 0
    #: Tries so far on this path, and on all paths.
    path_tries: int = 0
    tries: int = 0


class OutcomeKind(Enum):
    """The kinds of outcome of one try of a slice."""

    #: The peer acknowledged the bytes (write), or they arrived and are verified (read).
    APPLIED = "applied"
    #: The path failed; it is unknown if the peer applied the slice.
    LOST = "lost"
    #: The peer can't be reached over this path at all; nothing was sent.
    UNREACHABLE = "unreachable"
    #: The bytes arrived with another checksum.
    CORRUPTED = "corrupted"
    #: The owner refuses the access; no other path will help.
    REJECTED = "rejected"
    #: This path can't reach this region; another path may.
    UNUSABLE = "unusable"
    #: The peer is of another generation than its cached descriptor says.
    STALE = "stale"
    #: The process at that address has another cluster key, or none.
    UNTRUSTED = "untrusted"


class SliceOutcome(msgspec.Struct, frozen=True):
    """The outcome of one try of one slice, with the reason in words."""

    kind: OutcomeKind
    reason: str = ""


APPLIED = SliceOutcome(OutcomeKind.APPLIED)


class OutgoingNotification(msgspec.Struct, frozen=True):
    """A message for a peer; the peer drops a repetition with the same id."""

    id: bytes
    #: The segment that sends it.
    sender: str
    message: bytes


class Batch(msgspec.Struct, frozen=True):
    """Slices for one peer over one path, carried by one thread."""

    #: Unique in the transfer.
    number: int
    #: Number of the transfer in its engine.
    transfer: int
    op: Op
    peer: PeerKey
    path: str
    slices: tuple[Slice, ...]
    #: Delivered in place of bytes; `slices` is then one slice of length 0.
    notification: OutgoingNotification | None = None
    #: Whether bytes that cross a wire carry checksums, if the backend makes any.
    checksums: bool = True
    #: Whether bytes are compared at their destination though no wire is crossed.
    verify: bool = False


class ResolvePeer(msgspec.Struct, frozen=True):
    """Look up the paths to this peer; with `fresh`, bypass the cache."""

    peer: PeerKey
    fresh: bool


class CarryBatch(msgspec.Struct, frozen=True):
    """Move this batch; report its outcomes to `on_carried`."""

    batch: Batch


class FinishTransfer(msgspec.Struct, frozen=True):
    """End the transfer, with an error or without. This is the last command, given once."""

    error: TransferError | None


PlanCommand = ResolvePeer | CarryBatch | FinishTransfer


class PlanLimits(msgspec.Struct, frozen=True):
    """Limits of a plan; see `TransferSettings`."""

    batch_bytes: int
    batch_slices: int
    tries_per_path: int


class _Failures:
    """Count the failures of one path to one peer."""

    def __init__(self) -> None:
        self.n_tries = 0
        self.slices: set[int] = set()
        self.last = SliceOutcome(OutcomeKind.LOST)

    def add(self, each: Slice, outcome: SliceOutcome) -> None:
        """Add the failure of a slice."""
        self.n_tries = max(self.n_tries, each.path_tries + 1)
        self.slices.add(each.number)
        self.last = outcome

    def __str__(self) -> str:
        tries = f"failed {self.n_tries} times" if self.n_tries > 1 else "failed"
        slices = f" for {len(self.slices)} slices" if len(self.slices) > 1 else ""
        return f"{tries}{slices}, last: {self.last.reason}"


class _Peer:
    """The state of one peer in a plan."""

    def __init__(self) -> None:
        self.paths: tuple[TransferPath, ...] = ()
        self.n_resolves = 0
        #: Slices that wait for the result of a `ResolvePeer`.
        self.waiting: list[Slice] = []
        #: By path: its failures.
        self.failures: dict[str, _Failures] = {}
        #: By path: the outcome that says why it does not reach the peer. It is not retried.
        self.unreachable: dict[str, SliceOutcome] = {}
        #: Number of slices that are not applied.
        self.n_left = 0
        #: The kind of the last failure.
        self.last = OutcomeKind.LOST


class TransferPlan:
    """The state of one transfer."""

    def __init__(
        self,
        number: int,
        op: Op,
        pieces: Sequence[Piece],
        limits: PlanLimits,
        notification: OutgoingNotification | None = None,
        *,
        checksums: bool = True,
        verify: bool = False,
    ) -> None:
        self.number = number
        self._checksums = checksums
        self._verify = verify
        self.op: Op = op
        self.limits = limits
        #: Pieces that are not cut yet, by peer, until its paths are known.
        self._uncut: dict[PeerKey, list[Piece]] = {}
        for piece in merge_pieces(pieces):
            key = PeerKey(piece.remote.segment, piece.remote.generation)
            self._uncut.setdefault(key, []).append(piece)
        if notification is not None:
            # Peers without bytes to move are notified as well.
            for piece in pieces:
                self._uncut.setdefault(PeerKey(piece.remote.segment, piece.remote.generation), [])
        self._peers = {key: _Peer() for key in self._uncut}
        self.notification = notification
        #: True once all bytes are applied and notifications are carried.
        self._notifying = False
        self.n_bytes = sum(piece.length for piece in pieces)
        self.applied_bytes = 0
        self.n_retries = 0
        self.paths_used: list[str] = []
        #: Batches that were handed out and have no outcome yet, by number.
        self._in_flight: dict[int, Batch] = {}
        self._n_slices = 0
        self._n_batches = 0
        self._error: TransferError | None = None
        self.finished = False

    def begin(self) -> list[PlanCommand]:
        """Return the first commands; none if the transfer was stopped before."""
        if self.finished:
            return []
        for peer in self._peers.values():
            peer.n_resolves = 1
        return [*(ResolvePeer(key, fresh=False) for key in self._peers), *self._finish()]

    def on_resolved(
        self, key: PeerKey, paths: tuple[TransferPath, ...], *, moved: bool
    ) -> list[PlanCommand]:
        """Carry slices over a peer's paths, best first; `moved` means that they have changed."""
        if self._error is not None:
            return []
        peer = self._peers[key]
        if not paths and peer.n_resolves < _MAX_RESOLVES:
            peer.n_resolves += 1
            return [ResolvePeer(key, fresh=True)]
        if not paths:
            return self._fail(Lost(f"segment {key.segment} offers no path that is enabled here"))
        peer.paths = paths
        if key in self._uncut:
            ready = list(self._cut(self._uncut.pop(key), paths[0].slice_bytes))
            peer.n_left = len(ready)
        elif moved:
            peer.unreachable.clear()
            ready = [msgspec.structs.replace(each, path=0, path_tries=0) for each in peer.waiting]
        else:
            return self._fail(self._give_up(key))
        peer.waiting = []
        return self._carry(key, ready) + self._finish()

    def on_unresolved(self, key: PeerKey, error: TransferError) -> list[PlanCommand]:
        """Fail: the peer can't be found, or is of another generation."""
        del key
        return [] if self._error is not None else self._fail(error)

    def on_carried(self, number: int, outcomes: Sequence[SliceOutcome]) -> list[PlanCommand]:
        """Apply the outcomes of a batch, one per slice. Only the first report counts."""
        batch = self._in_flight.pop(number, None)
        if batch is None:
            return []
        if all(outcome is APPLIED for outcome in outcomes):
            self.applied_bytes += sum(each.length for each in batch.slices)
            self._peers[batch.peer].n_left -= len(batch.slices)
            if batch.notification is None and batch.path not in self.paths_used:
                self.paths_used.append(batch.path)
            return self._finish()
        peer = self._peers[batch.peer]
        retry: list[Slice] = []
        for each, outcome in zip(batch.slices, outcomes, strict=True):
            if outcome.kind is OutcomeKind.APPLIED:
                self.applied_bytes += each.length
                peer.n_left -= 1
                if batch.notification is None and batch.path not in self.paths_used:
                    self.paths_used.append(batch.path)
                continue
            peer.failures.setdefault(batch.path, _Failures()).add(each, outcome)
            if outcome.kind is OutcomeKind.UNREACHABLE:
                peer.unreachable[batch.path] = outcome
            peer.last = outcome.kind
            if self._error is None:
                self._on_failed(batch.peer, each, outcome, retry)
        if self._error is not None:
            return self._finish()
        commands = self._carry(batch.peer, retry)
        if peer.waiting and peer.n_resolves < _MAX_RESOLVES:
            peer.n_resolves += 1
            commands.append(ResolvePeer(batch.peer, fresh=True))
        return commands + self._finish()

    def stop(self, error: TransferError) -> list[PlanCommand]:
        """End with this error once no batch is in flight, unless the transfer ends anyway."""
        return [] if self._error is not None or self.finished else self._fail(error)

    @property
    def n_peers(self) -> int:
        """Number of peers that bytes are moved to or from."""
        return len(self._peers)

    @property
    def is_failing(self) -> bool:
        """True if the transfer has failed, or will fail."""
        return self._error is not None

    def unreachable(self, batch: Batch) -> SliceOutcome | None:
        """Return the outcome of a batch whose path turned out not to reach the peer, or None."""
        return self._peers[batch.peer].unreachable.get(batch.path)

    def last_failure(self) -> str:
        """Describe the failures so far; empty if there is none."""
        return "; ".join(
            f"{path} {self._failure(peer, path)}"
            for peer in self._peers.values()
            for path in peer.failures
        )

    def _failure(self, peer: _Peer, path: str) -> str:
        unreachable = peer.unreachable.get(path)
        if unreachable is None:
            return str(peer.failures[path])
        return f"does not reach it, with {peer.n_left} slices to move: {unreachable.reason}"

    def _on_failed(
        self, key: PeerKey, each: Slice, outcome: SliceOutcome, retry: list[Slice]
    ) -> None:
        """Put a failed slice into `retry` or `waiting`, or fail the transfer."""
        peer = self._peers[key]
        if outcome.kind is OutcomeKind.REJECTED:
            self._error = Rejected(outcome.reason)
            return
        if outcome.kind in (OutcomeKind.STALE, OutcomeKind.UNTRUSTED):
            self._wait_for_new_address(key, each)
            return
        path, tries = each.path, each.path_tries + 1
        is_over = outcome.kind in (OutcomeKind.UNUSABLE, OutcomeKind.UNREACHABLE)
        if is_over or tries >= self.limits.tries_per_path:
            path, tries = path + 1, 0
        while path < len(peer.paths) and peer.paths[path].name in peer.unreachable:
            path, tries = path + 1, 0
        each = msgspec.structs.replace(each, path=path, path_tries=tries, tries=each.tries + 1)
        if path == len(peer.paths):
            self._wait_for_new_address(key, each)
        else:
            if outcome.kind is not OutcomeKind.UNUSABLE:
                self.n_retries += 1
            retry.append(each)

    def _wait_for_new_address(self, key: PeerKey, each: Slice) -> None:
        """Keep a slice without a path until the peer is looked up again; give up after that."""
        peer = self._peers[key]
        # While the second lookup is pending (slices wait), more slices may join.
        if peer.n_resolves < _MAX_RESOLVES or peer.waiting:
            peer.waiting.append(each)
        else:
            self._error = self._give_up(key)

    def _give_up(self, key: PeerKey) -> TransferError:
        text = f"{self.op} at segment {key.segment}: {self.last_failure()}"
        match self._peers[key].last:
            case OutcomeKind.STALE:
                return Rejected(text)
            case OutcomeKind.CORRUPTED:
                return Corrupted(text)
            case OutcomeKind.UNTRUSTED:
                return Untrusted(text)
            case _:
                return Lost(text)

    def _fail(self, error: TransferError) -> list[PlanCommand]:
        self._error = error
        return self._finish()

    def _finish(self) -> list[PlanCommand]:
        if self.finished or self._in_flight:
            return []
        unfinished = self._uncut or any(peer.waiting for peer in self._peers.values())
        if self._error is None and unfinished:
            return []
        if self._error is None and self.notification is not None and not self._notifying:
            return self._notify()
        self.finished = True
        return [FinishTransfer(self._error)]

    def _notify(self) -> list[PlanCommand]:
        """Carry the notification to every peer, after all bytes are applied."""
        self._notifying = True
        commands: list[PlanCommand] = []
        for key in self._peers:
            nowhere = Region(key.segment, key.generation, b"", 0)
            self._peers[key].n_left += 1
            commands += self._carry(key, [Slice(self._n_slices, nowhere, 0, nowhere, 0, 0)])
            self._n_slices += 1
        return commands

    def _cut(self, pieces: Sequence[Piece], slice_bytes: int) -> Iterator[Slice]:
        for piece in pieces:
            for start in range(0, piece.length, slice_bytes):
                yield Slice(
                    self._n_slices,
                    piece.local,
                    piece.local_offset + start,
                    piece.remote,
                    piece.remote_offset + start,
                    min(slice_bytes, piece.length - start),
                )
                self._n_slices += 1

    def _carry(self, key: PeerKey, slices: Sequence[Slice]) -> list[PlanCommand]:
        """Pack slices into batches, by path and in order."""
        paths = self._peers[key].paths
        if len(slices) == 1:
            return [self._batch(key, paths[slices[0].path].name, slices)]
        commands: list[PlanCommand] = []
        for index in sorted({each.path for each in slices}):
            group: list[Slice] = []
            n_bytes = 0
            chosen = [each for each in slices if each.path == index]
            # Fill batches up to an equal share of each rail, so that no rail idles.
            share = -(-sum(each.length for each in chosen) // paths[index].n_rails)
            limit = min(self.limits.batch_bytes, max(share, paths[index].slice_bytes))
            for each in chosen:
                over = n_bytes + each.length > limit
                if group and (over or len(group) == self.limits.batch_slices):
                    commands.append(self._batch(key, paths[index].name, group))
                    group, n_bytes = [], 0
                group.append(each)
                n_bytes += each.length
            commands.append(self._batch(key, paths[index].name, group))
        return commands

    def _batch(self, key: PeerKey, path: str, slices: Sequence[Slice]) -> CarryBatch:
        notification = self.notification if self._notifying else None
        batch = Batch(
            self._n_batches,
            self.number,
            self.op,
            key,
            path,
            tuple(slices),
            notification,
            checksums=self._checksums,
            verify=self._verify,
        )
        self._n_batches += 1
        self._in_flight[batch.number] = batch
        return CarryBatch(batch)

    def check(self) -> None:
        """Assert the invariants that hold between calls."""
        in_flight = [each for batch in self._in_flight.values() for each in batch.slices]
        waiting = [each for peer in self._peers.values() for each in peer.waiting]
        numbers = [each.number for each in in_flight + waiting]
        assert len(set(numbers)) == len(numbers), "a slice is in two places"
        for peer in self._peers.values():
            assert peer.n_resolves <= _MAX_RESOLVES
        if self._error is None:
            uncut = sum(piece.length for pieces in self._uncut.values() for piece in pieces)
            left = sum(each.length for each in in_flight + waiting) + uncut
            assert self.applied_bytes + left == self.n_bytes, "bytes were lost or counted twice"
        if self.finished:
            assert not self._in_flight
            assert self._error is not None or self.applied_bytes == self.n_bytes


def merge_pieces(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces without empty ones; join neighbours that touch on both sides."""
    last: Piece | None = None
    for piece in pieces:
        if piece.length == 0:
            continue
        if (
            last is not None
            and piece.local_offset == last.local_offset + last.length
            and piece.remote_offset == last.remote_offset + last.length
            and piece.local == last.local
            and piece.remote == last.remote
        ):
            last = msgspec.structs.replace(last, length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
