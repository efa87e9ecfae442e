"""The short way for a small transfer: a copy in memory, made by the thread that asks for it.

No plan, no other thread, no deadline to watch: all that costs several times as much as the
copy of a few pages. Only what goes well at once goes this way. Whenever anything is unusual
(the peer is not known yet, a slice was not applied) nothing is reported, and the same request
goes the long way, where tries and errors are: applying the same bytes twice is harmless.
"""

import time
from collections.abc import Callable, Generator, Sequence

from halfmoon_transfer.backends.interface import Home
from halfmoon_transfer.interface import Op, Piece, Report, Transfer
from halfmoon_transfer.plan import APPLIED, Batch, PeerKey, Slice
from halfmoon_transfer.requests import fault_in
from halfmoon_transfer.stats import Tally
from halfmoon_transfer.stop import StopSignal
from halfmoon_transfer.ways import Ways


class Express:
    """One engine's short way."""

    def __init__(self, home: Home, ways: Ways, tally: Tally) -> None:
        self._home = home
        self._ways = ways
        self._tally = tally
        #: For what can't be stopped as it is over at once.
        self._never = StopSignal.after(float("inf"))

    def copy(self, op: Op, pieces: Sequence[Piece], max_bytes: int) -> Report | None:
        """Move these pieces, if all of it goes well at once."""
        started = time.monotonic()
        if not pieces or op not in ("read", "write"):
            return None
        remote = pieces[0].remote
        way = self._ways.at_once_to(remote.segment, remote.generation)
        if way is None:
            return None
        peer, backend, may = way
        batch = one_batch(op, pieces, backend.name, max_bytes)
        if batch is None or not may(peer, batch) or fault_in(op, pieces, self._home) is not None:
            return None
        outcomes = self._ways.move(batch, peer, backend, self._never)
        if any(each is not APPLIED for each in outcomes):
            return None
        n_bytes = sum(piece.length for piece in pieces)
        self._tally.on_done(op, n_bytes)
        return Report(n_bytes, time.monotonic() - started, (backend.name,), 0)


class Finished(Transfer):
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


def one_batch(op: Op, pieces: Sequence[Piece], path: str, max_bytes: int) -> Batch | None:
    """These pieces as one batch, uncut; None if they are none, too many or for several peers."""
    n_bytes = 0
    for piece in pieces:
        n_bytes += piece.length
    if not 0 < n_bytes <= max_bytes:
        return None
    first = pieces[0].remote
    peer = PeerKey(first.segment, first.generation)
    slices = []
    for number, piece in enumerate(pieces):
        remote = piece.remote
        if remote is not first and (remote.segment, remote.generation) != (
            peer.segment,
            peer.generation,
        ):
            return None
        slices.append(
            Slice(
                number,
                piece.local,
                piece.local_offset,
                remote,
                piece.remote_offset,
                piece.length,
            )
        )
    return Batch(0, -1, op, peer, path, tuple(slices))
