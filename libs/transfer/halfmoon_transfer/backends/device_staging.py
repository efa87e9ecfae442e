"""Device memory as the local side of a transfer: through pinned memory, part by part.

A batch is cut into parts. While one is on the wire the next is copied out of the device (a
write), or the one before into it (a read):

    write    out 0 | carry 0 | carry 1 | carry 2         read    carry 0 | carry 1 | carry 2 | in 2
                   | out 1   | out 2   |                                 | in 0    | in 1    |

What a backend gets is a request whose local regions are pinned host memory, registered like any
other but known to nobody: every backend carries it without knowing. Of each batch at most
two parts are in pinned memory, and the second never waits for room: so nobody who holds some
waits for more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import CarryRequest
from halfmoon_transfer.devices.device_interface import CopyEvent, DeviceError
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.devices.pinned_pool import PinnedRun
from halfmoon_transfer.planning.transfer_plan import APPLIED, Batch, OutcomeKind, SliceOutcome

_STOPPED = SliceOutcome(OutcomeKind.LOST, "stopped")
#: Parts in a row of which nothing arrived, after which a batch's others are not tried: a peer
#: that is gone may take its time to be found out, each time.
_MAX_LOST_PARTS = 2


class _Cut(NamedTuple):
    """A slice, or a run of one that is too long."""

    slice_index: int
    at: int
    length: int


class _Part:
    """Cuts that travel together, with their bytes in pinned memory."""

    def __init__(self, request: CarryRequest, local: LocalRegion, cuts: Sequence[_Cut]) -> None:
        self.cuts = cuts
        #: What became of each cut.
        self.outcomes: list[SliceOutcome] = [_STOPPED] * len(cuts)
        self._request = request
        #: Where the bytes of all its cuts are.
        self._local = local
        #: Where each cut begins in the pinned memory; the last one: where all of them end.
        self._at = list(accumulate((cut.length for cut in cuts), initial=0))
        self._run: PinnedRun | None = None
        self._fetched = False
        #: Copies that were begun, each with the cuts that it is for.
        self._events: list[tuple[CopyEvent, range]] = []

    @property
    def lost(self) -> bool:
        """Whether the path failed for all of it."""
        return all(
            each.kind in (OutcomeKind.LOST, OutcomeKind.UNREACHABLE) for each in self.outcomes
        )

    def make_room(self, *, wait: bool) -> bool:
        """Have room in pinned memory; False when there is none now, or the transfer stops."""
        pool = self._local.pool
        if pool is None or self._run is not None:
            return True
        n_bytes = self._at[-1]
        self._run = pool.wait(n_bytes, self._request.stop) if wait else pool.take(n_bytes)
        return self._run is not None

    def fetch(self) -> None:
        """Begin to copy out of the device, unless that has begun."""
        device = self._local.device
        if device is not None and not self._fetched:
            self._begin(device.device.copy_out, range(len(self.cuts)))
        self._fetched = True

    def settle(self) -> None:
        """Begin to copy what has arrived into the device."""
        device = self._local.device
        if device is not None:
            applied = [
                n for n, each in enumerate(self.outcomes) if each.kind is OutcomeKind.APPLIED
            ]
            self._begin(lambda at, view: device.device.copy_in(view, at), applied)

    def carry(self, carry: Callable[[CarryRequest], Sequence[SliceOutcome]]) -> None:
        """Have those cuts carried whose bytes are in place; the rest has its outcome."""
        self.wait()
        going = [n for n, each in enumerate(self.outcomes) if each.kind is not OutcomeKind.REJECTED]
        if self._request.stop.stopped or not going:
            return
        slices, views = [], []
        for number in going:
            index, at, length = self.cuts[number]
            whole = self._request.batch.slices[index]
            view, local, local_offset = self._place(number)
            slices.append(
                msgspec.structs.replace(
                    whole,
                    local=local,
                    local_offset=local_offset,
                    remote_offset=whole.remote_offset + at,
                    length=length,
                )
            )
            views.append(view)
        batch = msgspec.structs.replace(self._request.batch, slices=tuple(slices))
        request = msgspec.structs.replace(self._request, batch=batch, local=tuple(views))
        for number, outcome in zip(going, carry(request), strict=True):
            self.outcomes[number] = outcome

    def wait(self) -> None:
        """Wait for the copies that were begun."""
        for event, numbers in self._events:
            try:
                event.wait()
            except DeviceError as error:
                self._fail(numbers, error)
        self._events.clear()

    def close(self) -> None:
        """Give the pinned memory back; nobody uses it any more."""
        self.wait()
        if self._run is not None:
            assert self._local.pool is not None
            self._local.pool.release(self._run)
            self._run = None

    def _begin(self, copy: Callable[[int, memoryview], CopyEvent], numbers: Sequence[int]) -> None:
        """Copy these cuts, those that touch on the device in one go."""
        assert self._run is not None
        assert self._local.device is not None
        for run in _touching(numbers, self._on_device):
            at = self._local.device.address + self._on_device(run[0])[0]
            view = self._run.view[self._at[run[0]] : self._at[run[-1] + 1]]
            try:
                self._events.append((copy(at, view), run))
            except DeviceError as error:
                self._fail(run, error)

    def _fail(self, numbers: range, error: DeviceError) -> None:
        op = self._request.batch.op
        failed = SliceOutcome(
            OutcomeKind.REJECTED, f"the local region of a {op} is in device memory: {error}"
        )
        for number in numbers:
            self.outcomes[number] = failed

    def _on_device(self, number: int) -> tuple[int, int]:
        """Where a cut begins and ends in its local region."""
        index, at, length = self.cuts[number]
        offset = self._request.batch.slices[index].local_offset + at
        return offset, offset + length

    def _place(self, number: int) -> tuple[memoryview, Region, int]:
        """Where a cut's bytes are in host memory, also as a range of a region."""
        if self._run is None:
            start, end = self._on_device(number)
            whole = self._request.batch.slices[self.cuts[number].slice_index]
            return self._local.view[start:end], whole.local, start
        assert self._local.pinned is not None
        start, end = self._at[number], self._at[number + 1]
        return self._run.view[start:end], self._local.pinned, self._run.offset + start


def _touching(numbers: Sequence[int], where: Callable[[int], tuple[int, int]]) -> Iterator[range]:
    """Runs of consecutive cuts each of which begins where the one before ends."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if (
            index == len(numbers)
            or numbers[index] != numbers[index - 1] + 1
            or where(numbers[index])[0] != where(numbers[index - 1])[1]
        ):
            yield range(numbers[first], numbers[index - 1] + 1)
            first = index


def carry_staged(
    request: CarryRequest,
    locals_: Mapping[bytes, LocalRegion],
    carry: Callable[[CarryRequest], Sequence[SliceOutcome]],
    part_bytes: int,
) -> list[SliceOutcome]:
    """Carry a batch some of whose local regions are device memory.

    Args:
        request: the batch; its `local` is not looked at.
        locals_: all its local regions, by key, leased by the caller.
        carry: the backend's.
        part_bytes: a part's size at the most; no more than half of a pool.

    Returns:
        One outcome per slice. A slice that travels in several cuts is applied when all are.
    """
    outcomes = [APPLIED] * len(request.batch.slices)
    for part in _flow(request, locals_, carry, part_bytes):
        for cut, outcome in zip(part.cuts, part.outcomes, strict=True):
            if outcomes[cut.slice_index].kind is OutcomeKind.APPLIED:
                outcomes[cut.slice_index] = outcome
    return outcomes


def _flow(
    request: CarryRequest,
    locals_: Mapping[bytes, LocalRegion],
    carry: Callable[[CarryRequest], Sequence[SliceOutcome]],
    part_bytes: int,
) -> list[_Part]:
    """Move all parts; at its end nothing is being copied and no room is held."""
    slices = request.batch.slices
    parts = [
        _Part(request, locals_[slices[cuts[0].slice_index].local.key], cuts)
        for cuts in _cut(request.batch, part_bytes)
    ]
    write = request.batch.op == "write"
    n_lost = 0
    try:
        for number, part in enumerate(parts):
            if request.stop.stopped:
                break
            if n_lost == _MAX_LOST_PARTS:
                part.outcomes = [parts[number - 1].outcomes[-1]] * len(part.cuts)
                continue
            if not part.make_room(wait=False):
                # Who holds no room may wait for some.
                if number:
                    parts[number - 1].close()
                if not part.make_room(wait=True):
                    continue
            if write:
                # Not yet: the first one, and what found no room while the one before was carried.
                part.fetch()
                ahead = parts[number + 1] if number + 1 < len(parts) else None
                if ahead is not None and ahead.make_room(wait=False):
                    ahead.fetch()
                part.carry(carry)
                part.close()
            else:
                part.carry(carry)
                part.settle()
                if number:
                    parts[number - 1].close()
            n_lost = n_lost + 1 if part.lost else 0
    finally:
        for part in parts:
            part.close()
    return parts


def _cut(batch: Batch, part_bytes: int) -> Iterator[list[_Cut]]:
    """Parts of one local region each, none longer than `part_bytes`; all but long slices whole."""
    part: list[_Cut] = []
    room = part_bytes
    for index, each in enumerate(batch.slices):
        other = bool(part) and batch.slices[part[-1].slice_index].local.key != each.local.key
        if part and (other or room < each.length):
            yield part
            part, room = [], part_bytes
        for at in range(0, each.length, part_bytes):
            if not room:
                yield part
                part, room = [], part_bytes
            length = min(each.length - at, part_bytes)
            part.append(_Cut(index, at, length))
            room -= length
    if part:
        yield part
