"""TCP: hostile bytes, addresses, connections."""

import contextlib
import random
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.damaging_relay import damaging_relay
from halfmoon_transfer import Lost, Memory, Piece, TransferEngine, TransferError, TransferSettings
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.socket_io import SocketClosed, receive
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import SliceReply, SliceRequest, TcpHello, TcpRequest
from halfmoon_transfer.metadata.descriptor import Endpoint
from tests.transfer.conftest import PATIENCE_S, Ends, eventually, found_at, read_to_the_end


class Owner:
    """An engine that is talked to with bare sockets."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.memory: Memory = engine.allocate(10_000)
        self._address = addresses.split_address(engine.descriptor.endpoints["tcp"].address, 0)

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

    def write_request(
        self, offset: int, data: bytes, *, key: bytes = b"", checksum: int | None = None
    ) -> bytes:
        asked = SliceRequest(key or self.memory.region.key, offset, len(data), checksum or 0)
        checked, generation = checksum is not None, self.engine.generation
        request = TcpRequest(tcp_frames.WRITE, 1, generation, checked, (asked,))
        return tcp_frames.encode_request(request) + data

    def ask(self, request: bytes) -> SliceReply:
        """What a well-behaved peer is answered."""
        with self.dial() as sock:
            sock.sendall(request)
            header = receive(sock, tcp_frames.HEADER_BYTES)
            n_rest, _ = tcp_frames.reply_rest_bytes(header)
            (answer,) = tcp_frames.decode_reply(header, receive(sock, n_rest)).slices
            return answer

    def require_alive(self) -> None:
        assert self.ask(self.write_request(5, b"hello")).status == 0
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


fuzzing = settings(max_examples=60, deadline=None)


@fuzzing
@given(data=st.binary(max_size=300), greet=st.booleans(), magic=st.booleans())
def test_garbage_ends_one_connection_alone(
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
def test_no_request_writes_elsewhere(owner: Owner, offset: int, length: int, seed: int) -> None:
    """The region lies between two others in one buffer; only bytes in bounds change."""
    whole = bytearray(30_000)
    region = owner.engine.register(memoryview(whole)[10_000:20_000])
    data = random.Random(seed).randbytes(length)
    answer = owner.ask(owner.write_request(offset, data, key=region.key))
    expected = bytearray(30_000)
    if offset + length <= 10_000:
        assert answer.status == 0
        expected[10_000 + offset : 10_000 + offset + length] = data
    else:
        assert (answer.status, answer.detail) == (1, 10_000)
    assert whole == expected
    owner.engine.unregister(region)


@fuzzing
@example(cuts=list(range(200)), until=200)  # one byte at a time
@given(cuts=st.lists(st.integers(0, 200), max_size=10), until=st.integers(0, 200))
def test_a_request_may_be_cut_and_stop_anywhere(owner: Owner, cuts: list[int], until: int) -> None:
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


@pytest.mark.parametrize(
    ("greet", "sent", "told"),
    [
        (True, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n    ", b"where b'HMTQ' begins a frame"),
        (False, b"HMTH\x01\x00\xff\xff", b"a hello of 65535 bytes, at most 4096"),
    ],
)
def test_a_peer_is_told_what_was_wrong_with_its_frame(
    owner: Owner, greet: bool, sent: bytes, told: bytes
) -> None:
    with owner.dial(greet=greet) as sock:
        sock.sendall(sent)
        assert told in read_to_the_end(sock)
    eventually(lambda: owner.engine.stats().n_malformed == 1)


def test_connections_are_bounded_and_the_surplus_is_told(owner: Owner) -> None:
    open_ones = [owner.dial() for _ in range(20)]
    with owner.dial(greet=False) as surplus:
        assert b"20 connections are open, the limit" in read_to_the_end(surplus)
    for sock in open_ones:
        sock.close()
    eventually(lambda: owner.engine.stats().n_connections == 0)
    owner.require_alive()


def test_a_write_with_another_checksum_is_not_acknowledged(owner: Owner) -> None:
    assert owner.ask(owner.write_request(0, b"data", checksum=12345)).status == 6


def test_taking_a_region_back_cuts_off_a_peer_that_stalls_in_it(owner: Owner) -> None:
    with owner.dial() as sock:
        sock.sendall(owner.write_request(0, b"x" * 1000)[:-1])
        eventually(lambda: owner.memory.view[998] == ord("x"))
        owner.engine.unregister(owner.memory.region)
        with pytest.raises((SocketClosed, ConnectionResetError)):
            receive(sock, 1)


# Addresses.


def test_addresses_are_read_as_people_write_them_and_others_are_none() -> None:
    for text, expected in (
        ("10.0.0.5", ("10.0.0.5", 9)),
        ("node-3:7100", ("node-3", 7100)),
        ("::1", ("::1", 9)),
        ("[::1]", ("::1", 9)),
        ("[fd00::5]:7100", ("fd00::5", 7100)),
    ):
        assert addresses.split_address(text, 9) == expected
        assert addresses.split_address(addresses.join_address(*expected), 1) == expected
    for text in ("", ":5", "[::1", "host:port", "host:0", "host:70000", "[::1]5"):
        with pytest.raises(ValueError, match="is not an address"):
            addresses.split_address(text, 9)


def test_an_ipv6_address_serves_as_well(make_world: Any) -> None:
    try:
        ends = Ends(make_world("tcp"), 1000, there={"bind": "::1"})
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    ends.local.view[:] = b"6" * 1000
    ends.move()
    assert ends.remote.view == ends.local.view
    assert ends.there.descriptor.endpoints["tcp"].address.startswith("[::1]:")


def test_a_wrong_advertised_address_is_named_with_its_origin(make_world: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
    ends = Ends(make_world("tcp"), 10, there={"advertise": dead})
    with pytest.raises(Lost) as lost:
        ends.move()
    assert f"segment there at {dead}" in str(lost.value)
    assert f"set by advertise='{dead}', bound to 127.0.0.1" in str(lost.value)


def test_an_address_that_swallows_all_costs_no_more_than_the_deadline(make_world: Any) -> None:
    """It accepts and says nothing, as a wrong port on a live host may."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        advertised = {"advertise": f"127.0.0.1:{silent.getsockname()[1]}"}
        ends = Ends(make_world("tcp"), 10, there=advertised)
        with pytest.raises(TransferError, match="set by advertise="):
            ends.move(deadline_s=1.0)


def test_another_segment_at_the_address_is_noticed(make_world: Any) -> None:
    world = make_world("tcp")
    ends = Ends(world, 10)
    found_at(world, ends.there, world.open("other").descriptor.endpoints["tcp"])
    with pytest.raises(Lost, match="this is segment other"):
        ends.move()


def test_a_peer_that_came_back_elsewhere_is_found(make_world: Any) -> None:
    """The same start of a segment behind another address: looked up again, not given up."""
    world = make_world("tcp")
    ends = Ends(world, 10)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found_at(world, ends.there, Endpoint(f"127.0.0.1:{taken.getsockname()[1]}"))
    with pytest.raises(Lost):
        ends.move()
    found_at(world, ends.there, ends.there.descriptor.endpoints["tcp"])
    assert ends.move().n_bytes == 10


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


def test_connections_are_kept_used_again_and_released(make_world: Any) -> None:
    ends = Ends(make_world("tcp"), 2_000_000)
    for _ in range(30):
        ends.move()
    assert 1 <= ends.here.stats().n_connections <= 2
    ends.here.release_peer("there")
    assert ends.here.stats().n_connections == 0
    eventually(lambda: ends.there.stats().n_connections == 0)
    ends.move()


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
    ends = Ends(world, 5_000_000, here={"settings": settings}, there={"generation": 1})
    port = int(ends.there.descriptor.endpoints["tcp"].address.rpartition(":")[2])
    while ends.here.stats().n_connections < 4:
        ends.move("read")
    ends.there.close()
    # The same address, name and generation: only the idle connections are stale.
    target = world.open("there", generation=1, port=port).allocate(10)
    report = ends.move("read", Piece(ends.local.region, 0, target.region, 0, 10))
    assert report.retries == 1


def test_without_checksums_bytes_go_as_well(make_world: Any) -> None:
    ends = Ends(make_world("tcp"), 500_000, settings=TransferSettings(checksums=False))
    ends.local.view[:] = random.Random(18).randbytes(500_000)
    ends.move()
    assert ends.remote.view == ends.local.view
    ends.local.view[:] = bytes(500_000)
    ends.move("read")
    assert ends.remote.view == ends.local.view


@pytest.mark.parametrize("native", [True, False], ids=["native", "pure"])
@pytest.mark.parametrize("checksums", [True, False])
def test_bytes_damaged_on_the_wire_are_read_again_unless_the_caller_verifies_them(
    make_world: Any, checksums: bool, native: bool
) -> None:
    world = make_world("tcp")
    with damaging_relay() as relay:
        ends = Ends(world, 100_000, here={"settings": TransferSettings(native=native)})
        relay.target = addresses.split_address(ends.there.descriptor.endpoints["tcp"].address, 0)
        found_at(world, ends.there, Endpoint(f"127.0.0.1:{relay.port}"))
        ends.remote.view[:] = random.Random(19).randbytes(100_000)
        relay.damage_next(bytes(ends.remote.view[70_000:70_032]))
        report = ends.move("read", checksums=checksums)
        assert relay.n_damaged == 1
        wrong = [i for i in range(100_000) if ends.local.view[i] != ends.remote.view[i]]
        assert (report.retries, wrong) == ((1, []) if checksums else (0, [70_000]))
