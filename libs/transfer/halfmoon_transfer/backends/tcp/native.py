"""Run the loops of this backend in C, where the extension is built; see `docs/transfer/native.md`.

The extension handles ordinary requests and replies, and leaves the rest to `tcp_server` and `lane`.
An unusual one stays unread, so that refusals, errors and their texts are made in one place.

On a machine of 2 busy cores, a 4 KiB write over the fast path takes 10.5 µs of processor time with
the extension and 35.8 µs without (medians; `python -m benchmarks.transfer.fast_path`).
"""

import logging
from collections.abc import Iterable

from halfmoon_transfer.backends.socket_io import ByteStream, ReadAhead
from halfmoon_transfer.interface import Op, Piece
from halfmoon_transfer.planning.transfer_plan import Slice
from halfmoon_transfer.regions.region_table import RegionTable

try:
    import halfmoon_transfer_native as extension
except ImportError as error:
    #: Reason why there is no extension; "" when there is.
    missing = str(error)
else:
    missing = ""

_log = logging.getLogger(__name__)
#: How long to wait for a region's last access before its connections are cut.
_POLITE_S = 1.0
#: Outcomes of a carried slice.
APPLIED, DAMAGED = 1, 2


def can_encrypt() -> bool:
    """Return whether the extension is built and finds OpenSSL's libcrypto."""
    return not missing and not extension.RECORDS_MISSING


def open_records(sending_key: bytes, receiving_key: bytes, limit: int) -> "extension.Records":
    """Open the extension's state of an encrypted connection; only if `can_encrypt`."""
    return extension.Records(sending_key, receiving_key, limit)


class NativeServer:
    """The regions that the extension serves: those in memory that peers have requested.

    A region is added after the first request for it, which Python answers. The extension has its
    own leases: `revoke` waits for them.
    """

    def __init__(self, regions: RegionTable, spin_s: float) -> None:
        self._regions = regions
        self._spin_s = spin_s
        self._table = extension.Table(regions.generation)

    def serve(self, sock: ByteStream, ahead: ReadAhead) -> None:
        """Answer requests until one is unusual, which stays unread, or the peer hangs up.

        Raises:
            OSError: the connection broke, or stalled in the middle of a frame.
        """
        served = self._table.serve(sock.fileno(), _records(sock), *ahead.state, self._spin_s)
        ahead.resume(*served)

    def serve_regions(self, keys: Iterable[bytes]) -> None:
        """Serve these regions from now on, if they are ours and in memory."""
        self._regions.index.visit(keys, self._table.add)

    def revoke(self, key: bytes) -> None:
        """Stop serving a region whose key was removed; return when nothing accesses it."""
        if self._table.remove(key, _POLITE_S):
            return
        self._table.cut(key)
        if not self._table.remove(key, _POLITE_S):
            _log.warning("a region of segment %s is still being accessed", self._regions.segment)

    def close(self) -> None:
        """Release all memory; no connection is served any more."""
        self._table.clear()


def _records(sock: ByteStream) -> "extension.Records | None":
    """Return the extension's state of an encrypted connection; None of one in the clear."""
    records: extension.Records | None = getattr(sock, "records", None)
    return records


def carry(
    sock: ByteStream,
    ahead: ReadAhead,
    op: Op,
    slices: tuple[Slice | Piece, ...],
    local: tuple[memoryview, ...],
    generation: int,
    number: int,
    marks: bytearray,
    *,
    checksums: bool,
    limits: tuple[int, int, int],
    spin_s: float,
) -> tuple[int, int]:
    """Move a batch, up to the first unusual reply.

    Args:
        sock: without a timeout of its own; not one that Python encrypts.
        ahead: of the socket.
        op: the direction of the bytes.
        slices: what to move.
        local: the local bytes of each slice.
        generation: of the peer.
        number: of the first request.
        marks: a 0 for each slice, which becomes `APPLIED` or `DAMAGED` when its reply is in.
        checksums: whether bytes carry them.
        limits: bytes and slices of a request, and requests ahead of the first reply.
        spin_s: how long to poll for a reply before sleeping.

    Returns:
        How many requests were sent and answered. If they differ, the next reply is unusual
        and stays unread.

    Raises:
        OSError: the connection broke.
    """
    start, end, n_sent, n_answered = extension.carry(
        sock.fileno(),
        _records(sock),
        *ahead.state,
        spin_s,
        op == "write",
        checksums,
        number,
        generation,
        slices,
        local,
        marks,
        limits,
    )
    ahead.resume(start, end)
    return n_sent, n_answered
