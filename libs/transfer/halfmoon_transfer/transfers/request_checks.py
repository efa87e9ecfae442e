"""Check requests of callers, as far as possible without a peer.

Pure: it reads the pieces and this engine's regions, and moves nothing.
"""

import secrets
from collections.abc import Sequence

from halfmoon_protocol.regions import KEY_BYTES, Region
from halfmoon_transfer.backends.backend_interface import EngineContext
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES, Op, Piece, Rejected
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, is_within
from halfmoon_transfer.regions.region_table import RegionExtent

#: Limits of offsets and generations on a wire.
_MAX_REGION_BYTES = 2**63 - 1
_GENERATIONS = range(2**63)


def make_notification(pieces: Sequence[Piece], message: bytes, sender: str) -> OutgoingNotification:
    """Make a notification for the peers of these pieces.

    Raises:
        ValueError: it is too long, or there are no pieces.
    """
    if len(message) > MAX_NOTIFICATION_BYTES or not pieces:
        raise ValueError(
            f"a notification of {len(message)} bytes about {len(pieces)} pieces: at most "
            f"{MAX_NOTIFICATION_BYTES} bytes, and at least one piece, which names the receiver"
        )
    return OutgoingNotification(secrets.token_bytes(KEY_BYTES), sender, bytes(message))


def check_request(op: Op, pieces: Sequence[Piece], context: EngineContext) -> Rejected | None:
    """Return what is wrong with a request, or None."""
    # By identity: a scatter list repeats the same few regions.
    checked: set[int] = set()
    extents: dict[int, RegionExtent] = {}
    for piece in pieces:
        for side, region, offset in (
            ("local", piece.local, piece.local_offset),
            ("remote", piece.remote, piece.remote_offset),
        ):
            if id(region) not in checked:
                if len(region.key) != KEY_BYTES or region.generation not in _GENERATIONS:
                    return Rejected(
                        f"the {side} region of a {op} can't be one: generation "
                        f"{region.generation}, a key of {len(region.key)} bytes"
                    )
                if region.length > _MAX_REGION_BYTES:
                    return Rejected(f"the {side} region of a {op} has {region.length} bytes")
                checked.add(id(region))
            if not is_within(offset, piece.length, region.length):
                return Rejected(
                    f"{op} of {piece.length} bytes at {side} offset {offset} of a region "
                    f"of segment {region.segment}, which has {region.length} bytes"
                )
        extent = extents.get(id(piece.local))
        if extent is None:
            try:
                extent = extents[id(piece.local)] = context.regions.local_extent(piece.local)
            except AccessRefused as refused:
                return _not_local(op, piece.local, refused, context)
        if extent.length < piece.local.length and not is_within(
            piece.local_offset, piece.length, extent.length
        ):
            return Rejected(f"the local region of a {op} has {extent.length} bytes only")
        if op == "read" and not extent.writable:
            return Rejected("the local region of a read is read-only memory")
    return None


def _not_local(op: Op, region: Region, refused: AccessRefused, context: EngineContext) -> Rejected:
    if refused.status is AccessStatus.NOT_SHAREABLE:
        return Rejected(
            f"the local region of a {op} is a file; a file is the remote side "
            "of its owner's transfers, memory the local one"
        )
    return Rejected(
        f"the local region of a {op} is of segment {region.segment}, "
        f"generation {region.generation}, and not registered at segment "
        f"{context.name}, generation {context.generation}: register it first"
    )
