"""The side channel's framing: whole messages or a typed refusal, in any cuts."""

import socket
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_transfer.backends.rdma import rail_notifications, rdma_handshake
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    ConnectRail,
    FenceRail,
    HandshakeError,
    InitiatorProof,
    NotificationResult,
    NotificationSlot,
    OwnerProof,
    RailConnected,
    RailEnd,
    RailFenced,
    RdmaFailure,
    RdmaHello,
    RdmaRegionDenial,
    RdmaRegionGrant,
    RdmaRegionRequest,
    RdmaWelcome,
)
from halfmoon_transfer.backends.socket_io import SocketClosed
from halfmoon_transfer.cluster_key import NONCE_BYTES, PROOF_BYTES
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessStatus

PATIENCE_S = 60.0
GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
names = st.text(min_size=1, max_size=255)
u24 = st.integers(0, 2**24 - 1)
u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)
ends = st.builds(
    RailEnd,
    gid=st.just(GID),
    queue_pair=u24,
    psn=u24,
    mtu=st.integers(1, 5),
    max_reads=st.integers(0, 255),
)
proofs = st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)
rails = st.integers(0, rdma_handshake.MAX_RAILS - 1)
requests = st.one_of(
    st.builds(
        RdmaHello,
        version=st.integers(0, 9),
        segment=names,
        generation=u63,
        nonce=st.binary(max_size=NONCE_BYTES),
    ),
    st.builds(InitiatorProof, proof=proofs),
    st.builds(ConnectRail, rail=rails, device=names, end=ends),
    st.builds(FenceRail, rail=rails),
    st.builds(RdmaRegionRequest, generation=u63, key=st.binary(max_size=64)),
)
replies = st.one_of(
    st.builds(
        RdmaWelcome,
        segment=names,
        generation=u63,
        devices=st.dictionaries(names, st.just(GID), max_size=5),
        refused=st.text(max_size=1000),
        nonce=st.binary(max_size=NONCE_BYTES),
    ),
    st.builds(OwnerProof, proof=st.none() | proofs, refused=st.text(max_size=1000)),
    st.builds(RailConnected, end=ends, slot=st.builds(NotificationSlot, address=u63, rkey=u32)),
    st.builds(
        NotificationResult,
        id=st.binary(min_size=16, max_size=16),
        status=st.sampled_from(AccessStatus),
        detail=u63,
    ),
    st.just(RailFenced()),
    st.builds(
        RdmaRegionGrant,
        address=st.integers(0, 2**64 - 1),
        length=u63,
        writable=st.booleans(),
        rkeys=st.dictionaries(names, u32, max_size=5),
    ),
    st.builds(RdmaRegionDenial, status=st.sampled_from(AccessStatus), detail=u63),
    st.builds(RdmaFailure, reason=st.text(max_size=1000)),
)


def body(frame: bytes) -> bytes:
    assert rdma_handshake.body_bytes(frame[:4]) == len(frame) - 4
    return frame[4:]


@given(requests, replies)
def test_messages_are_read_as_they_were_written(request: Any, reply: Any) -> None:
    assert rdma_handshake.decode_request(body(rdma_handshake.encode(request))) == request
    assert rdma_handshake.decode_reply(body(rdma_handshake.encode(reply))) == reply


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_a_typed_error_or_is_a_message(data: bytes) -> None:
    for read in (rdma_handshake.decode_request, rdma_handshake.decode_reply):
        try:
            read(data)
        except HandshakeError:
            continue


@pytest.mark.parametrize("n_bytes", [0, rdma_handshake.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_lengths_that_nobody_sends_are_refused_before_anything_is_read(n_bytes: int) -> None:
    with pytest.raises(HandshakeError, match=f"{n_bytes} bytes"):
        rdma_handshake.body_bytes(n_bytes.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rail": rdma_handshake.MAX_RAILS},
        {"rail": -1},
        {"device": ""},
        {"end": {"queue_pair": 2**24}},
        {"end": {"psn": -1}},
        {"end": {"mtu": 6}},
        {"end": {"max_reads": 256}},
        {"end": {"gid": "::ffff:10.0.0.1"}},
        {"end": {"gid": GID + "\n"}},
    ],
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    good = ConnectRail(0, "dev", RailEnd(GID, 1, 2, 3, 4))
    fields = msgspec.to_builtins(good)
    fields |= {**wrong, "end": {**fields["end"], **wrong.get("end", {})}}
    with pytest.raises(HandshakeError):
        rdma_handshake.decode_request(msgspec.msgpack.encode(fields))
    assert rdma_handshake.decode_request(body(rdma_handshake.encode(good))) == good


@given(replies)
def test_an_answer_may_come_one_byte_at_a_time(reply: Any) -> None:
    ours, theirs = socket.socketpair()

    def answer() -> None:
        rdma_handshake.receive_body(theirs)
        for byte in rdma_handshake.encode(reply):
            theirs.send(bytes([byte]))

    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        theirs.settimeout(PATIENCE_S)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert rdma_handshake.send_request(ours, FenceRail(0)) == reply
        finally:
            thread.join()


@given(replies, st.data())
def test_an_answer_that_ends_early_is_none(reply: Any, data: st.DataObject) -> None:
    frame = rdma_handshake.encode(reply)
    until = data.draw(st.integers(0, len(frame) - 1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        theirs.sendall(frame[:until])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(SocketClosed):
            rdma_handshake.send_request(ours, FenceRail(0))


notes = st.builds(
    OutgoingNotification,
    st.binary(min_size=16, max_size=16),
    st.text(max_size=100),
    st.binary(max_size=MAX_NOTIFICATION_BYTES),
)


@given(notes, u63)
def test_a_notice_is_read_as_it_was_written(notice: OutgoingNotification, generation: int) -> None:
    assert rail_notifications.decode(rail_notifications.encode(generation, notice)) == (
        generation,
        notice,
    )


@given(st.binary(max_size=200), st.integers(0, 60))
def test_what_lies_in_a_slot_and_is_no_notice_is_an_error_and_nothing_else(
    junk: bytes, kept: int
) -> None:
    whole = rail_notifications.encode(7, OutgoingNotification(bytes(16), "here", bytes(30)))
    for body in (b"\xc1" + junk, whole[: min(kept, len(whole) - 1)], whole + b"\xc1" + junk):
        with pytest.raises(HandshakeError):
            rail_notifications.decode(body)
    too_long = OutgoingNotification(bytes(16), "here", bytes(MAX_NOTIFICATION_BYTES + 1))
    with pytest.raises(HandshakeError, match="not a notice"):
        rail_notifications.decode(rail_notifications.encode(7, too_long))
