"""Make one batch of a small transfer, without a plan."""

from collections.abc import Sequence

from halfmoon_transfer.interface import Op, Piece
from halfmoon_transfer.planning.transfer_plan import Batch, PeerKey, Slice


def as_single_batch(
    op: Op, pieces: Sequence[Piece], path: str, max_bytes: int, *, verify: bool = False
) -> Batch | None:
    """Return these pieces as one batch, uncut, or None if they are not one.

    They are not if they are empty, more than `max_bytes`, or of several peers.
    """
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
    return Batch(0, -1, op, peer, path, tuple(slices), verify=verify)
