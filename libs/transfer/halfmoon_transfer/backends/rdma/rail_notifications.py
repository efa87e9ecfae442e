"""Deliver a notification over a rail: write it into the owner's slot and await the answer.

    initiator                                       owner
    body -> WRITE_WITH_IMM (its length) ----------> slot, and a completion: `OwnerRail.arrived`
            its own completion <------------------- (the device's acknowledgement)
    answer <---------------- side channel --------- queued or refused:
    `NotificationResult`

Only an answered notification is delivered. A rail that fails before the answer is fenced, and the
owner answers the fence after all that has arrived. A notification that has not arrived goes over
another rail with the same id, so the queue takes it once. A link is used by one thread, which waits
for the answer, so each end has one slot.
"""

from typing import Annotated

import msgspec

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.rdma.link import RdmaLink
from halfmoon_transfer.backends.rdma.rail_health import RailFailed
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    SLOT_BYTES,
    U63,
    HandshakeError,
    NotificationResult,
)
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, OutgoingNotification, SliceOutcome


class NotificationBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of the slot, as MessagePack."""

    generation: U63
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    sender: str
    message: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTIFICATION_BYTES)]


_bodies: msgspec.msgpack.Decoder[NotificationBody] = msgspec.msgpack.Decoder(NotificationBody)


def encode(generation: int, notification: OutgoingNotification) -> bytes:
    """Encode the content of the slot; it may be longer than the slot."""
    return msgspec.msgpack.encode(
        NotificationBody(generation, notification.id, notification.sender, notification.message)
    )


def decode(body: bytes) -> tuple[int, OutgoingNotification]:
    """Return the receiver's generation and the notification.

    Raises:
        HandshakeError: it is no notification.
    """
    try:
        found = _bodies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a notice: {error}") from None
    return found.generation, OutgoingNotification(found.id, found.sender, found.message)


def deliver_notification(link: RdmaLink, request: CarryRequest) -> SliceOutcome:
    """Deliver the notification of a batch over the first rail that works.

    Raises:
        RdmaPeerGone: the side channel broke; whether it was delivered is unknown.
        VerbsError: a device failed; whether it was delivered is unknown.
    """
    batch = request.batch
    assert batch.notification is not None
    body = encode(batch.peer.generation, batch.notification)
    if len(body) > SLOT_BYTES:
        return SliceOutcome(
            OutcomeKind.UNUSABLE, f"a notice of {len(body)} bytes; rdma takes {SLOT_BYTES}"
        )
    missing = "no rail of this peer works"
    for rail in link.rails:
        if request.stop.stopped:
            return SliceOutcome(OutcomeKind.LOST, "stopped")
        if not link.health.usable(rail.pair):
            continue
        result: NotificationResult | None = None
        try:
            if not rail.connected:
                link.connect(rail)
            result = link.announce(rail, batch.notification.id, body)
        except RailFailed as failed:
            missing = f"{rail.pair} failed: {failed}"
            link.health.on_failed(rail.pair, link.peer, str(failed))
        if result is not None:
            return refusal_outcome(batch, batch.slices[0], result.status, result.detail)
    return SliceOutcome(OutcomeKind.LOST, missing)
