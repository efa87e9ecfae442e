"""TCP: hostile bytes, addresses, connections."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.damaging_relay import damaging_relay
from halfmoon_transfer import (
    Corrupted,
    Lost,
    Memory,
    Piece,
    Rejected,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.socket_io import SocketClosed, receive
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import SliceRequest, TcpHello, TcpRequest
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint

World = Any
Eventually = Callable[..., None]
PATIENCE_S = 60.0
MANY = 5_000_000


class Owner:
    """An engine that is talked to with bare sockets."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.memory: Memory = engine.allocate(10_000)
        host, port = addresses.split_address(engine.descriptor.endpoints["tcp"].address, 0)
        self._address = (host, port)

    def dial(self, *, greet: bool = True) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=PATIENCE_S)
        if greet:
            sock.sendall(
                tcp_frames.encode_hello(TcpHello(self.engine.name, self.engine.generation))
            )
            header = receive(sock, tcp_frames.HELLO_HEADER_BYTES)
            hello = tcp_frames.decode_hello(receive(sock, tcp_frames.hello_bytes(header)))
            assert hello.refused == ""
        return sock

    def write_request(self, offset: int, data: bytes, *, checksum: int = 0) -> bytes:
        asked = SliceRequest(self.memory.region.key, offset, len(data), checksum)
        generation = self.engine.generation
        return (
            tcp_frames.encode_request(TcpRequest(tcp_frames.WRITE, 1, generation, False, (asked,)))
            + data
        )

    def require_alive(self) -> None:
        """It still serves a well-behaved peer."""
        with self.dial() as sock:
            sock.sendall(self.write_request(5, b"hello"))
            header = receive(sock, tcp_frames.HEADER_BYTES)
            n_rest, _ = tcp_frames.reply_rest_bytes(header)
            (answer,) = tcp_frames.decode_reply(header, receive(sock, n_rest)).slices
            assert answer.status == 0
        assert bytes(self.memory.view[5:10]) == b"hello"
        self.memory.view[5:10] = bytes(5)


@pytest.fixture
def owner() -> Iterator[Owner]:
    settings = TransferSettings(max_connections=20, stall_timeout_s=PATIENCE_S)
    with TransferEngine.open(
        "owner", metadata=MemoryStore(), backends=("tcp",), settings=settings
    ) as engine:
        made = Owner(engine)
        yield made
        engine.check()
        del made.memory


def read_to_the_end(sock: socket.socket) -> bytes:
    got = bytearray()
    try:
        while data := sock.recv(65536):
            got += data
    except ConnectionResetError:
        pass  # it hung up on bytes that it had not read
    return bytes(got)


fuzzing = settings(max_examples=60, deadline=None)


@fuzzing
@given(data=st.binary(max_size=300), greet=st.booleans(), magic=st.booleans())
def test_garbage_ends_the_connection_and_harms_nothing(
    owner: Owner, data: bytes, greet: bool, magic: bool
) -> None:
    with owner.dial(greet=greet) as sock:
        begin = (b"HMTQ\x01\x02" if greet else b"HMTH\x01\x00") if magic else b""
        with contextlib.suppress(OSError):  # it may have hung up already
            sock.sendall(begin + data)
            sock.shutdown(socket.SHUT_WR)
        read_to_the_end(sock)
    assert bytes(owner.memory.view) == bytes(10_000)
    owner.require_alive()


@fuzzing
@given(
    offset=st.one_of(st.integers(0, 11_000), st.integers(0, 2**64 - 1)),
    length=st.integers(1, 3000),
    seed=st.integers(),
)
def test_no_request_writes_outside_the_region(
    owner: Owner, offset: int, length: int, seed: int
) -> None:
    """The region lies between two others in one buffer; only bytes in bounds change."""
    whole = bytearray(30_000)
    region = owner.engine.register(memoryview(whole)[10_000:20_000])
    data = random.Random(seed).randbytes(length)
    asked = SliceRequest(region.key, offset, length)
    with owner.dial() as sock:
        request = TcpRequest(tcp_frames.WRITE, 1, owner.engine.generation, False, (asked,))
        sock.sendall(tcp_frames.encode_request(request) + data)
        header = receive(sock, tcp_frames.HEADER_BYTES)
        n_rest, _ = tcp_frames.reply_rest_bytes(header)
        (answer,) = tcp_frames.decode_reply(header, receive(sock, n_rest)).slices
    expected = bytearray(30_000)
    if offset + length <= 10_000:
        assert answer.status == 0
        expected[10_000 + offset : 10_000 + offset + length] = data
    else:
        assert (answer.status, answer.detail) == (1, 10_000)
    assert whole == expected
    owner.engine.unregister(region)


@fuzzing
@given(cuts=st.lists(st.integers(0, 200), max_size=10), until=st.integers(0, 200))
def test_a_request_may_come_in_any_cuts_and_stop_anywhere(
    owner: Owner, cuts: list[int], until: int
) -> None:
    frame = owner.write_request(100, b"x" * 100)
    frame = frame[: len(frame) - 200 + until] if until < 200 else frame
    with owner.dial() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        edges = [0, *sorted(min(cut, len(frame)) for cut in cuts), len(frame)]
        for start, end in pairwise(edges):
            sock.sendall(frame[start:end])
        sock.shutdown(socket.SHUT_WR)
        got = read_to_the_end(sock)
    assert bytes(owner.memory.view[:100]) == bytes(100)
    assert bytes(owner.memory.view[200:]) == bytes(9800)
    if until == 200:
        assert bytes(owner.memory.view[100:200]) == b"x" * 100
        assert got
    owner.memory.view[:] = bytes(10_000)


def test_a_request_may_come_one_byte_at_a_time(owner: Owner) -> None:
    with owner.dial() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in owner.write_request(7, b"slowly"):
            sock.send(bytes([byte]))
        receive(sock, tcp_frames.HEADER_BYTES)
    assert bytes(owner.memory.view[7:13]) == b"slowly"


def test_a_peer_is_told_what_was_wrong_with_its_frame(owner: Owner, eventually: Eventually) -> None:
    with owner.dial() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n    ")
        assert b"where b'HMTQ' begins a frame" in read_to_the_end(sock)
    eventually(lambda: owner.engine.stats().n_malformed == 1)


def test_an_oversized_hello_is_not_waited_for(owner: Owner) -> None:
    with owner.dial(greet=False) as sock:
        sock.sendall(b"HMTH\x01\x00\xff\xff")
        assert b"a hello of 65535 bytes, at most 4096" in read_to_the_end(sock)


def test_connections_are_bounded_and_the_surplus_is_told(
    owner: Owner, eventually: Eventually
) -> None:
    open_ones = [owner.dial() for _ in range(20)]
    with owner.dial(greet=False) as surplus:
        assert b"20 connections are open, the limit" in read_to_the_end(surplus)
    for sock in open_ones:
        sock.close()
    eventually(lambda: owner.engine.stats().n_connections == 0)
    owner.require_alive()


def test_a_write_with_another_checksum_is_not_acknowledged(owner: Owner) -> None:
    asked = SliceRequest(owner.memory.region.key, 0, 4, 12345)
    with owner.dial() as sock:
        request = TcpRequest(tcp_frames.WRITE, 1, owner.engine.generation, True, (asked,))
        sock.sendall(tcp_frames.encode_request(request) + b"data")
        header = receive(sock, tcp_frames.HEADER_BYTES)
        n_rest, _ = tcp_frames.reply_rest_bytes(header)
        (answer,) = tcp_frames.decode_reply(header, receive(sock, n_rest)).slices
    assert answer.status == 6


def test_taking_a_region_back_cuts_off_a_peer_that_stalls_in_it(
    owner: Owner, eventually: Eventually
) -> None:
    with owner.dial() as sock:
        sock.sendall(owner.write_request(0, b"x" * 1000)[:-1])
        eventually(lambda: owner.memory.view[998] == ord("x"))
        owner.engine.unregister(owner.memory.region)
        with pytest.raises((SocketClosed, ConnectionResetError)):
            receive(sock, 1)


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


def test_an_ipv6_address_serves_as_well(make_world: Any) -> None:
    world = make_world("tcp")
    try:
        there = world.open("there", bind="::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    here = world.open("here")
    local, remote = here.allocate(1000), there.allocate(1000)
    local.view[:] = b"6" * 1000
    here.submit("write", [Piece(local.region, 0, remote.region, 0, 1000)]).result(PATIENCE_S)
    assert remote.view == local.view
    assert there.descriptor.endpoints["tcp"].address.startswith("[::1]:")


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


def test_a_connection_that_died_while_idle_is_replaced_unnoticed(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here")
    first = world.open("there", generation=1)
    port = int(first.descriptor.endpoints["tcp"].address.rpartition(":")[2])
    local, remote = here.allocate(10), first.allocate(10)
    here.submit("read", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    first.close()
    # The same address, name and generation: only the idle connection is stale.
    second = world.open("there", generation=1, port=port)
    target = second.allocate(10)
    report = here.submit("read", [Piece(local.region, 0, target.region, 0, 10)]).result(PATIENCE_S)
    assert report.n_bytes == 10


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


def test_no_socket_or_thread_is_left_by_a_closed_engine() -> None:
    before = set(threading.enumerate())
    store = MemoryStore()
    with (
        TransferEngine.open("a", metadata=store, backends=("shm", "tcp")) as here,
        TransferEngine.open("b", metadata=store, backends=("shm", "tcp")) as there,
    ):
        source, target = here.allocate(1000), there.allocate(1000)
        plain = there.register(bytearray(1000))
        for region in (target.region, plain):
            here.submit("write", [Piece(source.region, 0, region, 0, 1000)]).result(PATIENCE_S)
        del source, target
    assert set(threading.enumerate()) <= before  # one of an earlier test may have ended meanwhile


def test_a_region_of_somebody_else_is_not_taken_back(make_world: Any) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    with pytest.raises(Rejected):
        here.unregister(there.allocate(10).region)
