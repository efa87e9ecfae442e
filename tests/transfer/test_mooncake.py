"""Mooncake's protocol without a Mooncake: bytes, records, hostile peers, and our own engines."""

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_metadata.store_interface import MetadataError, MetadataUnreachable
from halfmoon_metadata.store_registry import open_store
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.processes.etcd_server import EtcdServer
from halfmoon_transfer import (
    Lost,
    Memory,
    Piece,
    Rejected,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.mooncake import (
    mooncake_frames,
    mooncake_handshake,
    mooncake_records,
)
from halfmoon_transfer.backends.mooncake.batch_over_lane import foreign_key
from halfmoon_transfer.backends.mooncake.mooncake_api import Mooncake
from halfmoon_transfer.backends.mooncake.mooncake_frames import MooncakeFrameError, MooncakeRequest
from halfmoon_transfer.backends.mooncake.mooncake_handshake import HandshakeKind
from halfmoon_transfer.backends.mooncake.mooncake_records import (
    MooncakeNotification,
    RecordError,
    RpcRecord,
    SegmentRecord,
)
from halfmoon_transfer.backends.socket_io import receive
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.settings import MooncakeSettings
from tests.installed_programs import skip_without

Eventually = Callable[..., None]
PATIENCE_S = 60.0
MIB = 1024 * 1024


def move(engine: TransferEngine, op: Any, *pieces: Piece) -> Any:
    return engine.submit(op, pieces, PATIENCE_S).result(PATIENCE_S)


# Bytes.


def test_a_request_has_the_bytes_that_mooncake_sends() -> None:
    request = MooncakeRequest(write=True, address=0x7F00_1122_3344, size=4096, version=2)
    expected = bytes.fromhex("0010000000000000 44332211007f0000 81 00000000000000")
    assert mooncake_frames.encode_request(request) == expected
    assert (
        mooncake_frames.encode_request(msgspec.structs.replace(request, write=False, version=1))[16]
        == 0
    )


def test_a_status_word_carries_its_magic() -> None:
    assert mooncake_frames.encode_status(1) == bytes.fromhex("01000000") + b"VTCM"
    assert (
        mooncake_frames.decode_status(mooncake_frames.encode_status(0)) == mooncake_frames.APPLIED
    )
    with pytest.raises(MooncakeFrameError, match="is it version 1"):
        mooncake_frames.decode_status(b"raw data")


# Records.

THEIRS = b"""{"name":"nodeA","protocol":"tcp","tcp_data_port":15876,"tcp_data_host":"127.0.0.1",
"tcp_proto_version":2,"timestamp":"2026-11-20 17:22:37.547186","rdma_server_name":"",
"buffers":[{"name":"nodeA","addr":139969831747600,"length":1048576}],"news":[1]}\n"""


def test_a_record_of_theirs_is_read_and_one_of_an_old_release_is_version_1() -> None:
    record = mooncake_records.decode_segment(THEIRS)
    assert (record.tcp_data_host, record.tcp_data_port) == ("127.0.0.1", 15876)
    assert (record.tcp_proto_version, record.halfmoon) == (2, None)
    assert [(each.addr, each.length) for each in record.buffers] == [(139969831747600, 1048576)]
    record = mooncake_records.decode_segment(
        b'{"name":"a","protocol":"tcp","tcp_data_port":1,"buffers":[]}'
    )
    assert (record.tcp_proto_version, record.tcp_data_host) == (1, "")


def test_our_record_has_every_field_that_theirs_has() -> None:
    ours = msgspec.json.decode(
        mooncake_records.encode(
            SegmentRecord("us", "tcp", 1, "host", 2, "2026-11-20 17:22:37.547186")
        )
    )
    theirs = msgspec.json.decode(THEIRS)
    assert theirs.keys() - {"news"} <= ours.keys()
    assert {type(ours[each]) for each in ("tcp_data_port", "tcp_proto_version")} == {int}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"\xff{}",
        b'{"name":"a","protocol":"rdma","tcp_data_port":1}',
        b'{"name":"a","protocol":"tcp"}',
        b'{"name":"a","protocol":"tcp","tcp_data_port":65536}',
        b'{"name":"a","protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":-1,"length":1}]}',
        b'{"name":"a","protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":1,"length":0}]}',
        b'{"name":"a","protocol":"tcp","tcp_data_port":1,'
        b'"buffers":[{"addr":18446744073709551615,"length":2}]}',
    ],
)
def test_a_record_that_makes_no_sense_is_a_typed_error(value: bytes) -> None:
    with pytest.raises(RecordError):
        mooncake_records.decode_segment(value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_typed_error(value: bytes) -> None:
    for decode in (
        mooncake_records.decode_segment,
        mooncake_records.decode_rpc,
        mooncake_records.decode_notification,
    ):
        with contextlib.suppress(RecordError):
            decode(value)


# Handshake framing.


@pytest.mark.parametrize("length", [0, mooncake_handshake.MAX_BYTES + 1, 2**63, 2**64 - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(MooncakeFrameError, match="1 to 1048576"):
        mooncake_handshake.decode_head(struct.pack("<QB", length, 1))
    with pytest.raises(ValueError, match="at most"):
        mooncake_handshake.encode(HandshakeKind.NOTIFY, bytes(mooncake_handshake.MAX_BYTES))


# Hostile peers.


class Owner:
    """An engine that is talked to with bare sockets."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.mooncake = Mooncake(engine)
        self.memory: Memory = engine.allocate(10_000)
        self.address = self.mooncake.address(self.memory.region)

    def dial(self, endpoint: str = "mooncake-v2") -> socket.socket:
        address = addresses.split_address(self.engine.descriptor.endpoints[endpoint].address, 0)
        return socket.create_connection(address, timeout=PATIENCE_S)

    def write(self, offset: int, data: bytes, version: Any = 2) -> bytes:
        return (
            mooncake_frames.encode_request(
                MooncakeRequest(True, self.address + offset, len(data), version)
            )
            + data
        )

    def read(self, offset: int, size: int, version: Any = 2) -> bytes:
        return mooncake_frames.encode_request(
            MooncakeRequest(False, self.address + offset, size, version)
        )

    def require_alive(self) -> None:
        """It still serves a well-behaved peer, and nothing was written anywhere."""
        assert bytes(self.memory.view) == bytes(10_000)
        with self.dial() as sock:
            sock.sendall(self.write(5, b"hello") + self.read(4, 7))
            assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.APPLIED
            assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.APPLIED
            assert bytes(receive(sock, 7)) == b"\0hello\0"
        self.memory.view[5:10] = bytes(5)
        self.mooncake.probe(self.mooncake.name)


@pytest.fixture
def owner() -> Iterator[Owner]:
    settings = TransferSettings(max_connections=20, stall_timeout_s=PATIENCE_S)
    with TransferEngine.open(
        "owner", metadata=MemoryStore(), backends=("mooncake",), settings=settings
    ) as engine:
        made = Owner(engine)
        yield made
        engine.check()
        del made.memory


def rest(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    came = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            came += data
    return bytes(came)


@pytest.mark.parametrize("endpoint", ["mooncake-v2", "mooncake"])
@given(data=st.binary(max_size=100))
@settings(max_examples=30, deadline=None)
def test_garbage_on_either_port_writes_nothing_and_does_no_harm(
    owner: Owner, endpoint: str, data: bytes
) -> None:
    with owner.dial(endpoint) as sock:
        with contextlib.suppress(OSError):  # it may have hung up already
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        rest(sock)
    owner.require_alive()


@pytest.mark.parametrize("endpoint", ["mooncake-v2", "mooncake"])
def test_nonsense_ends_the_connection_and_is_counted(
    owner: Owner, endpoint: str, eventually: Eventually
) -> None:
    with owner.dial(endpoint) as sock:
        sock.sendall(b"\xff" * 24)
        assert rest(sock) == b""
    eventually(lambda: owner.engine.stats().n_malformed == 1)
    owner.require_alive()


@given(n=st.integers(0, 60))
@settings(max_examples=20, deadline=None)
def test_a_write_that_is_cut_off_frees_the_connection(owner: Owner, n: int) -> None:
    with owner.dial() as sock:
        sock.sendall(owner.write(5000, bytes(60))[:n])
    owner.require_alive()


def test_bytes_may_come_one_at_a_time(owner: Owner) -> None:
    with owner.dial() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in owner.write(100, b"slow"):
            sock.send(bytes([byte]))
        assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.APPLIED
    assert bytes(owner.memory.view[100:104]) == b"slow"


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 10), (9_995, 6), (0, 10_001), (10_000, 1), (-(2**40), 5), (0, 0)]
)
@pytest.mark.parametrize("write", [True, False])
def test_what_lies_in_no_region_is_refused(
    owner: Owner, offset: int, size: int, write: bool
) -> None:
    ask = owner.write(offset, b"x" * size) if write else owner.read(offset, size)
    with owner.dial() as sock:
        sock.sendall(ask)
        assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.REFUSED
        assert rest(sock) == b""
    owner.require_alive()


def test_an_address_beyond_the_last_is_refused(owner: Owner) -> None:
    with owner.dial() as sock:
        sock.sendall(mooncake_frames.encode_request(MooncakeRequest(False, 2**64 - 1, 2**64 - 1)))
        assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.REFUSED
    owner.require_alive()


def test_a_large_refused_write_is_told_so(owner: Owner) -> None:
    with owner.dial() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(owner.write(20_000, bytes(8 * MIB)))
        assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.REFUSED
    owner.require_alive()


def test_version_1_is_served_and_refused_without_a_word(owner: Owner) -> None:
    with owner.dial() as sock:
        sock.sendall(owner.write(10, b"old", 1) + owner.read(9, 5, 1))
        assert bytes(receive(sock, 5)) == b"\0old\0"
        sock.sendall(owner.write(9_999, b"ab", 1))
        assert rest(sock) == b""
    owner.memory.view[10:13] = bytes(3)
    owner.require_alive()


def test_two_neighbouring_regions_are_not_one(owner: Owner) -> None:
    memory = bytearray(2000)
    left = owner.engine.register(memoryview(memory)[:1000])
    owner.engine.register(memoryview(memory)[1000:])
    address = owner.mooncake.address(left)
    with owner.dial() as sock:
        sock.sendall(
            mooncake_frames.encode_request(MooncakeRequest(True, address + 999, 2)) + b"ab"
        )
        assert mooncake_frames.decode_status(receive(sock, 8)) == mooncake_frames.REFUSED
    assert memory == bytes(2000)


def test_a_peer_that_stalls_in_a_region_is_cut_off_when_it_is_taken_back(
    owner: Owner, eventually: Eventually
) -> None:
    other = owner.engine.allocate(1000)
    with owner.dial() as sock:
        address = owner.mooncake.address(other.region)
        sock.sendall(
            mooncake_frames.encode_request(MooncakeRequest(True, address, 1000)) + b"x" * 999
        )
        eventually(lambda: other.view[998] == ord("x"))
        owner.engine.unregister(other.region)
        assert rest(sock) == b""
    assert bytes(other.view[999:]) == b"\0"
    owner.require_alive()


# Epochs: our own engines know when an address means nothing any more.


def test_a_bound_connection_ends_once_any_region_was_taken_back(owner: Owner) -> None:
    other = owner.engine.allocate(100)
    mark = handshake_record(owner).halfmoon
    assert mark is not None
    greeting = mooncake_frames.encode_request(MooncakeRequest(False, int(mark.epoch, 16), 0))
    with owner.dial() as bound, owner.dial() as plain:
        bound.sendall(greeting + owner.read(0, 1))
        assert bytes(receive(bound, 17)) == 2 * mooncake_frames.encode_status(0) + b"\0"
        owner.engine.unregister(other.region)
        for sock, expected in ((bound, mooncake_frames.REFUSED), (plain, mooncake_frames.APPLIED)):
            sock.sendall(owner.write(0, b"\0"))
            assert mooncake_frames.decode_status(receive(sock, 8)) == expected
    with owner.dial() as late:
        late.sendall(greeting)
        assert mooncake_frames.decode_status(receive(late, 8)) == mooncake_frames.REFUSED


def handshake_record(owner: Owner) -> SegmentRecord:
    with owner.dial("mooncake") as sock:
        return mooncake_handshake.exchange_records(sock, SegmentRecord("absent", "tcp", 1))


def test_keys_are_not_in_the_record(owner: Owner) -> None:
    record = handshake_record(owner)
    (buffer,) = record.buffers
    assert (buffer.addr, buffer.length) == (owner.address, 10_000)
    assert owner.memory.region.key.hex().encode() not in mooncake_records.encode(record)


def test_memory_that_is_registered_anew_is_not_reached_by_its_old_key(make_world: Any) -> None:
    world = make_world("mooncake")
    here, there = world.open("here"), world.open("there")
    local, buffer = here.allocate(1000), bytearray(1000)
    local.view[:] = b"x" * 1000
    old = there.register(buffer)
    move(here, "read", Piece(local.region, 0, old, 0, 1000))
    there.unregister(old)
    new = there.register(buffer)
    local.view[:] = b"x" * 1000
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "write", Piece(local.region, 0, old, 0, 1000))
    assert buffer == bytes(1000)
    move(here, "write", Piece(local.region, 0, new, 0, 1000))
    assert buffer == bytes(local.view)


def test_transfers_go_on_while_other_regions_come_and_go(make_world: Any) -> None:
    world = make_world("mooncake")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(400_000), there.allocate(400_000)
    stop = threading.Event()

    def churn() -> None:
        while not stop.wait(0.005):
            there.unregister(there.allocate(10).region)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for seed in range(30):
            local.view[:] = bytes([seed]) * 400_000
            move(here, "write", Piece(local.region, 0, remote.region, 0, 400_000))
            assert remote.view == local.view
    finally:
        stop.set()
        thread.join()


# Foreign segments: absolute addresses, no keys.


@pytest.fixture
def pair(make_world: Any) -> Iterator[tuple[Owner, Owner]]:
    """Two engines that look at each other as if the other were a Mooncake."""
    world = make_world("mooncake")
    made = Owner(world.open("here")), Owner(world.open("there"))
    yield made
    for each in made:
        each.engine.check()
        del each.memory


def test_a_foreign_buffer_is_read_and_written_like_any_region(pair: tuple[Owner, Owner]) -> None:
    here, there = pair
    segment = here.mooncake.open(there.mooncake.name)
    (buffer,) = segment.buffers
    assert (buffer.address, buffer.region.length) == (there.address, 10_000)
    here.memory.view[:5] = b"hello"
    move(here.engine, "write", Piece(here.memory.region, 0, buffer.region, 70, 5))
    assert bytes(there.memory.view[70:75]) == b"hello"
    region, offset = segment.locate(there.address + 68, 7)
    move(here.engine, "read", Piece(here.memory.region, 10, region, offset, 7))
    assert bytes(here.memory.view[10:17]) == b"\0\0hello"
    with pytest.raises(ValueError, match="open it again"):
        segment.locate(there.address + 9_999, 2)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_foreign_buffer_that_is_gone_is_refused(pair: tuple[Owner, Owner], op: str) -> None:
    here, there = pair
    (buffer,) = here.mooncake.open(there.mooncake.name).buffers
    piece = Piece(here.memory.region, 0, buffer.region, 0, 100)
    move(here.engine, op, piece)
    there.engine.unregister(there.memory.region)
    with pytest.raises(Rejected, match=r"100 bytes at 0x.*mooncake:127"):
        move(here.engine, op, piece)
    forged = msgspec.structs.replace(buffer.region, key=foreign_key(2**64 - 5, 10))
    with pytest.raises(Rejected, match="no address"):
        move(here.engine, op, Piece(here.memory.region, 0, forged, 0, 100))


def test_version_1_writes_are_confirmed_by_reading_back(pair: tuple[Owner, Owner]) -> None:
    here, there = pair
    data = there.engine.descriptor.endpoints["mooncake-v2"]
    here.engine.add_peer(SegmentDescriptor("old", 1, "", {"mooncake-v1": data}))
    region = msgspec.structs.replace(
        there.memory.region,
        segment="old",
        generation=1,
        key=foreign_key(there.address, 10_000),
    )
    here.memory.view[:] = b"1" * 10_000
    move(here.engine, "write", Piece(here.memory.region, 0, region, 0, 10_000))
    assert there.memory.view == here.memory.view
    here.memory.view[:] = bytes(10_000)
    move(here.engine, "read", Piece(here.memory.region, 0, region, 0, 10_000))
    assert there.memory.view == here.memory.view
    forged = msgspec.structs.replace(region, length=10**9)
    for op in ("write", "read"):
        with pytest.raises(Lost, match="version 1 also refuses"):
            move(here.engine, op, Piece(here.memory.region, 0, forged, 9_999, 2))


def test_a_version_1_write_that_is_swallowed_is_not_reported_done() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as swallower,
        TransferEngine.open("here", metadata=MemoryStore(), backends=("mooncake",)) as here,
    ):

        def swallow() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = swallower.accept()
                    with sock:
                        receive(sock, 24 + 100)

        thread = threading.Thread(target=swallow)
        thread.start()
        address = f"127.0.0.1:{swallower.getsockname()[1]}"
        here.add_peer(SegmentDescriptor("old", 1, "", {"mooncake-v1": Endpoint(address)}))
        local = here.allocate(100)
        there = msgspec.structs.replace(local.region, segment="old", key=foreign_key(4096, 100))
        with pytest.raises(Lost):
            move(here, "write", Piece(local.region, 0, there, 0, 100))
        swallower.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_foreign_segment_that_was_started_anew_has_a_new_generation(make_world: Any) -> None:
    world = make_world("mooncake")
    here = Owner(world.open("here"))
    first = world.open("there")
    first.allocate(100)
    port = addresses.split_address(first.descriptor.endpoints["mooncake"].address, 0)[1]
    name = Mooncake(first).name
    (old,) = here.mooncake.open(name).buffers
    assert here.mooncake.open(name).buffers == (old,)
    with socket.socket() as holder:
        # Keeps the second start from getting the first one's data port.
        first.close()
        data = addresses.split_address(first.descriptor.endpoints["mooncake-v2"].address, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(data)
        tuning = TransferSettings(mooncake=MooncakeSettings(handshake_port=port))
        second = world.open("there", settings=tuning)
        second.allocate(100)
        (new,) = here.mooncake.open(name).buffers
    assert new.region.generation == old.region.generation + 1
    with pytest.raises(Rejected, match=r"generation 2 now.*generation 1"):
        move(here.engine, "read", Piece(here.memory.region, 0, old.region, 0, 10))
    move(here.engine, "read", Piece(here.memory.region, 0, new.region, 0, 10))
    here.engine.release_peer(new.region.segment)
    with pytest.raises(Lost, match="not in the metadata store"):
        move(here.engine, "read", Piece(here.memory.region, 0, new.region, 0, 10))


def test_a_segment_that_can_not_be_opened_says_why(owner: Owner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(Lost, match=f"127.0.0.1:{port}: timed out"):
            Mooncake(owner.engine, timeout_s=0.2).open(f"127.0.0.1:{port}")
    with pytest.raises(Lost, match="refused"):
        owner.mooncake.open(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match="host:port"):
        owner.mooncake.open("nodeA")
    with pytest.raises(Lost, match="no host name"):
        owner.mooncake.open("a" * 300 + ":15000")


def test_the_engine_must_have_the_backend() -> None:
    with (
        TransferEngine.open("plain", metadata=MemoryStore(), backends=("memory",)) as plain,
        pytest.raises(ValueError, match="no backend 'mooncake'; it has memory"),
    ):
        Mooncake(plain)


# Messages and signs of life.


def test_one_message_too_many_is_refused(make_world: Any) -> None:
    world = make_world("mooncake")
    tuning = TransferSettings(mooncake=MooncakeSettings(max_notifications=2))
    here, there = Mooncake(world.open("here")), Mooncake(world.open("there", settings=tuning))
    for _ in range(2):
        here.notify(there.name, "a", "b")
    with pytest.raises(Rejected, match="2 messages wait here already"):
        here.notify(there.name, "a", "b")
    assert len(there.notifications()) == 2
    here.notify(there.name, "a", "b")


def test_a_peer_that_is_gone_gives_no_sign_of_life(pair: tuple[Owner, Owner]) -> None:
    here, there = pair
    here.mooncake.probe(there.mooncake.name)
    there.engine.close()
    with pytest.raises(Lost, match="refused"):
        here.mooncake.probe(there.mooncake.name)


def test_a_connection_for_rdma_is_declined(owner: Owner) -> None:
    with owner.dial("mooncake") as sock:
        sock.sendall(mooncake_handshake.encode(HandshakeKind.CONNECTION, b'{"qp_num":[1]}'))
        kind, body = mooncake_handshake.read_message(sock)
    assert kind is HandshakeKind.CONNECTION
    assert "tcp only" in msgspec.json.decode(body)["reply_msg"]


# The metadata server.


def test_records_follow_the_regions(make_world: Any) -> None:
    url = f"memory://{time.monotonic_ns()}"
    store = open_store(url)
    tuning = TransferSettings(mooncake=MooncakeSettings(metadata=url, name="node", cluster="blue"))
    engine = make_world("mooncake").open("us", settings=tuning)

    def published() -> list[int]:
        value = store.get("mooncake/blue/ram/node")
        assert value is not None
        return [each.addr for each in mooncake_records.decode_segment(value).buffers]

    assert published() == []
    first, second = engine.allocate(100), engine.allocate(200)
    mooncake = Mooncake(engine)
    assert mooncake.name == "node"
    assert published() == [mooncake.address(first.region), mooncake.address(second.region)]
    engine.unregister(first.region)
    assert published() == [mooncake.address(second.region)]
    with pytest.raises(Rejected, match="not a region"):
        mooncake.address(first.region)
    value = store.get("mooncake/blue/rpc_meta/node")
    assert value is not None
    host, port = addresses.split_address(engine.descriptor.endpoints["mooncake"].address, 0)
    assert mooncake_records.decode_rpc(value) == RpcRecord(host, port)
    engine.close()
    assert store.list("mooncake") == {}


@pytest.fixture(params=["redis", "etcd"])
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A Redis or an etcd of our own."""
    if request.param == "etcd":
        skip_without("etcd")
        with EtcdServer() as server:
            yield server.url
        return
    skip_without("redis-server")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with start_bound(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def test_other_servers_hold_the_same_keys_and_json(
    make_world: Any, server_url: str, eventually: Eventually
) -> None:
    store = open_store(server_url)

    def answers() -> bool:
        with contextlib.suppress(MetadataError):
            store.get("anything")
            return True
        return False

    eventually(answers)
    world = make_world("mooncake")
    tuning = TransferSettings(mooncake=MooncakeSettings(metadata=server_url))
    here, there = (Owner(world.open(name, settings=tuning)) for name in ("here", "there"))
    value = store.get("mooncake/ram/there")
    assert value is not None
    assert [each.addr for each in mooncake_records.decode_segment(value).buffers] == [there.address]
    # A record as a Mooncake that is built for this server would write it.
    store.put("mooncake/ram/theirs", THEIRS)
    (buffer,) = here.mooncake.open("theirs").buffers
    assert buffer.address == 139969831747600
    (buffer,) = here.mooncake.open("there").buffers
    move(here.engine, "read", Piece(here.memory.region, 0, buffer.region, 0, 10_000))
    here.mooncake.probe("there")
    for each in (here, there):
        each.engine.close()
    assert store.list("mooncake/").keys() == {"mooncake/ram/theirs"}
    store.close()


def test_segments_of_one_server_open_each_other_by_name(make_world: Any) -> None:
    url = f"memory://{time.monotonic_ns()}"
    world = make_world("mooncake")
    tuning = TransferSettings(mooncake=MooncakeSettings(metadata=url))
    here, there = (Owner(world.open(name, settings=tuning)) for name in ("here", "there"))
    (buffer,) = here.mooncake.open("there").buffers
    move(here.engine, "read", Piece(here.memory.region, 0, buffer.region, 0, 10_000))
    here.mooncake.notify("there", "here", "read")
    assert there.mooncake.notifications() == [MooncakeNotification("here", "read")]
    here.mooncake.probe("there")
    with pytest.raises(Lost, match="no record mooncake/ram/absent"):
        here.mooncake.open("absent")
    open_store(url).put("mooncake/ram/broken", b"{}")
    with pytest.raises(Lost, match="not a Mooncake segment record"):
        here.mooncake.open("broken")


def test_a_crashed_start_is_written_over_and_a_later_one_left_alone(make_world: Any) -> None:
    url = f"memory://{time.monotonic_ns()}"
    store = open_store(url)
    store.put("mooncake/ram/us", b"old")
    store.put("mooncake/rpc_meta/us", b"old")
    tuning = TransferSettings(mooncake=MooncakeSettings(metadata=url))
    engine = make_world("mooncake").open("us", settings=tuning)
    assert b"old" not in store.list("mooncake").values()
    store.put("mooncake/rpc_meta/us", b"later")
    engine.close()
    assert store.list("mooncake").keys() == {"mooncake/rpc_meta/us", "mooncake/ram/us"}


def test_a_region_that_can_not_be_announced_is_not_registered(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{time.monotonic_ns()}"
    tuning = TransferSettings(mooncake=MooncakeSettings(metadata=url))
    engine = make_world("mooncake").open("us", settings=tuning)

    def fail(*_: object, **__: object) -> None:
        raise MetadataUnreachable("down")

    with monkeypatch.context() as patch:
        patch.setattr(open_store(url), "put", fail)
        with pytest.raises(MetadataError, match="down"):
            engine.allocate(100)
        assert engine.stats().n_regions == 0
    engine.allocate(100)
    assert issubclass(Lost, TransferError)
