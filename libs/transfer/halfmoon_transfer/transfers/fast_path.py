"""The short way for a small transfer, gone by the thread that asks for it.

No plan, no other thread: that costs several times as much as the copy of a few pages. There are
two: a copy in memory, and an exchange over a connection that is open and idle (which has a
deadline to keep, so it is only for those who wait anyway).

Only what goes well at once goes this way. Whenever anything is unusual (the peer is not known
yet, no connection is idle, a slice was not applied) nothing is reported, and the same request
goes the long way, where tries and errors are. Applying the same bytes twice is harmless: a
connection that breaks on the short way is given up like any other, and the peer has ended it
before anything is sent again.
"""

import time
from collections.abc import Callable, Generator, Sequence

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.backends.backend_interface import EngineContext
from halfmoon_transfer.interface import Op, Piece, Report, TimedOut, Transfer
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.planning.transfer_plan import APPLIED
from halfmoon_transfer.regions.access import AccessRefused, is_within
from halfmoon_transfer.threads.stop_signal import StopSignal
from halfmoon_transfer.transfers.path_router import FastRoute, PathRouter
from halfmoon_transfer.transfers.request_checks import check_request
from halfmoon_transfer.transfers.transfer_stats import TransferCounters


class FastPath:
    """One engine's short way."""

    def __init__(
        self, context: EngineContext, router: PathRouter, counters: TransferCounters
    ) -> None:
        self._context = context
        self._router = router
        self._counters = counters
        #: For what can't be stopped as it is over at once.
        self._never = StopSignal.after(float("inf"))

    def copy(self, op: Op, pieces: Sequence[Piece], max_bytes: int) -> Report | None:
        """Move these pieces if that is a mere copy, and all of it goes well at once."""
        started = time.monotonic()
        way = self._way(op, pieces)
        return None if way is None else self._copy(started, op, pieces, max_bytes, way)

    def move(self, op: Op, pieces: Sequence[Piece], deadline_s: float) -> Report | None:
        """Move these pieces by a copy or over an idle connection, if all of it goes well at once.

        Raises:
            TimedOut: it was tried, until the deadline.
        """
        started = time.monotonic()
        way = self._way(op, pieces)
        if way is None:
            return None
        if way.try_fast_path is not None:
            return self._try_fast_path(started, op, pieces, deadline_s, way)
        return self._copy(started, op, pieces, self._context.settings.batch_bytes, way)

    def _way(self, op: Op, pieces: Sequence[Piece]) -> FastRoute | None:
        if not pieces or op not in ("read", "write"):
            return None
        remote = pieces[0].remote
        return self._router.fast_route(remote.segment, remote.generation)

    def _copy(
        self, started: float, op: Op, pieces: Sequence[Piece], max_bytes: int, way: FastRoute
    ) -> Report | None:
        if way.can_copy_inline is None:
            return None
        batch = as_single_batch(op, pieces, way.backend.name, max_bytes)
        if batch is None or not way.can_copy_inline(way.peer, batch):
            return None
        if check_request(op, pieces, self._context) is not None:
            return None
        outcomes = self._router.move(batch, way.peer, way.backend, self._never)
        if any(each is not APPLIED for each in outcomes):
            return None
        n_bytes = sum(piece.length for piece in pieces)
        return self._report(started, op, n_bytes, way)

    def _try_fast_path(
        self, started: float, op: Op, pieces: Sequence[Piece], deadline_s: float, way: FastRoute
    ) -> Report | None:
        peer, regions, try_fast_path = way.peer, self._context.regions, way.try_fast_path
        assert try_fast_path is not None
        n_bytes = 0
        for piece in pieces:
            remote, length = piece.remote, piece.length
            n_bytes += length
            # Nothing is no slice on a wire. What is wrong is said on the long way.
            if (
                length < 1
                or not is_within(piece.remote_offset, length, remote.length)
                or remote.generation != peer.generation
                or remote.segment != peer.name
                or len(remote.key) != KEY_BYTES
            ):
                return None
        if n_bytes > self._context.settings.express_bytes:
            return None
        try:
            entries, local = regions.leases.acquire_local(pieces, write=op == "read")
        except AccessRefused:
            return None
        try:
            if try_fast_path(peer, op, pieces, local, started + deadline_s):
                return self._report(started, op, n_bytes, way)
        finally:
            regions.leases.release_all(entries)
        if time.monotonic() < started + deadline_s:
            return None
        self._counters.on_failed(0)
        address = peer.endpoints[way.backend.name].address
        raise TimedOut(
            f"{op} of {n_bytes} bytes not done after {deadline_s} s; "
            f"waiting for segment {peer.name} at {address}"
        )

    def _report(self, started: float, op: Op, n_bytes: int, way: FastRoute) -> Report:
        self._counters.on_carried(way.backend.name, op, n_bytes)
        self._counters.on_done(op, n_bytes)
        return Report(n_bytes, time.monotonic() - started, (way.backend.name,), 0)


class FinishedTransfer(Transfer):
    """A transfer that was done when it was handed out."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def done(self) -> bool:
        """It is."""
        return True

    def result(self, timeout_s: float | None = None) -> Report:
        """The report, at once."""
        return self._report

    def cancel(self) -> None:
        """Too late."""

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls it at once."""
        callback(self)

    def __await__(self) -> Generator[object, None, Report]:
        """The report, at once."""
        yield from ()
        return self._report
