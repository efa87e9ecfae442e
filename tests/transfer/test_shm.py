"""Shared memory: who may map what, and until when."""

import contextlib
import fcntl
import mmap
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer import Lost, Piece, Rejected, TransferSettings
from halfmoon_transfer.backends.interface import Errand
from halfmoon_transfer.backends.memory import move_here
from halfmoon_transfer.backends.shm import backend, wire
from halfmoon_transfer.backends.shm.peer import PeerGone, map_shared
from halfmoon_transfer.backends.shm.wire import Ask, Notice, WireError
from halfmoon_transfer.copying import checksum
from halfmoon_transfer.plan import Outcome
from halfmoon_transfer.regions import Status

Eventually = Callable[..., None]
PATIENCE_S = 60.0
KEYS = st.binary(min_size=16, max_size=16)
U64 = st.integers(0, 2**64 - 1)


@given(U64, KEYS, st.sampled_from([1, 2, 3]), st.sampled_from(Status))
def test_messages_are_read_as_they_were_written(
    number: int, key: bytes, kind: int, status: Status
) -> None:
    ask = Ask(number, key)
    assert wire.decode_ask(wire.encode_ask(ask)) == ask
    notice = Notice(kind, status, number, key)
    assert wire.decode_notice(wire.encode_notice(notice)) == notice


@given(st.binary(max_size=40))
def test_other_messages_are_none(message: bytes) -> None:
    for read in (wire.decode_ask, wire.decode_notice):
        with pytest.raises(WireError):
            read(message)
    with pytest.raises(WireError):
        wire.decode_notice(b"HMS1\x09\x00" + bytes(26))


@settings(max_examples=30, deadline=None)
@given(messages=st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=3))
def test_garbage_on_the_socket_ends_that_connection_only(
    make_world: Any, messages: list[bytes]
) -> None:
    world = make_world("shm")
    with world.open("there", generation=1) as there:
        address = there.descriptor.endpoints["shm"].address
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect("\0" + address)
            try:
                for message in messages:
                    sock.send(message)
                assert sock.recv(100) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass
        remote = there.allocate(100)
        with world.open("here", generation=1) as here:
            local = here.allocate(100)
            here.submit("read", [Piece(local.region, 0, remote.region, 0, 100)]).result(PATIENCE_S)
        del remote, local


def test_a_wrong_key_gets_no_descriptor(make_world: Any) -> None:
    world = make_world("shm")
    there = world.open("there", generation=5)
    memory = there.allocate(100)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect("\0" + there.descriptor.endpoints["shm"].address)
        for generation, key, status in (
            (5, os.urandom(16), Status.UNKNOWN_KEY),
            (4, memory.region.key, Status.OTHER_GENERATION),
        ):
            sock.send(wire.encode_ask(Ask(generation, key)))
            message, fds, _, _ = socket.recv_fds(sock, 100, 4)
            assert fds == []
            assert wire.decode_notice(message).status is status


def test_memory_that_could_be_cut_short_is_not_mapped() -> None:
    """A mapping of a file that shrinks kills the process that touches it."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(PeerGone, match="cut short"):
            map_shared(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(PeerGone, match="cut short"):
            map_shared(fd, 8192)
        assert len(map_shared(fd, 4096)) == 4096
    finally:
        os.close(fd)


def test_our_memory_is_sealed_against_it(make_world: Any) -> None:
    engine = make_world("shm").open("here")
    memory = engine.allocate(4096)
    assert isinstance(memory.view.obj, mmap.mmap)
    with pytest.raises((OSError, ValueError, BufferError, SystemError)):
        memory.view.obj.resize(1024)
    assert len(memory.view) == 4096


def test_memory_that_can_not_be_mapped_goes_over_the_wire(make_world: Any) -> None:
    world = make_world("shm,tcp")
    here, there = world.open("here"), world.open("there")
    local, plain = here.allocate(200_000), bytearray(200_000)
    local.view[:] = random.Random(1).randbytes(200_000)
    region, shared = there.register(plain), there.allocate(200_000)
    report = here.submit("write", [Piece(local.region, 0, region, 0, 200_000)]).result(PATIENCE_S)
    assert report.path == ("tcp",)
    assert plain == local.view
    assert here.view(region, 0, 10) is None
    both = here.submit(
        "write",
        [
            Piece(local.region, 0, region, 100_000, 100_000),
            Piece(local.region, 0, shared.region, 0, 200_000),
        ],
    ).result(PATIENCE_S)
    assert set(both.path) == {"shm", "tcp"}
    assert plain[100_000:] == local.view[:100_000]
    assert shared.view == local.view


def test_another_host_is_not_asked_for_its_memory(make_world: Any) -> None:
    world = make_world("shm,tcp")
    here, there = world.open("here"), world.open("there", host_id="elsewhere")
    local, remote = here.allocate(10), there.allocate(10)
    report = here.submit("read", [Piece(local.region, 0, remote.region, 0, 10)]).result(PATIENCE_S)
    assert report.path == ("tcp",)


def test_mappings_are_kept_and_bounded(make_world: Any) -> None:
    world = make_world("shm")
    here = world.open("here", settings=TransferSettings(max_mappings=4))
    there = world.open("there")
    local = here.allocate(100)
    remotes = [there.allocate(100) for _ in range(10)]
    for _ in range(2):
        for number, remote in enumerate(remotes):
            remote.view[:] = bytes([number]) * 100
            here.submit("read", [Piece(local.region, 0, remote.region, 0, 100)]).result(PATIENCE_S)
            assert local.view[99] == number
    assert here.stats().n_mappings == 4


def test_a_view_outlives_its_mapping_and_its_owner(make_world: Any) -> None:
    world = make_world("shm")
    here = world.open("here", settings=TransferSettings(max_mappings=1))
    there = world.start("there", 1, 5000)
    view = here.view(there.region, 0, 5000)
    assert view is not None
    before = bytes(view)
    there.kill()
    here.release_peer("there")
    assert here.stats().n_mappings == 0
    assert bytes(view) == before


def test_memory_of_a_dead_owner_is_lost_not_written(make_world: Any) -> None:
    world = make_world("shm")
    here = world.open("here")
    there = world.start("there", 1, 5000)
    local = here.allocate(5000)
    piece = Piece(local.region, 0, there.region, 0, 5000)
    here.submit("write", [piece]).result(PATIENCE_S)
    view = here.view(there.region, 0, 5000)
    assert view is not None
    there.kill()
    local.view[:] = b"!" * 5000
    with pytest.raises(Lost):
        here.submit("write", [piece]).result(PATIENCE_S)
    assert bytes(view) == bytes(5000)
    assert here.stats().n_mappings == 0
    assert here.view(there.region, 0, 10) is None


def test_an_owner_that_dies_during_the_copy_has_not_got_it(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("shm")
    here = world.open("here")
    there = world.start("there", 1, 5000)
    local = here.allocate(5000)

    def copy_and_kill(errand: Errand, index: int, remote: memoryview) -> Outcome:
        outcome = move_here(errand, index, remote)
        there.kill()
        return outcome

    monkeypatch.setattr(backend, "move_here", copy_and_kill)
    with pytest.raises(Lost):
        here.submit("write", [Piece(local.region, 0, there.region, 0, 5000)]).result(PATIENCE_S)


def test_a_region_taken_back_during_the_copy_has_not_got_it(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("shm")
    here, there = world.open("here"), world.open("there")
    local, remote, other = here.allocate(100), there.allocate(100), there.allocate(100)

    def copy_and_take_back(errand: Errand, index: int, view: memoryview) -> Outcome:
        outcome = move_here(errand, index, view)
        with contextlib.suppress(Rejected):  # the second time
            there.unregister(remote.region)
        return outcome

    monkeypatch.setattr(backend, "move_here", copy_and_take_back)
    pieces = [Piece(local.region, 0, memory.region, 0, 100) for memory in (remote, other)]
    with pytest.raises(Rejected, match="no region of this key"):
        here.submit("write", pieces).result(PATIENCE_S)


def test_a_region_taken_back_is_unmapped_by_its_peers(make_world: Any) -> None:
    world = make_world("shm")
    here, there = world.open("here"), world.open("there")
    local, first, second = here.allocate(10), there.allocate(10), there.allocate(10)
    pieces = [Piece(local.region, 0, memory.region, 0, 10) for memory in (first, second)]
    here.submit("write", pieces).result(PATIENCE_S)
    assert here.stats().n_mappings == 2
    there.unregister(first.region)
    here.submit("write", pieces[1:]).result(PATIENCE_S)
    assert here.stats().n_mappings == 1
    with pytest.raises(Rejected):
        here.view(first.region, 0, 10)


def test_two_processes_see_one_memory(make_world: Any) -> None:
    world = make_world("shm")
    here = world.open("here")
    there = world.start("there", 1, 100_000)
    view = here.view(there.region, 0, 100_000)
    assert view is not None
    local = here.allocate(100_000)
    local.view[:] = random.Random(2).randbytes(100_000)
    here.submit("write", [Piece(local.region, 0, there.region, 0, 100_000)]).result(PATIENCE_S)
    assert view == local.view
    assert there.ask("digest") == str(checksum(view))


def test_peers_connect_once(make_world: Any, eventually: Eventually) -> None:
    world = make_world("shm")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(1_000_000), there.allocate(1_000_000)
    piece = Piece(local.region, 0, remote.region, 0, 1_000_000)
    for transfer in [here.submit("write", [piece]) for _ in range(30)]:
        transfer.result(PATIENCE_S)
    assert here.stats().n_connections == 1
    here.release_peer("there")
    eventually(lambda: there.stats().n_connections == 0)
