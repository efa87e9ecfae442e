"""Run small transfers in the caller's thread, without a plan or a worker thread.

There are two fast paths. One is a copy in memory. The other is an exchange over an open and idle
connection; it blocks until the deadline, so it is only for callers that wait anyway.

Only transfers that succeed at once take a fast path. Whenever the peer is unknown, no connection is
idle, or a slice was not applied, nothing is reported. Then the same request starts again with a
plan, which has retries and errors. Applying the same bytes twice is harmless: a connection that
breaks here is given up like any other, and the peer ends it before anything is sent again.

Processor time of a 4 KiB write without the fast path, as a multiple of the time with it:

    transfer   shm 3.6 (40.5 : 11.1 µs)   tcp 2.2   tcp with the extension 5.2
    submit     shm 6.6 (74.4 : 11.3 µs)   tcp has no fast path here

These are medians of 9 rounds in turns on 2 busy cores; `python -m benchmarks.transfer.fast_path`.
"""

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
from halfmoon_transfer.transfers.transfer_stats import TransferCounters, corrupted_slices


class FastPath:
    """The fast paths of one engine."""

    def __init__(
        self,
        context: EngineContext,
        router: PathRouter,
        counters: TransferCounters,
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._context = context
        self._router = router
        self._counters = counters
        #: Whether writes may begin just now; None: always.
        self.may_write: Callable[[], bool] | None = None
        #: For copies, which can't be stopped: they are over at once.
        self._no_stop = StopSignal(float("inf"), now)

    def copy(
        self, op: Op, pieces: Sequence[Piece], max_bytes: int, *, verify: bool = False
    ) -> Report | None:
        """Move these pieces by a copy in memory; return None if that is not possible at once."""
        started = self._now()
        route = self._route(op, pieces)
        if route is None:
            return None
        return self._copy(started, op, pieces, max_bytes, route, verify=verify)

    def move(
        self, op: Op, pieces: Sequence[Piece], deadline_s: float, *, verify: bool = False
    ) -> Report | None:
        """Move these pieces by a copy or an idle connection; return None if that is not possible.

        Raises:
            TimedOut: the connection did not answer until the deadline.
        """
        started = self._now()
        route = self._route(op, pieces)
        if route is None:
            return None
        settings = self._context.settings
        if route.try_fast_path is None:
            return self._copy(started, op, pieces, settings.batch_bytes, route, verify=verify)
        if verify and not settings.checksums:
            return None
        return self._try_fast_path(started, op, pieces, deadline_s, route)

    def _route(self, op: Op, pieces: Sequence[Piece]) -> FastRoute | None:
        if not pieces or op not in ("read", "write"):
            return None
        if op == "write" and self.may_write is not None and not self.may_write():
            return None
        remote = pieces[0].remote
        return self._router.fast_route(remote.segment, remote.generation)

    def _copy(
        self,
        started: float,
        op: Op,
        pieces: Sequence[Piece],
        max_bytes: int,
        route: FastRoute,
        *,
        verify: bool,
    ) -> Report | None:
        if route.can_copy_inline is None:
            return None
        batch = as_single_batch(op, pieces, route.backend.name, max_bytes, verify=verify)
        if batch is None or not route.can_copy_inline(route.peer, batch):
            return None
        if check_request(op, pieces, self._context) is not None:
            return None
        outcomes = self._router.move(batch, route.peer, route.backend, self._no_stop)
        if any(each is not APPLIED for each in outcomes):
            self._counters.on_corrupted(route.backend.name, corrupted_slices(outcomes))
            return None
        n_bytes = sum(piece.length for piece in pieces)
        return self._report(started, op, n_bytes, route)

    def _try_fast_path(
        self, started: float, op: Op, pieces: Sequence[Piece], deadline_s: float, route: FastRoute
    ) -> Report | None:
        peer, regions, try_fast_path = route.peer, self._context.regions, route.try_fast_path
        assert try_fast_path is not None
        n_bytes = 0
        for piece in pieces:
            remote, length = piece.remote, piece.length
            n_bytes += length
            # An empty piece is no slice on a wire. The plan reports what is wrong.
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
                return self._report(started, op, n_bytes, route)
        finally:
            regions.leases.release_all(entries)
        if self._now() < started + deadline_s:
            return None
        self._counters.on_failed(0)
        address = peer.endpoints[route.backend.name].address
        raise TimedOut(
            f"{op} of {n_bytes} bytes not done after {deadline_s} s; "
            f"waiting for segment {peer.name} at {address}"
        )

    def _report(self, started: float, op: Op, n_bytes: int, route: FastRoute) -> Report:
        self._counters.on_carried(route.backend.name, op, n_bytes)
        self._counters.on_done(op, n_bytes)
        return Report(n_bytes, self._now() - started, (route.backend.name,), 0)


class FinishedTransfer(Transfer):
    """A transfer that was done when `submit` returned."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout_s: float | None = None) -> Report:
        """Return the report, at once."""
        return self._report

    def cancel(self) -> None:
        """Do nothing: it is done."""

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call it at once."""
        callback(self)

    def __await__(self) -> Generator[object, None, Report]:
        """Return the report, at once."""
        yield from ()
        return self._report
