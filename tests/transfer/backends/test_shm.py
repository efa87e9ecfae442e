"""Shared memory: who may map what, and until when."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer import Corrupted, Lost, Piece, Rejected, TransferEngine, TransferSettings
from halfmoon_transfer.backends import memory_backend
from halfmoon_transfer.backends.backend_interface import CarryRequest
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.memory_backend import copy_slice
from halfmoon_transfer.backends.shm import native_copy, process_vm, shm_backend, shm_wire
from halfmoon_transfer.backends.shm.mapped_regions import MappedRegions
from halfmoon_transfer.backends.shm.native_copy import NativeCopy
from halfmoon_transfer.backends.shm.shm_peer import ShmPeer, map_shared
from halfmoon_transfer.backends.shm.shm_wire import (
    ShmBorrowRequest,
    ShmLentRegion,
    ShmRegionRequest,
    ShmReturn,
    ShmWireError,
)
from halfmoon_transfer.backends.unix_peer import UnixPeerGone
from halfmoon_transfer.planning.transfer_plan import SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.byte_ops import copy_bytes

Eventually = Callable[..., None]
PATIENCE_S = 60.0
KEY = b"k" * 16


@contextlib.contextmanager
def dialled(owner: TransferEngine) -> Iterator[socket.socket]:
    """A bare socket that is connected to an owner's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect("\0" + owner.descriptor.endpoints["shm"].address)
        yield sock


def asked(sock: socket.socket, request: ShmRegionRequest | ShmBorrowRequest) -> Any:
    """The answer to a request, which brings no descriptor."""
    sock.send(shm_wire.encode_request(request))
    message, fds, _, _ = socket.recv_fds(sock, 100, 4)
    assert fds == []
    return shm_wire.decode_reply(message)


@given(st.binary(max_size=40))
def test_other_messages_are_none(message: bytes) -> None:
    for read in (shm_wire.decode_request, shm_wire.decode_reply):
        with pytest.raises(ShmWireError):
            read(message)
    with pytest.raises(ShmWireError):
        shm_wire.decode_reply(b"HMS1\x09\x00" + bytes(26))


@settings(max_examples=30, deadline=None)
@given(messages=st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=3))
def test_garbage_on_the_socket_ends_that_connection_only(
    make_world: Any, messages: list[bytes]
) -> None:
    world = make_world("shm")
    with world.open("there", generation=1) as there:
        with dialled(there) as sock:
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
    with dialled(there) as sock:
        for generation, key, status in (
            (5, os.urandom(16), AccessStatus.UNKNOWN_KEY),
            (4, memory.region.key, AccessStatus.OTHER_GENERATION),
        ):
            assert asked(sock, ShmRegionRequest(generation, key)).status is status


def test_memory_that_could_be_cut_short_is_not_mapped() -> None:
    """A mapping of a file that shrinks kills the process that touches it."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(UnixPeerGone, match="cut short"):
            map_shared(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(UnixPeerGone, match="cut short"):
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


# Memory that can't be mapped.


def test_where_the_kernel_does_not_allow_it_memory_goes_over_the_wire(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked: list[int] = []

    def refuses(pid: int, *_: object) -> int:
        asked.append(pid)
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(process_vm, "_writev", refuses)
    world = make_world("shm,tcp")
    here, there = world.open("here"), world.open("there")
    local, plain = here.allocate(10), bytearray(10)
    local.view[:] = b"0123456789"
    piece = Piece(local.region, 0, there.register(plain), 0, 10)
    for _ in range(3):
        report = here.submit("write", [piece]).result(PATIENCE_S)
        assert report.path == ("tcp",)
    assert plain == local.view
    assert asked == [os.getpid()], "the kernel's no is remembered"
    assert "goes over the wire" in caplog.text


def test_memory_is_not_taken_back_while_a_peer_may_touch_it(
    make_world: Any, eventually: Eventually
) -> None:
    """Whoever borrows holds an access, and its end, or the peer's, ends that."""
    there = make_world("shm").open("there", generation=5)
    region = there.register(bytearray(100))

    borrow = ShmBorrowRequest(5, region.key)
    taken_back = threading.Event()

    def take_back() -> None:
        there.unregister(region)
        taken_back.set()

    with dialled(there) as first, dialled(there) as second:
        for sock in (first, second):
            lent = asked(sock, borrow)
            assert isinstance(lent, ShmLentRegion)
            assert (lent.length, lent.writable) == (100, True)
        thread = threading.Thread(target=take_back)
        thread.start()
        first.send(shm_wire.encode_request(ShmReturn(5, region.key)))
        assert not taken_back.wait(0.1)
        second.close()
        thread.join()
        assert asked(first, borrow).status is AccessStatus.UNKNOWN_KEY


def test_what_is_returned_twice_or_was_never_lent_does_no_harm(make_world: Any) -> None:
    there = make_world("shm").open("there", generation=5)
    region = there.register(bytearray(100))
    with dialled(there) as sock:
        for key in (region.key, os.urandom(16), region.key):
            sock.send(shm_wire.encode_request(ShmReturn(5, key)))
        assert isinstance(asked(sock, ShmBorrowRequest(5, region.key)), ShmLentRegion)
    there.check()


def test_another_user_is_not_told_where_memory_is(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = make_world("shm").open("there", generation=5)
    region = there.register(bytearray(100))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with dialled(there) as sock:
        refused = asked(sock, ShmBorrowRequest(5, region.key))
        assert refused.status is AccessStatus.NOT_SHAREABLE


def test_bytes_that_are_not_all_there_are_reported() -> None:
    """The page behind can't be accessed."""
    process = process_vm.RemoteProcess(os.getpid())
    with contextlib.closing(process), mmap.mmap(-1, 2 * mmap.PAGESIZE) as room:
        room[:4] = b"here"
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        behind = ctypes.c_void_p(address + mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(behind, mmap.PAGESIZE, 0) == 0
        into = memoryview(bytearray(2 * mmap.PAGESIZE))
        with pytest.raises(
            process_vm.PartialCopy, match=f"{mmap.PAGESIZE} of {2 * mmap.PAGESIZE} bytes"
        ):
            process.read(address, into)
        with pytest.raises(process_vm.PartialCopy, match="Bad address"):
            process.write(address + mmap.PAGESIZE, b"nowhere")
        process.read(address, into[:4])
        assert bytes(into[:4]) == b"here"


def test_a_process_that_has_ended_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = process_vm.RemoteProcess(child.pid)
        process.require_alive()
        child.communicate()
        with pytest.raises(process_vm.ProcessGone):
            process.require_alive()
        process.close()
    with pytest.raises(process_vm.ProcessGone):
        process_vm.RemoteProcess(child.pid)
    with pytest.raises(process_vm.ProcessVmDenied):
        process_vm.RemoteProcess(0)


def test_without_it_memory_that_can_not_be_mapped_goes_over_the_wire(make_world: Any) -> None:
    world = make_world("shm,tcp")
    settings = TransferSettings(cross_memory_attach=False)
    here, there = world.open("here", settings=settings), world.open("there")
    local, plain = here.allocate(200_000), bytearray(200_000)
    local.view[:] = random.Random(1).randbytes(200_000)
    region = there.register(plain)
    report = here.submit("write", [Piece(local.region, 0, region, 0, 200_000)]).result(PATIENCE_S)
    assert report.path == ("tcp",)
    assert plain == local.view
    assert here.view(region, 0, 10) is None


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


@pytest.mark.parametrize("native", [True, False])
def test_an_owner_that_dies_during_the_copy_has_not_got_it(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if native and native_copy.find_copy() is None:
        pytest.skip("the extension is not built: make native")
    world = make_world("shm")
    here = world.open("here", settings=TransferSettings(native=native))
    there = world.start("there", 1, 5000)
    local = here.allocate(5000)

    def copy_and_kill(errand: CarryRequest, index: int, remote: memoryview) -> SliceOutcome:
        assert not native
        outcome = copy_slice(errand, index, remote)
        there.kill()
        return outcome

    copy_batch = NativeCopy.copy_batch

    def copy_all_and_kill(*args: Any) -> Any:
        assert native
        copied = copy_batch(*args)
        there.kill()
        return copied

    monkeypatch.setattr(shm_backend, "copy_slice", copy_and_kill)
    monkeypatch.setattr(NativeCopy, "copy_batch", copy_all_and_kill)
    with pytest.raises(Lost):
        here.submit("write", [Piece(local.region, 0, there.region, 0, 5000)]).result(PATIENCE_S)


def test_a_region_taken_back_during_the_copy_has_not_got_it(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("shm")
    here, there = world.open("here"), world.open("there")
    local, remote, other = here.allocate(100), there.allocate(100), there.allocate(100)

    def copy_and_take_back(errand: CarryRequest, index: int, view: memoryview) -> SliceOutcome:
        outcome = copy_slice(errand, index, view)
        with contextlib.suppress(Rejected):  # the second time
            there.unregister(remote.region)
        return outcome

    monkeypatch.setattr(shm_backend, "copy_slice", copy_and_take_back)
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


# Whether the bytes that arrived are those that were sent.


@pytest.fixture(params=["extension", "mapped", "borrowed"])
def damaging(
    request: pytest.FixtureRequest, make_world: Any
) -> Callable[..., tuple[Any, Any, memoryview, Any]]:
    """Two engines with memory of 50,000 bytes each; the copies of the first one are damaged."""
    if request.param == "extension" and native_copy.find_copy() is None:
        pytest.skip("the extension is not built: make native")

    def opened(plan: FaultPlan, tries: int = 3) -> tuple[Any, Any, memoryview, Any]:
        world = make_world("shm")
        settings = TransferSettings(
            native=request.param == "extension", copy_slice_bytes=1000, tries_per_path=tries
        )
        here = world.open("here", backends=(FaultInjection("shm", plan),), settings=settings)
        there, local = world.open("there"), here.allocate(50_000)
        local.view[:] = random.Random(4).randbytes(50_000)
        if request.param == "borrowed":
            plain = bytearray(50_000)
            return here, local, memoryview(plain), there.register(plain)
        remote = there.allocate(50_000)
        return here, local, remote.view, remote.region

    return opened


@pytest.mark.parametrize("op", ["write", "read"])
def test_damage_is_copied_again_where_a_transfer_asks_for_checks(damaging: Any, op: str) -> None:
    plan = FaultPlan(seed=1, corrupt_rate=0.3, verify=False)
    here, local, there, region = damaging(plan, tries=30)
    if op == "read":
        there[:] = random.Random(5).randbytes(50_000)
    piece = Piece(local.region, 0, region, 0, 50_000)
    report = here.submit(op, [piece], verify=True).result(PATIENCE_S)
    assert local.view == there
    assert here.stats().corrupted_by_path == {"faults(shm)": report.retries} != {}
    del local, there


def test_damage_on_every_try_is_named_only_where_a_transfer_asks_for_checks(damaging: Any) -> None:
    here, local, there, region = damaging(FaultPlan(corrupt_rate=1.0, verify=False))
    piece = Piece(local.region, 0, region, 0, 50_000)
    with pytest.raises(Corrupted, match=r"write of 1000 bytes .* the checksum does not match"):
        here.submit("write", [piece], verify=True).result(PATIENCE_S)
    here.submit("write", [piece]).result(PATIENCE_S)
    assert local.view != there
    del local, there


@pytest.mark.parametrize("waits", [True, False])
def test_a_small_copy_without_a_plan_is_compared_too(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    world = make_world("shm")
    here = world.open("here", settings=TransferSettings(native=False))
    local, remote = here.allocate(100), world.open("there").allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    here.transfer("write", [piece])  # mapped from here on
    local.view[:] = random.Random(6).randbytes(100)
    damaged = iter([True])

    def copy_and_damage(destination: memoryview, source: memoryview) -> None:
        copy_bytes(destination, source)
        if next(damaged, False):
            destination[7] ^= 1

    monkeypatch.setattr(memory_backend, "copy_bytes", copy_and_damage)
    if waits:
        here.transfer("write", [piece], verify=True)
    else:
        here.submit("write", [piece], verify=True).result(PATIENCE_S)
    assert remote.view == local.view
    assert here.stats().corrupted_by_path == {"shm": 1}


# What is held of peers.


def test_memory_that_was_revoked_while_it_was_mapped_is_not_kept() -> None:
    mapped = MappedRegions(4)
    place = ("there", KEY)
    revoked: set[bytes] = set()

    def map_and_revoke() -> memoryview:
        # Another thread reads the revocation between the owner's answer and now.
        revoked.add(KEY)
        mapped.drop(place)
        return memoryview(bytearray(10))

    assert mapped.get(place, map_and_revoke, revoked) is not None
    assert mapped.use(place) is None
    assert len(mapped) == 0


def test_a_connection_that_was_closed_is_never_taken_for_alive(make_world: Any) -> None:
    there = make_world("shm").open("there")
    peer = ShmPeer(there.descriptor.endpoints["shm"].address, lambda key: None, our_user_only=False)
    peer.require_alive()
    peer.close()
    # A new socket may get the descriptor's number.
    one, other = socket.socketpair()
    with one, other, pytest.raises(UnixPeerGone, match="is closed"):
        peer.require_alive()
