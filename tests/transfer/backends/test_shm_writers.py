"""What an owner of shared memory knows of writers that it cut off, in a copy or before it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.regions import Region
from halfmoon_transfer import TransferEngine
from halfmoon_transfer.backends.shm import shm_wire
from halfmoon_transfer.backends.shm.shm_wire import ShmReturn
from halfmoon_transfer.metadata import descriptor as records

Eventually = Callable[..., None]
N_BYTES = 4096
#: Writes twice. Before the second copy, or in it, it stops itself; afterwards it may begin none.
_WRITER = """
import os, signal, sys
import msgspec
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer import Piece, TransferEngine, TransferError, TransferSettings
from halfmoon_transfer.backends.shm import process_vm_region, shm_backend, shm_peer
from halfmoon_transfer.metadata import descriptor as records

record, region, where = sys.argv[1:]
region = msgspec.json.decode(region, type=Region)
store = MemoryStore()
store.put(records.PREFIX + region.segment, record.encode())
armed, stood = [], []

def stop_before(owner, name):
    inner = getattr(owner, name)
    def stopping(*arguments):
        if armed:
            armed.clear()
            stood.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return inner(*arguments)
    setattr(owner, name, stopping)

match where:
    case "in a mapped copy":
        stop_before(shm_backend, "copy_slice")
    case "in a borrowed copy":
        stop_before(process_vm_region.ProcessVmRegion, "_write")
    case "before a copy":
        stop_before(shm_peer.ShmPeer, "begin_copy")
settings = TransferSettings(native=False)
engine = TransferEngine.open(
    "writer", metadata=store, generation=1, backends=["shm"], settings=settings
)
with engine:
    engine.allow_writes_while(lambda: not stood)
    mine = engine.allocate(region.length)
    pieces = [Piece(mine.region, 0, region, 0, region.length)]
    mine.view[:] = b"1" * region.length
    engine.transfer("write", pieces)
    mine.view[:] = b"2" * region.length
    armed.append(where)
    try:
        engine.transfer("write", pieces, deadline_s=1.0)
        print("applied")
    except TransferError:
        print("failed")
"""


@contextmanager
def writer(owner: TransferEngine, region: Region, where: str) -> Iterator[subprocess.Popen[str]]:
    record = records.encode(owner.descriptor)
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, record, msgspec.json.encode(region), where],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_stopped(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def owner(make_world: Any) -> TransferEngine:
    engine: TransferEngine = make_world("shm").open("owner")
    return engine


def memory_of(owner: TransferEngine, where: str) -> tuple[Region, memoryview]:
    if where == "in a borrowed copy":  # memory that can't be mapped
        view = memoryview(bytearray(N_BYTES))
        return owner.register(view), view
    memory = owner.allocate(N_BYTES)
    return memory.region, memory.view


@pytest.mark.parametrize("where", ["in a mapped copy", "in a borrowed copy"])
def test_a_writer_stopped_in_its_copy_is_waited_for_and_writes_no_more_after_it(
    owner: TransferEngine, eventually: Eventually, where: str
) -> None:
    region, view = memory_of(owner, where)
    with writer(owner, region, where) as process:
        eventually(lambda: is_stopped(process))
        assert owner.is_quiet(), "nobody has been cut off yet"
        owner.cut_connections()
        assert not owner.is_quiet()
        assert bytes(view) == b"1" * N_BYTES
        process.send_signal(signal.SIGCONT)
        eventually(owner.is_quiet)
        view[:] = b"3" * N_BYTES  # the memory is another's now
        assert process.communicate()[0] == "failed\n"
        assert bytes(view) == b"3" * N_BYTES


def test_a_writer_stopped_before_its_copy_is_not_waited_for_and_does_not_begin_it(
    owner: TransferEngine, eventually: Eventually
) -> None:
    region, view = memory_of(owner, "before a copy")
    with writer(owner, region, "before a copy") as process:
        eventually(lambda: is_stopped(process))
        owner.cut_connections()
        assert owner.is_quiet()
        view[:] = b"3" * N_BYTES
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == "failed\n"
        assert bytes(view) == b"3" * N_BYTES


def test_a_writer_killed_in_its_copy_is_waited_for_no_longer(
    owner: TransferEngine, eventually: Eventually
) -> None:
    region, _ = memory_of(owner, "in a mapped copy")
    with writer(owner, region, "in a mapped copy") as process:
        eventually(lambda: is_stopped(process))
        owner.cut_connections()
        assert not owner.is_quiet()
        process.kill()
        eventually(owner.is_quiet)
        eventually(lambda: owner.stats().n_connections == 0)


def test_what_is_no_page_of_memory_is_no_mark_and_holds_nobody_up(
    owner: TransferEngine, eventually: Eventually
) -> None:
    address = owner.descriptor.endpoints["shm"].address
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    pipe, other_end = os.pipe()
    hello = shm_wire.encode_request(ShmReturn(0, bytes(16)))
    for fd in (short, pipe):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect("\0" + address)
            socket.send_fds(peer, [hello], [fd])
            eventually(lambda: owner.stats().n_connections == 1)
            owner.cut_connections()
            assert peer.recv(100) == b"", "it was not cut off"
            assert owner.is_quiet()
        eventually(lambda: owner.stats().n_connections == 0)
    for fd in (short, pipe, other_end):
        os.close(fd)
