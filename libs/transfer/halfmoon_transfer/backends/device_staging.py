"""Stage the local device memory of a batch through pinned memory, part by part.

A batch is cut into parts. While one part is on the wire, another one is copied: the next one out of
the device (a write), or the previous one into it (a read):

    write    out 0 | carry 0 | carry 1 | carry 2         read    carry 0 | carry 1 | carry 2 | in 2
                   | out 1   | out 2   |                                 | in 0    | in 1    |

A backend gets requests whose local regions are pinned host memory. They are registered like any
other, but private, so every backend carries them unchanged. Of each batch at most two parts are in
pinned memory, and the second never waits for room. So no thread that holds room waits for more.
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
#: After so many lost parts in a row, the other parts of a batch are not tried: each may take long
#: to notice that a peer is gone.
_MAX_LOST_PARTS = 2


class _Cut(NamedTuple):
    """A slice, or a range of a slice that is longer than a part."""

    slice_index: int
    at: int
    length: int


class _Part:
    """Cuts that travel together, with their bytes in pinned memory."""

    def __init__(self, request: CarryRequest, local: LocalRegion, cuts: Sequence[_Cut]) -> None:
        self.cuts = cuts
        #: Outcome of each cut.
        self.outcomes: list[SliceOutcome] = [_STOPPED] * len(cuts)
        self._request = request
        #: The local region of all its cuts.
        self._local = local
        #: Start of each cut in the pinned memory, and the end of the last one.
        self._at = list(accumulate((cut.length for cut in cuts), initial=0))
        self._run: PinnedRun | None = None
        self._is_fetched = False
        #: Copies in progress, each with its cuts.
        self._events: list[tuple[CopyEvent, range]] = []

    @property
    def lost(self) -> bool:
        """True if the path failed for all its cuts."""
        return all(
            each.kind in (OutcomeKind.LOST, OutcomeKind.UNREACHABLE) for each in self.outcomes
        )

    def make_room(self, *, wait: bool) -> bool:
        """Allocate pinned memory; return False if there is none, or the transfer stops."""
        pool = self._local.pool
        if pool is None or self._run is not None:
            return True
        n_bytes = self._at[-1]
        self._run = pool.wait(n_bytes, self._request.stop) if wait else pool.take(n_bytes)
        return self._run is not None

    def fetch(self) -> None:
        """Begin to copy out of the device, unless that was done already."""
        device = self._local.device
        if device is not None and not self._is_fetched:
            self._begin(device.device.copy_out, range(len(self.cuts)))
        self._is_fetched = True

    def store(self) -> None:
        """Begin to copy the received cuts into the device."""
        device = self._local.device
        if device is not None:
            applied = [
                n for n, each in enumerate(self.outcomes) if each.kind is OutcomeKind.APPLIED
            ]
            self._begin(lambda at, view: device.device.copy_in(view, at), applied)

    def carry(self, carry: Callable[[CarryRequest], Sequence[SliceOutcome]]) -> None:
        """Carry the cuts whose bytes are in place; the others have their outcome."""
        self.wait()
        ready = [n for n, each in enumerate(self.outcomes) if each.kind is not OutcomeKind.REJECTED]
        if self._request.stop.stopped or not ready:
            return
        slices, views = [], []
        for number in ready:
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
        for number, outcome in zip(ready, carry(request), strict=True):
            self.outcomes[number] = outcome

    def wait(self) -> None:
        """Wait for the copies in progress."""
        for event, numbers in self._events:
            try:
                event.wait()
            except DeviceError as error:
                self._fail(numbers, error)
        self._events.clear()

    def close(self) -> None:
        """Release the pinned memory; no copy uses it any more."""
        self.wait()
        if self._run is not None:
            assert self._local.pool is not None
            self._local.pool.release(self._run)
            self._run = None

    def _begin(self, copy: Callable[[int, memoryview], CopyEvent], numbers: Sequence[int]) -> None:
        """Begin to copy these cuts; adjacent ones in one copy."""
        assert self._run is not None
        assert self._local.device is not None
        for run in _adjacent(numbers, self._on_device):
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
        """Return where a cut begins and ends in its local region."""
        index, at, length = self.cuts[number]
        offset = self._request.batch.slices[index].local_offset + at
        return offset, offset + length

    def _place(self, number: int) -> tuple[memoryview, Region, int]:
        """Return a cut's bytes in host memory, with their region and offset in it."""
        if self._run is None:
            start, end = self._on_device(number)
            whole = self._request.batch.slices[self.cuts[number].slice_index]
            return self._local.view[start:end], whole.local, start
        assert self._local.pinned is not None
        start, end = self._at[number], self._at[number + 1]
        return self._run.view[start:end], self._local.pinned, self._run.offset + start


def _adjacent(numbers: Sequence[int], where: Callable[[int], tuple[int, int]]) -> Iterator[range]:
    """Yield runs of consecutive cuts that are adjacent in their region."""
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
        request: the batch; its `local` is not used.
        locals_: all its local regions, by key, leased by the caller.
        carry: the backend's.
        part_bytes: largest size of a part; at most half of a pool.

    Returns:
        One outcome per slice. A slice that travels in several cuts is applied when all are.
    """
    outcomes = [APPLIED] * len(request.batch.slices)
    for part in _carry_parts(request, locals_, carry, part_bytes):
        for cut, outcome in zip(part.cuts, part.outcomes, strict=True):
            if outcomes[cut.slice_index].kind is OutcomeKind.APPLIED:
                outcomes[cut.slice_index] = outcome
    return outcomes


def _carry_parts(
    request: CarryRequest,
    locals_: Mapping[bytes, LocalRegion],
    carry: Callable[[CarryRequest], Sequence[SliceOutcome]],
    part_bytes: int,
) -> list[_Part]:
    """Move all parts; afterwards no copy is in progress and no room is held."""
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
                # Only a thread that holds no room may wait for some.
                if number:
                    parts[number - 1].close()
                if not part.make_room(wait=True):
                    continue
            if write:
                # Only the first part, and one without room earlier, is not fetched yet.
                part.fetch()
                ahead = parts[number + 1] if number + 1 < len(parts) else None
                if ahead is not None and ahead.make_room(wait=False):
                    ahead.fetch()
                part.carry(carry)
                part.close()
            else:
                part.carry(carry)
                part.store()
                if number:
                    parts[number - 1].close()
            n_lost = n_lost + 1 if part.lost else 0
    finally:
        for part in parts:
            part.close()
    return parts


def _cut(batch: Batch, part_bytes: int) -> Iterator[list[_Cut]]:
    """Yield parts of one local region each, of at most `part_bytes`; only long slices are cut."""
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
