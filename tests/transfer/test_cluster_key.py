"""The cluster key: who knows it is served, and nobody else."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import (
    ClusterKey,
    Memory,
    Piece,
    TransferEngine,
    TransferSettings,
    Untrusted,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.rdma import link as rdma_link
from halfmoon_transfer.backends.rdma.link import RdmaLink
from halfmoon_transfer.backends.rdma.rail_health import RailHealth
from halfmoon_transfer.backends.rdma.rdma_memory import RdmaMemoryTable
from halfmoon_transfer.backends.rdma.rdma_server import RdmaServer
from halfmoon_transfer.backends.socket_io import receive
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceRequest,
    TcpHello,
    TcpProof,
    TcpRequest,
)
from halfmoon_transfer.cluster_key import PROOF_BYTES, ProverRole, make_nonce
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.regions.region_table import RegionTable

PATIENCE_S = 60.0
SECRET = "the moon is made of green cheese"
OTHER_SECRET = "the moon is made of blue cheese"
KEY = ClusterKey(SECRET)
OTHER = ClusterKey(OTHER_SECRET)


def keyed(key: ClusterKey | None) -> TransferSettings:
    return TransferSettings(cluster_key=key, max_connections=20, stall_timeout_s=PATIENCE_S)


def write(here: TransferEngine, there: TransferEngine) -> Memory:
    """Write ten bytes, and give back the memory that they went to."""
    local, remote = here.allocate(10), there.allocate(10)
    local.view[:] = b"0123456789"
    here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    return remote


# The key itself.


def test_a_key_is_not_printed() -> None:
    shown = f"{KEY} {KEY!r} {TransferSettings(cluster_key=KEY)!r} {[KEY]}"
    assert "cheese" not in shown


def test_a_key_that_could_be_guessed_is_refused_without_being_repeated() -> None:
    with pytest.raises(ValueError, match="a cluster key of 7 characters") as refused:
        ClusterKey("hunter2")
    assert "hunter2" not in str(refused.value)


def test_no_text_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClusterKey.given("") is None
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY", raising=False)
    assert ClusterKey.from_environment() is None
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", SECRET)
    assert ClusterKey.from_environment() == KEY


@given(st.binary(max_size=50), st.binary(max_size=50), st.sampled_from(ProverRole))
def test_a_proof_is_good_for_one_conversation_one_role_and_one_key(
    asked: bytes, answered: bytes, role: ProverRole
) -> None:
    proof = KEY.prove(role, asked, answered)
    assert len(proof) == PROOF_BYTES
    assert KEY.accepts(proof, role, asked, answered)
    other_role = ProverRole.OWNER if role is ProverRole.INITIATOR else ProverRole.INITIATOR
    assert not KEY.accepts(proof, other_role, asked, answered)
    assert not KEY.accepts(proof, role, asked + b"x", answered)
    assert not KEY.accepts(proof, role, asked, b"x" + answered)
    assert not OTHER.accepts(proof, role, asked, answered)
    if asked != answered:
        assert not KEY.accepts(proof, role, answered, asked)
    # Where one part ends and the next begins matters too.
    moved = asked + answered[:1], answered[1:]
    assert bool(answered) != KEY.accepts(proof, role, *moved)


def test_a_proof_is_what_the_protocol_says() -> None:
    """Computed with `openssl dgst -sha256 -hmac`, for those who write it in another language."""
    proof = KEY.prove(ProverRole.INITIATOR, b"asked", b"answered")
    assert proof.hex() == "62c17bc274e06a19ee9e2cd5b10d51d4c098e458dfa0d958e6a9651a038b5b4e"


# Two engines.


#: What each process has, step by step, while a cluster's key is changed.
STEPS = [
    KEY,
    ClusterKey(f"{SECRET}\n{OTHER_SECRET}"),
    ClusterKey(f"{OTHER_SECRET}\n{SECRET}"),
    OTHER,
]
NEIGHBOURS = [(i, j) for i in range(4) for j in range(4) if abs(i - j) <= 1]
#: The initiator proves a key that the owner does not have.
TOO_FAR = [(0, 3), (1, 3), (2, 0), (3, 0)]


@pytest.mark.parametrize("encryption", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), NEIGHBOURS)
def test_while_a_key_is_changed_neighbouring_steps_move_bytes(
    make_world: Any, ours: int, theirs: int, encryption: bool
) -> None:
    world = make_world("tcp")

    def at(step: int) -> TransferSettings:
        return msgspec.structs.replace(keyed(STEPS[step]), encryption=encryption)

    here, there = world.open("here", settings=at(ours)), world.open("there", settings=at(theirs))
    assert bytes(write(here, there).view) == b"0123456789"
    assert bytes(write(there, here).view) == b"0123456789"


@pytest.mark.parametrize(("ours", "theirs"), TOO_FAR)
def test_while_a_key_is_changed_a_left_out_step_is_refused_without_a_byte(
    make_world: Any, caplog: pytest.LogCaptureFixture, ours: int, theirs: int
) -> None:
    world = make_world("tcp")
    caplog.set_level(logging.DEBUG)
    here = world.open("here", settings=keyed(STEPS[ours]))
    there = world.open("there", settings=keyed(STEPS[theirs]))
    local, remote = here.allocate(10), there.allocate(10)
    local.view[:] = b"0123456789"
    told = "another cluster key is set there than here"
    with pytest.raises(Untrusted, match=told) as refused:
        here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    assert bytes(remote.view) == bytes(10)
    assert "cheese" not in f"{refused.value} {caplog.text}"


def test_every_rail_asks_for_the_key(make_world: Any) -> None:
    world = make_world("tcp")
    two = ("127.0.0.1", "127.0.0.2")
    there = world.open("there", settings=keyed(KEY), bind=two)
    here = world.open("here", settings=keyed(KEY))
    write(here, there)
    stranger = world.open("stranger", settings=keyed(OTHER))
    for rail in there.descriptor.endpoints.values():
        only = msgspec.structs.replace(there.descriptor, endpoints={"tcp": rail})
        world.metadata.put(records.PREFIX + "there", records.encode(only))
        stranger.release_peer("there")
        with pytest.raises(Untrusted):
            write(stranger, there)


REFUSALS = [
    pytest.param(OTHER, KEY, "another cluster key is set there than here", id="another"),
    pytest.param(None, KEY, "a cluster key is set there and none here", id="none here"),
    pytest.param(KEY, None, "a cluster key is set here and none there", id="none there"),
]


@pytest.mark.parametrize(("ours", "theirs", "told"), REFUSALS)
def test_a_peer_with_another_key_is_refused_and_told(
    make_world: Any,
    caplog: pytest.LogCaptureFixture,
    ours: ClusterKey | None,
    theirs: ClusterKey | None,
    told: str,
) -> None:
    world = make_world("tcp")
    caplog.set_level(logging.DEBUG)
    here = world.open("here", settings=keyed(ours))
    there = world.open("there", settings=keyed(theirs))
    local, remote = here.allocate(10), there.allocate(10)
    local.view[:] = b"0123456789"
    for op in ("write", "read"):
        with pytest.raises(Untrusted, match=told) as refused:
            here.submit(op, [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
        assert "segment there at 127.0.0.1:" in str(refused.value)
        assert "cheese" not in str(refused.value)
    assert bytes(remote.view) == bytes(10)
    assert bytes(local.view) == b"0123456789"
    assert "cheese" not in caplog.text
    if theirs is not None:
        assert "segment here at 127.0.0.1: refused" in caplog.text


# Bare sockets.


class Owner:
    """An engine with a key that is talked to with bare sockets."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.memory = engine.allocate(10)
        self._address = addresses.split_address(engine.descriptor.endpoints["tcp"].address, 0)

    def dial(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=PATIENCE_S)

    def hello(self) -> bytes:
        return tcp_frames.encode_hello(
            TcpHello(self.engine.name, self.engine.generation, nonce=make_nonce())
        )

    def write_request(self) -> bytes:
        asked = SliceRequest(self.memory.region.key, 0, 4)
        request = TcpRequest(tcp_frames.WRITE, 1, self.engine.generation, False, (asked,))
        return tcp_frames.encode_request(request) + b"evil"

    def check_untouched(self) -> None:
        assert bytes(self.memory.view) == bytes(10)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with TransferEngine.open(
        "owner",
        metadata=MemoryStore(),
        backends=("tcp",),
        settings=msgspec.structs.replace(keyed(KEY), encryption=False),
    ) as engine:
        made = Owner(engine)
        yield made
        made.check_untouched()
        del made.memory


def hear_hello(sock: socket.socket) -> bytes:
    return bytes(
        receive(sock, tcp_frames.hello_bytes(receive(sock, tcp_frames.HELLO_HEADER_BYTES)))
    )


def hear_proof(sock: socket.socket) -> TcpProof:
    header = receive(sock, tcp_frames.HELLO_HEADER_BYTES)
    return tcp_frames.decode_proof(receive(sock, tcp_frames.proof_bytes(header)))


def read_to_the_end(sock: socket.socket) -> bytes:
    got = bytearray()
    try:
        while data := sock.recv(65536):
            got += data
    except ConnectionResetError:
        pass  # it hung up on bytes that it had not read
    return bytes(got)


def test_what_was_said_on_one_connection_opens_no_other(owner: Owner) -> None:
    hello = owner.hello()
    with owner.dial() as sock:
        sock.sendall(hello)
        answered = hear_hello(sock)
        proof = KEY.prove(ProverRole.INITIATOR, hello[tcp_frames.HELLO_HEADER_BYTES :], answered)
        said = tcp_frames.encode_proof(TcpProof(proof))
        sock.sendall(said)
        verdict = hear_proof(sock)
        assert KEY.accepts(
            verdict.proof, ProverRole.OWNER, hello[tcp_frames.HELLO_HEADER_BYTES :], answered
        )
    with owner.dial() as sock:
        sock.sendall(hello)
        assert hear_hello(sock) != answered
        sock.sendall(said + owner.write_request())
        assert hear_proof(sock) == TcpProof(b"", "another cluster key is set there than here")
        assert read_to_the_end(sock) == b""


def test_an_owner_that_has_proven_nothing_gets_no_bytes(make_world: Any) -> None:
    """Somebody at the right address who says yes to everything."""
    world = make_world("tcp")
    plain = msgspec.structs.replace(keyed(KEY), encryption=False)
    here, there = world.open("here", settings=plain), world.open("there", settings=plain)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = Endpoint(f"127.0.0.1:{impostor.getsockname()[1]}")
        moved = msgspec.structs.replace(there.descriptor, endpoints={"tcp": address})
        world.metadata.put(records.PREFIX + "there", records.encode(moved))
        local, remote = here.allocate(10), there.allocate(10)
        transfer = here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)])
        impostor.settimeout(PATIENCE_S)
        sock, _ = impostor.accept()
        with sock:
            sock.settimeout(PATIENCE_S)
            asked = hear_hello(sock)
            answer = tcp_frames.encode_hello(
                TcpHello("there", there.generation, nonce=make_nonce())
            )
            sock.sendall(answer)
            theirs = hear_proof(sock)
            answered = answer[tcp_frames.HELLO_HEADER_BYTES :]
            assert KEY.accepts(theirs.proof, ProverRole.INITIATOR, asked, answered)
            # All that it can do is to send it back.
            sock.sendall(tcp_frames.encode_proof(theirs))
            assert read_to_the_end(sock) == b""
        with pytest.raises(Untrusted, match="does not know our cluster key"):
            transfer.result(PATIENCE_S)


# RDMA's side channel. No device is needed to be refused there.


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        *REFUSALS,
        pytest.param(KEY, KEY, "", id="the same"),
        *(pytest.param(STEPS[i], STEPS[j], "", id=f"steps {i} and {j}") for i, j in NEIGHBOURS),
        *(
            pytest.param(STEPS[i], STEPS[j], "another cluster key", id=f"too far, {i} and {j}")
            for i, j in TOO_FAR
        ),
    ],
)
def test_a_side_channel_asks_for_the_key(
    ours: ClusterKey | None, theirs: ClusterKey | None, told: str
) -> None:
    regions = RegionTable("there", 5)
    memory = RdmaMemoryTable(regions, {})
    server = RdmaServer(
        regions,
        memory,
        {},
        NotificationQueue("there", 5, capacity=1),
        bind="127.0.0.1",
        port=0,
        label="halfmoon-transfer-there-rdma",
        max_connections=2,
        stall_timeout_s=PATIENCE_S,
        key=theirs,
    )
    health = RailHealth("halfmoon-transfer-here-repair", lambda _pair, _peer: None)
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    link = RdmaLink(sock, SegmentDescriptor("there", 5, "host", {}), health)
    try:
        if told:
            with pytest.raises(rdma_link.LinkUntrusted, match=told):
                link.greet({}, PATIENCE_S, ours)
        else:
            link.greet({}, PATIENCE_S, ours)
            with pytest.raises(AccessRefused):  # it answers by now
                link.grant(bytes(16))
    finally:
        link.close()
        server.close()
        health.close()
        memory.close()


# Shared memory.


@pytest.mark.parametrize(("key", "answered"), [(None, 32), (KEY, 0)])
def test_with_a_key_memory_is_shared_within_one_user(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, key: ClusterKey | None, answered: int
) -> None:
    there = make_world("shm").open("there", settings=keyed(key))

    def ask() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect("\0" + there.descriptor.endpoints["shm"].address)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.send(b"HMS1" + bytes(28))
                return len(sock.recv(100))
        return 0

    assert ask() == 32
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert ask() == answered


def test_with_a_key_shared_memory_is_used_as_before(make_world: Any) -> None:
    world = make_world("shm,tcp")
    here, there = world.open("here", settings=keyed(KEY)), world.open("there", settings=keyed(KEY))
    local, remote = here.allocate(10), there.allocate(10)
    report = here.submit("write", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    assert report.path == ("shm",)
