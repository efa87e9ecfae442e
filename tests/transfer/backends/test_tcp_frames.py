"""The framing over TCP as bytes: what is written is read, and nothing else is."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_transfer import Piece
from halfmoon_transfer.backends.backend_interface import refusal_outcome
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceReply,
    SliceRequest,
    TcpFrameError,
    TcpHello,
    TcpReply,
    TcpRequest,
)
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.regions.access import AccessStatus

U64 = st.integers(0, 2**64 - 1)
ASKED = st.builds(
    SliceRequest, st.binary(min_size=16, max_size=16), U64, st.integers(1, 2**16), U64
)
REQUESTS = st.builds(
    TcpRequest,
    st.sampled_from([tcp_frames.READ, tcp_frames.WRITE]),
    U64,
    U64,
    st.booleans(),
    st.lists(ASKED, min_size=1, max_size=20).map(tuple),
)
ANSWERS = st.lists(st.builds(SliceReply, st.sampled_from(AccessStatus), U64), max_size=20)


def read_request(frame: bytes) -> TcpRequest:
    header, rest = frame[: tcp_frames.HEADER_BYTES], frame[tcp_frames.HEADER_BYTES :]
    assert len(rest) == tcp_frames.request_rest_bytes(header)
    return tcp_frames.decode_request(header, rest)


@given(REQUESTS)
def test_a_request_is_read_as_it_was_written(request: TcpRequest) -> None:
    assert read_request(tcp_frames.encode_request(request)) == request


@given(st.sampled_from([tcp_frames.READ, tcp_frames.WRITE]), U64, ANSWERS)
def test_a_reply_is_read_as_it_was_written(op: int, number: int, answers: list[SliceReply]) -> None:
    frame = tcp_frames.encode_reply(op, number, answers)
    header, rest = frame[: tcp_frames.HEADER_BYTES], frame[tcp_frames.HEADER_BYTES :]
    assert tcp_frames.reply_rest_bytes(header) == (len(rest), 0)
    assert tcp_frames.decode_reply(header, rest) == TcpReply(op, number, tuple(answers))


@given(st.text(max_size=50), U64, st.text(max_size=50))
def test_a_hello_is_read_as_it_was_written(segment: str, generation: int, refused: str) -> None:
    hello = TcpHello(segment, generation, refused)
    frame = tcp_frames.encode_hello(hello)
    header, body = frame[: tcp_frames.HELLO_HEADER_BYTES], frame[tcp_frames.HELLO_HEADER_BYTES :]
    assert tcp_frames.hello_bytes(header) == len(body)
    assert tcp_frames.decode_hello(body) == hello


@given(REQUESTS, st.data())
def test_any_changed_bit_of_a_head_is_noticed(request: TcpRequest, data: st.DataObject) -> None:
    frame = bytearray(tcp_frames.encode_request(request))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    header = bytes(frame[: tcp_frames.HEADER_BYTES])
    with pytest.raises(TcpFrameError):
        n_rest = tcp_frames.request_rest_bytes(header)
        rest = bytes(frame[tcp_frames.HEADER_BYTES :])
        # Another number of slices: the checksum is looked for in another place.
        tcp_frames.decode_request(header, rest[:n_rest].ljust(n_rest, b"\0"))


@given(st.binary(min_size=tcp_frames.HEADER_BYTES, max_size=tcp_frames.HEADER_BYTES), st.binary())
def test_garbage_is_a_frame_error_and_nothing_else(header: bytes, rest: bytes) -> None:
    for magic in (b"", b"HMTQ\x01", b"HMTR\x01"):
        begun = magic + header[len(magic) :]
        for read in (_read_any_request, _read_any_reply):
            with pytest.raises(TcpFrameError):
                read(begun, rest)
    with pytest.raises(TcpFrameError):
        tcp_frames.decode_hello(b"\xc1" + rest)


def _read_any_request(header: bytes, rest: bytes) -> None:
    n_rest = tcp_frames.request_rest_bytes(header)
    assert n_rest < 64 * 1024
    tcp_frames.decode_request(header, rest[:n_rest].ljust(n_rest, b"\0"))


def _read_any_reply(header: bytes, rest: bytes) -> None:
    n_rest, n_text = tcp_frames.reply_rest_bytes(header)
    assert n_rest < 64 * 1024
    assert n_text <= tcp_frames.MAX_TEXT_BYTES
    tcp_frames.decode_reply(header, rest[:n_rest].ljust(n_rest, b"\0"))


def oversized() -> Iterator[tuple[TcpRequest, str]]:
    key = bytes(16)
    slices = tuple(SliceRequest(key, 0, 1) for _ in range(1025))
    yield TcpRequest(tcp_frames.READ, 0, 1, True, slices), "1025 slices"
    yield TcpRequest(tcp_frames.READ, 0, 1, True, ()), "0 slices"
    yield TcpRequest(9, 0, 1, True, slices[:1]), "op 9"
    huge = SliceRequest(key, 0, tcp_frames.MAX_SLICE_BYTES + 1)
    yield TcpRequest(tcp_frames.WRITE, 0, 1, True, (huge,)), "16777217 bytes"
    yield TcpRequest(tcp_frames.WRITE, 0, 1, True, (SliceRequest(key, 0, 0),)), "slice of 0 bytes"
    large = SliceRequest(key, 0, tcp_frames.MAX_SLICE_BYTES)
    yield TcpRequest(tcp_frames.READ, 0, 1, True, (large,) * 5), "83886080 bytes"


@pytest.mark.parametrize(("request_", "message"), list(oversized()))
def test_limits_are_checked_before_anything_is_allocated(
    request_: TcpRequest, message: str
) -> None:
    with pytest.raises(TcpFrameError, match=message):
        read_request(tcp_frames.encode_request(request_))


def test_another_version_is_named() -> None:
    frame = bytearray(
        tcp_frames.encode_request(
            TcpRequest(tcp_frames.READ, 0, 1, True, (SliceRequest(b"k" * 16, 0, 1),))
        )
    )
    frame[4] = 2
    with pytest.raises(TcpFrameError, match="version 2, this build speaks 1"):
        read_request(bytes(frame))


def test_the_bytes_are_the_documented_ones() -> None:
    asked = SliceRequest(bytes(range(16)), 0x0102, 0x0304, 0x0506)
    frame = tcp_frames.encode_request(TcpRequest(tcp_frames.WRITE, 7, 9, True, (asked,)))
    assert frame[:-8].hex(" ", 4) == (
        "484d5451 01020100 01000000 00000000 07000000 00000000 09000000 00000000 "
        "00010203 04050607 08090a0b 0c0d0e0f 02010000 00000000 04030000 00000000 "
        "06050000 00000000"
    )
    reply = tcp_frames.encode_reply(
        tcp_frames.READ, 7, [SliceReply(AccessStatus.OUT_OF_BOUNDS, 500)]
    )
    assert reply[:-8].hex(" ", 4) == (
        "484d5452 01010100 00000000 00000000 07000000 00000000 00000000 00000000 "
        "01000000 00000000 f4010000 00000000"
    )


@given(st.sampled_from(AccessStatus), U64)
def test_each_status_with_any_number_has_a_text(status: AccessStatus, detail: int) -> None:
    local, remote = Region("here", 1, bytes(16), 10), Region("there", 1, bytes(16), 10)
    batch = as_single_batch("read", [Piece(local, 0, remote, 0, 10)], "tcp", 10)
    assert batch is not None
    if status is not AccessStatus.OK:
        assert refusal_outcome(batch, batch.slices[0], status, detail).reason.isprintable()
