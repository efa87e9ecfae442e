"""The side channel's framing: whole messages or a typed refusal, in any cuts."""

import socket
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_transfer.backends.rdma import handshake, notices
from halfmoon_transfer.backends.rdma.handshake import (
    Ask,
    Connect,
    Connected,
    Denied,
    End,
    Failed,
    Fence,
    Fenced,
    Granted,
    HandshakeError,
    Hello,
    Noted,
    Prove,
    Proven,
    Slot,
    Welcome,
)
from halfmoon_transfer.backends.tcp.sockets import Closed
from halfmoon_transfer.cluster_key import NONCE_BYTES, PROOF_BYTES
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.plan import Notice
from halfmoon_transfer.regions import Status

PATIENCE_S = 60.0
GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
names = st.text(min_size=1, max_size=255)
u24 = st.integers(0, 2**24 - 1)
u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)
ends = st.builds(
    End,
    gid=st.just(GID),
    queue_pair=u24,
    psn=u24,
    mtu=st.integers(1, 5),
    max_reads=st.integers(0, 255),
)
proofs = st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)
rails = st.integers(0, handshake.MAX_RAILS - 1)
requests = st.one_of(
    st.builds(
        Hello,
        version=st.integers(0, 9),
        segment=names,
        generation=u63,
        nonce=st.binary(max_size=NONCE_BYTES),
    ),
    st.builds(Prove, proof=proofs),
    st.builds(Connect, rail=rails, device=names, end=ends),
    st.builds(Fence, rail=rails),
    st.builds(Ask, generation=u63, key=st.binary(max_size=64)),
)
replies = st.one_of(
    st.builds(
        Welcome,
        segment=names,
        generation=u63,
        devices=st.dictionaries(names, st.just(GID), max_size=5),
        refused=st.text(max_size=1000),
        nonce=st.binary(max_size=NONCE_BYTES),
    ),
    st.builds(Proven, proof=st.none() | proofs, refused=st.text(max_size=1000)),
    st.builds(Connected, end=ends, slot=st.builds(Slot, address=u63, rkey=u32)),
    st.builds(
        Noted,
        id=st.binary(min_size=16, max_size=16),
        status=st.sampled_from(Status),
        detail=u63,
    ),
    st.just(Fenced()),
    st.builds(
        Granted,
        address=st.integers(0, 2**64 - 1),
        length=u63,
        writable=st.booleans(),
        rkeys=st.dictionaries(names, u32, max_size=5),
    ),
    st.builds(Denied, status=st.sampled_from(Status), detail=u63),
    st.builds(Failed, reason=st.text(max_size=1000)),
)


def body(frame: bytes) -> bytes:
    assert handshake.body_bytes(frame[:4]) == len(frame) - 4
    return frame[4:]


@given(requests, replies)
def test_messages_are_read_as_they_were_written(request: Any, reply: Any) -> None:
    assert handshake.decode_request(body(handshake.encode(request))) == request
    assert handshake.decode_reply(body(handshake.encode(reply))) == reply


@given(requests, replies)
def test_a_request_is_no_reply_and_the_other_way_round(request: Any, reply: Any) -> None:
    with pytest.raises(HandshakeError, match="not a reply"):
        handshake.decode_reply(body(handshake.encode(request)))
    with pytest.raises(HandshakeError, match="not a request"):
        handshake.decode_request(body(handshake.encode(reply)))


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_a_typed_error_or_is_a_message(data: bytes) -> None:
    for read in (handshake.decode_request, handshake.decode_reply):
        try:
            read(data)
        except HandshakeError:
            continue


@given(requests, st.data())
def test_a_message_that_was_damaged_is_refused_or_is_another_message(
    request: Any, data: st.DataObject
) -> None:
    frame = bytearray(body(handshake.encode(request)))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = handshake.decode_request(bytes(frame))
    except HandshakeError:
        return
    assert isinstance(read, Hello | Prove | Connect | Fence | Ask)


@pytest.mark.parametrize("n_bytes", [0, handshake.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_lengths_that_nobody_sends_are_refused_before_anything_is_read(n_bytes: int) -> None:
    with pytest.raises(HandshakeError, match=f"{n_bytes} bytes"):
        handshake.body_bytes(n_bytes.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rail": handshake.MAX_RAILS},
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
    good = Connect(0, "dev", End(GID, 1, 2, 3, 4))
    fields = msgspec.to_builtins(good)
    fields |= {**wrong, "end": {**fields["end"], **wrong.get("end", {})}}
    with pytest.raises(HandshakeError):
        handshake.decode_request(msgspec.msgpack.encode(fields))
    assert handshake.decode_request(body(handshake.encode(good))) == good


@given(replies)
def test_an_answer_may_come_one_byte_at_a_time(reply: Any) -> None:
    ours, theirs = socket.socketpair()

    def answer() -> None:
        handshake.receive_body(theirs)
        for byte in handshake.encode(reply):
            theirs.send(bytes([byte]))

    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        theirs.settimeout(PATIENCE_S)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert handshake.ask(ours, Fence(0)) == reply
        finally:
            thread.join()


@given(replies, st.data())
def test_an_answer_that_ends_early_is_none(reply: Any, data: st.DataObject) -> None:
    frame = handshake.encode(reply)
    until = data.draw(st.integers(0, len(frame) - 1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        theirs.sendall(frame[:until])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Closed):
            handshake.ask(ours, Fence(0))


notes = st.builds(
    Notice,
    st.binary(min_size=16, max_size=16),
    st.text(max_size=100),
    st.binary(max_size=MAX_NOTIFICATION_BYTES),
)


@given(notes, u63)
def test_a_notice_is_read_as_it_was_written(notice: Notice, generation: int) -> None:
    assert notices.decode(notices.encode(generation, notice)) == (generation, notice)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_what_lies_in_a_slot_and_is_no_notice_is_an_error_and_nothing_else(
    junk: bytes, kept: int
) -> None:
    whole = notices.encode(7, Notice(bytes(16), "here", bytes(30)))
    for body in (b"\xc1" + junk, whole[: min(kept, len(whole) - 1)], whole + b"\xc1" + junk):
        with pytest.raises(HandshakeError):
            notices.decode(body)
    too_long = Notice(bytes(16), "here", bytes(MAX_NOTIFICATION_BYTES + 1))
    with pytest.raises(HandshakeError, match="not a notice"):
        notices.decode(notices.encode(7, too_long))
