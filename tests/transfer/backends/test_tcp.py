"""TCP: bytes on the wire, addresses, connections, damage."""

import random
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_testing.damaging_relay import damaging_relay
from halfmoon_transfer import (
    Corrupted,
    Lost,
    Piece,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.backend_interface import refusal_outcome
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.socket_io import ReadAhead, connect_any
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceReply,
    SliceRequest,
    TcpFrameError,
    TcpHello,
    TcpRequest,
)
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.threads.stop_signal import StopSignal

Eventually = Callable[..., None]
PATIENCE_S = 60.0
MANY = 5_000_000


# The wire. Hostile bytes: tests/fuzz/test_transfer_frames.py.


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


@pytest.mark.parametrize("n_bytes", [1, 31, 33, 64])
@pytest.mark.parametrize("field", ["nonce", "share"])
def test_a_nonce_and_a_share_have_their_length(field: str, n_bytes: int) -> None:
    hello = msgspec.structs.replace(TcpHello("there", 1), **{field: bytes(n_bytes)})
    frame = tcp_frames.encode_hello(hello)
    with pytest.raises(TcpFrameError, match=f"a {field} of {n_bytes} bytes"):
        tcp_frames.decode_hello(frame[tcp_frames.HELLO_HEADER_BYTES :])


@given(st.sampled_from(AccessStatus), st.integers(0, 2**64 - 1))
def test_each_status_with_any_number_has_a_text(status: AccessStatus, detail: int) -> None:
    local, remote = Region("here", 1, bytes(16), 10), Region("there", 1, bytes(16), 10)
    batch = as_single_batch("read", [Piece(local, 0, remote, 0, 10)], "tcp", 10)
    assert batch is not None
    if status is not AccessStatus.OK:
        assert refusal_outcome(batch, batch.slices[0], status, detail).reason.isprintable()


# Addresses.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.5", ("10.0.0.5", 9)),
        ("node-3:7100", ("node-3", 7100)),
        ("::1", ("::1", 9)),
        ("[::1]", ("::1", 9)),
        ("[fd00::5]:7100", ("fd00::5", 7100)),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, expected: tuple[str, int]) -> None:
    assert addresses.split_address(text, 9) == expected
    assert addresses.split_address(addresses.join_address(*expected), 1) == expected


@pytest.mark.parametrize("text", ["", ":5", "[::1", "host:port", "host:0", "host:70000", "[::1]5"])
def test_what_is_no_address_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        addresses.split_address(text, 9)


def test_a_wrong_advertised_address_is_named_with_its_origin(make_world: Any) -> None:
    world = make_world("tcp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead_port = taken.getsockname()[1]
    there = world.open("there", advertise=f"127.0.0.1:{dead_port}")
    here = world.open("here")
    local, remote = here.allocate(10), there.allocate(10)
    with pytest.raises(Lost) as lost:
        here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    assert f"segment there at 127.0.0.1:{dead_port}" in str(lost.value)
    assert f"set by advertise='127.0.0.1:{dead_port}', bound to 127.0.0.1" in str(lost.value)


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_name_that_no_host_can_have_is_a_failed_connection(host: str) -> None:
    until = time.monotonic() + 60
    with pytest.raises(ConnectionError, match="no host name"):
        connect_any(host, 1, until, StopSignal(until))


def test_a_connection_that_is_dialled_too_late_says_so() -> None:
    until = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no time is left to connect to '127\.0\.0\.1'"):
        connect_any("127.0.0.1", 1, until, StopSignal(until + 60))


def test_an_address_that_swallows_everything_costs_no_more_than_the_deadline(
    make_world: Any,
) -> None:
    """It accepts and says nothing, as a wrong port on a live host may."""
    world = make_world("tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = world.open("there", advertise=f"127.0.0.1:{silent.getsockname()[1]}")
        here = world.open("here")
        local, remote = here.allocate(10), there.allocate(10)
        transfer = here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)], 0.3)
        with pytest.raises(TransferError, match="set by advertise="):
            transfer.result(PATIENCE_S)


def test_another_segment_at_the_address_is_noticed(make_world: Any) -> None:
    world = make_world("tcp")
    here, there, other = world.open("here"), world.open("there"), world.open("other")
    local, remote = here.allocate(10), there.allocate(10)
    moved = msgspec.structs.replace(
        there.descriptor, endpoints={"tcp": other.descriptor.endpoints["tcp"]}
    )
    world.metadata.put(records.PREFIX + "there", records.encode(moved))
    with pytest.raises(Lost, match="this is segment other"):
        here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)


def test_a_peer_that_came_back_elsewhere_is_found(make_world: Any) -> None:
    """The same start of a segment behind another address: looked up again, not given up."""
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(10), there.allocate(10)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = Endpoint(f"127.0.0.1:{taken.getsockname()[1]}")
    wrong = msgspec.structs.replace(there.descriptor, endpoints={"tcp": dead})
    world.metadata.put(records.PREFIX + "there", records.encode(wrong))
    piece = [Piece(local.region, 0, remote.region, 0, 10)]
    with pytest.raises(Lost):
        here.submit("write", piece).result(PATIENCE_S)
    world.metadata.put(records.PREFIX + "there", records.encode(there.descriptor))
    assert here.submit("write", piece).result(PATIENCE_S).n_bytes == 10


def test_bound_to_everything_it_advertises_something_that_can_be_dialled() -> None:
    guessed = addresses.advertised_address("127.0.0.1", 5, None)
    assert guessed == Endpoint("127.0.0.1:5", "the address that it is bound to")
    given_one = addresses.advertised_address("0.0.0.0", 5, "node-7")
    assert given_one.address == "node-7:5"
    try:
        outward = addresses.advertised_address("0.0.0.0", 5, None)
    except ValueError as error:
        assert "advertise=" in str(error)
    else:
        assert not outward.address.startswith("0.0.0.0")
        assert "guessed" in outward.origin


# Connections.


def test_bytes_that_were_taken_do_not_come_again_after_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ahead = ReadAhead(ours)
        theirs.sendall(b"first")
        assert ahead.wait() and bytes(ahead.take(5)) == b"first"
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                ahead.wait()
        theirs.sendall(b"second")
        assert ahead.wait() and bytes(ahead.take(6)) == b"second"


def test_connections_are_kept_used_again_and_released(
    make_world: Any, eventually: Eventually
) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(2_000_000), there.allocate(2_000_000)
    piece = Piece(local.region, 0, remote.region, 0, 2_000_000)
    for _ in range(30):
        here.submit("write", [piece]).result(PATIENCE_S)
    assert 1 <= here.stats().n_connections <= 2
    here.release_peer("there")
    assert here.stats().n_connections == 0
    eventually(lambda: there.stats().n_connections == 0)
    here.submit("write", [piece]).result(PATIENCE_S)


def test_idle_connections_are_bounded_over_all_peers(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here", settings=TransferSettings(max_idle_connections=3))
    local = here.allocate(10)
    for i in range(6):
        remote = world.open(f"there-{i}").allocate(10)
        here.submit("read", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    assert here.stats().n_connections == 3


def test_all_connections_to_a_peer_that_died_while_idle_cost_one_try(make_world: Any) -> None:
    world = make_world("tcp")
    settings = TransferSettings(batch_bytes=50_000, lanes=4, tries_per_path=2)
    here = world.open("here", settings=settings)
    first = world.open("there", generation=1)
    port = int(first.descriptor.endpoints["tcp"].address.rpartition(":")[2])
    local, remote = here.allocate(MANY), first.allocate(MANY)
    while here.stats().n_connections < 4:
        here.submit("read", [Piece(local.region, 0, remote.region, 0, MANY)]).result(PATIENCE_S)
    first.close()
    second = world.open("there", generation=1, port=port)
    target = second.allocate(10)
    report = here.submit("read", [Piece(local.region, 0, target.region, 0, 10)]).result(PATIENCE_S)
    assert report.retries == 1


def test_bytes_damaged_on_the_way_are_sent_again(make_world: Any) -> None:
    world = make_world("tcp")
    faults = FaultInjection("tcp", FaultPlan(seed=3, corrupt_rate=0.3))
    here = world.open("here", backends=(faults,), settings=TransferSettings(tries_per_path=30))
    there = world.open("there")
    local, remote = here.allocate(1_000_000), there.allocate(1_000_000)
    local.view[:] = random.Random(17).randbytes(1_000_000)
    pieces = [Piece(local.region, i, remote.region, i, 9_999) for i in range(0, 990_000, 10_000)]
    report = here.submit("write", pieces).result(PATIENCE_S)
    assert report.retries > 0
    assert all(
        remote.view[i : i + 9_999] == local.view[i : i + 9_999] for i in range(0, 990_000, 10_000)
    )
    sent = bytes(local.view)
    local.view[:] = bytes(1_000_000)
    report = here.submit("read", pieces).result(PATIENCE_S)
    assert report.retries > 0
    assert all(local.view[i : i + 9_999] == sent[i : i + 9_999] for i in range(0, 990_000, 10_000))


def test_bytes_damaged_every_time_are_reported_and_not_done(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here", backends=(FaultInjection("tcp", FaultPlan(corrupt_rate=1)),))
    there = world.open("there")
    local, remote = here.allocate(1000), there.allocate(1000)
    for op in ("write", "read"):
        with pytest.raises(Corrupted, match="checksum"):
            here.submit(op, [Piece(local.region, 0, remote.region, 0, 1000)]).result(PATIENCE_S)


def test_without_checksums_bytes_go_as_well(make_world: Any) -> None:
    world = make_world("tcp")
    settings = TransferSettings(checksums=False)
    here, there = world.open("here", settings=settings), world.open("there", settings=settings)
    local, remote = here.allocate(500_000), there.allocate(500_000)
    local.view[:] = random.Random(18).randbytes(500_000)
    here.submit("write", [Piece(local.region, 0, remote.region, 0, 500_000)]).result(PATIENCE_S)
    assert remote.view == local.view
    local.view[:] = bytes(500_000)
    here.submit("read", [Piece(local.region, 0, remote.region, 0, 500_000)]).result(PATIENCE_S)
    assert remote.view == local.view


@pytest.mark.parametrize("native", [True, False], ids=["native", "pure"])
@pytest.mark.parametrize("checksums", [True, False])
def test_bytes_damaged_on_the_wire_are_read_again_unless_the_caller_verifies_them(
    make_world: Any, checksums: bool, native: bool
) -> None:
    world = make_world("tcp")
    with damaging_relay() as relay:
        there = world.open("there")
        relay.target = addresses.split_address(there.descriptor.endpoints["tcp"].address, 0)
        through = {"tcp": Endpoint(f"127.0.0.1:{relay.port}")}
        moved = msgspec.structs.replace(there.descriptor, endpoints=through)
        world.metadata.put(records.PREFIX + "there", records.encode(moved))
        here = world.open("here", settings=TransferSettings(native=native))
        local, remote = here.allocate(100_000), there.allocate(100_000)
        remote.view[:] = random.Random(19).randbytes(100_000)
        piece = Piece(local.region, 0, remote.region, 0, 100_000)
        relay.damage_next(bytes(remote.view[70_000:70_032]))
        report = here.submit("read", [piece], checksums=checksums).result(PATIENCE_S)
        assert relay.n_damaged == 1
        wrong = [i for i in range(100_000) if local.view[i] != remote.view[i]]
        assert (report.retries, wrong) == ((1, []) if checksums else (0, [70_000]))
