"""Regions that are files: what reaches the disk, what is refused, what is left alone."""

import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_transfer import Corrupted, Memory, Piece, Rejected, TransferEngine, TransferSettings
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.regions.file_region import BLOCK_BYTES, FileRegion
from halfmoon_transfer.regions.file_thread_pool import FileThreadPool

PATIENCE_S = 60.0
SIZE = 300_000


@pytest.fixture(params=["tcp", "memory", "own"])
def ends(request: pytest.FixtureRequest, make_world: Any) -> tuple[TransferEngine, TransferEngine]:
    """Who asks and who has the file: by a wire, inside the process, or the same engine."""
    world = make_world("tcp" if request.param == "own" else request.param)
    there = world.open("there")
    return (there if request.param == "own" else world.open("here")), there


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of known bytes whose end is inside a block."""
    path = tmp_path / "region"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def filled(engine: TransferEngine, n_bytes: int, seed: int) -> Memory:
    memory = engine.allocate(n_bytes)
    memory.view[:] = random.Random(seed).randbytes(n_bytes)
    return memory


def move(engine: TransferEngine, op: Any, *pieces: Piece) -> None:
    engine.submit(op, pieces, PATIENCE_S).result(PATIENCE_S)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, SIZE), (0, 8192), (1, 4096), (4095, 2), (4096, SIZE - 4096), (70_001, 123_457)],
)
def test_bytes_of_a_file_come_and_go(
    ends: tuple[TransferEngine, TransferEngine], path: Path, direct: bool, offset: int, length: int
) -> None:
    here, there = ends
    before = path.read_bytes()
    region = there.register_file(path, direct=direct)
    assert region.length == SIZE
    local = here.allocate(SIZE + 7)
    move(here, "read", Piece(local.region, 7, region, offset, length))
    assert local.view[7 : 7 + length] == before[offset : offset + length]
    source = filled(here, SIZE + 3, 1)
    move(here, "write", Piece(source.region, 3, region, offset, length))
    expected = before[:offset] + bytes(source.view[3 : 3 + length]) + before[offset + length :]
    assert path.read_bytes() == expected


def test_writers_that_meet_inside_a_block_do_not_undo_each_other(path: Path) -> None:
    file = FileRegion(path)
    cuts = sorted(random.Random(3).sample(range(1, SIZE), 150))
    after = random.Random(4).randbytes(SIZE)
    parts = list(zip([0, *cuts], [*cuts, SIZE], strict=True))

    def write(mine: Sequence[tuple[int, int]]) -> None:
        for start, end in mine:
            with file.lend_buffer(start, end - start) as room:
                room[:] = after[start:end]
                file.store(start, room)

    threads = [threading.Thread(target=write, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert path.read_bytes() == after


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 40_000), st.integers(1, 20_000)), max_size=8
    ),
    start=st.integers(0, 9_000),
    shift=st.integers(0, BLOCK_BYTES - 1),
    direct=st.booleans(),
)
def test_any_range_from_any_memory_is_exact(
    tmp_path: Path, steps: list[tuple[bool, int, int]], start: int, shift: int, direct: bool
) -> None:
    path = tmp_path / "model"
    model = bytearray(random.Random(start).randbytes(70_000))
    path.write_bytes(model)
    file = FileRegion(path, offset=start, length=60_000, direct=direct)
    memory = memoryview(mmap.mmap(-1, 40_000))[shift:]
    for number, (write, offset, length) in enumerate(steps):
        view = memory[:length]
        at = start + offset
        if write:
            view[:] = random.Random(number).randbytes(length)
            file.store(offset, view)
            model[at : at + length] = view
        else:
            file.load(offset, view)
            assert view == model[at : at + length]
    file.close()
    assert path.read_bytes() == model


def test_a_read_only_file_can_not_be_written(make_world: Any, path: Path) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    path.chmod(0o444)
    region = there.register_file(path, writable=False)
    local = here.allocate(100)
    with pytest.raises(Rejected, match="read-only"):
        move(here, "write", Piece(local.region, 0, region, 0, 100))
    move(here, "read", Piece(local.region, 0, region, 0, 100))
    assert local.view == path.read_bytes()[:100]


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_file_that_got_shorter_is_refused_and_not_made_longer_again(
    ends: tuple[TransferEngine, TransferEngine], path: Path, op: str
) -> None:
    here, there = ends
    region = there.register_file(path)
    local = here.allocate(SIZE)
    os.truncate(path, 100_000)
    with pytest.raises(Rejected, match="got shorter: it has 100000 bytes now"):
        move(here, op, Piece(local.region, 0, region, 90_000, 20_000))
    assert path.stat().st_size == 100_000
    move(here, op, Piece(local.region, 0, region, 0, 100_000))


def test_a_file_that_was_removed_stays_until_it_is_unregistered(
    make_world: Any, path: Path
) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    before = path.read_bytes()
    region = there.register_file(path)
    path.unlink()
    local = here.allocate(SIZE)
    move(here, "read", Piece(local.region, 0, region, 0, SIZE))
    assert local.view == before
    assert _open_descriptors_of(path)
    there.unregister(region)
    assert not _open_descriptors_of(path)
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "read", Piece(local.region, 0, region, 0, 1))


def _open_descriptors_of(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(path)):
            found.append(int(entry.name))
    return found


def failing(
    monkeypatch: pytest.MonkeyPatch, number: int, when: Callable[[int], bool] = lambda fd: True
) -> None:
    """From now on, the system's reads and writes of such descriptors fail."""
    for name in ("preadv", "pwritev"):
        genuine = getattr(os, name)

        def fail(fd: int, buffers: Any, at: int, genuine: Any = genuine) -> Any:
            if when(fd):
                raise OSError(number, os.strerror(number))
            return genuine(fd, buffers, at)

        monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_of_the_device_rejects_the_transfer_and_says_which(
    ends: tuple[TransferEngine, TransferEngine],
    path: Path,
    op: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = ends
    region = there.register_file(path)
    local = here.allocate(SIZE)
    with monkeypatch.context() as patch:
        failing(patch, errno.EIO)
        with pytest.raises(Rejected, match="a file: Input/output error"):
            move(here, op, Piece(local.region, 0, region, 0, SIZE))
    # The path is in order afterwards.
    move(here, op, Piece(local.region, 0, region, 0, SIZE))


def test_a_device_with_larger_blocks_is_accessed_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FileRegion(path)
    takes_direct = file.direct
    if not takes_direct:
        file.close()
        pytest.skip("the file system of the temporary folder does not take O_DIRECT")
    before = path.read_bytes()
    failing(
        monkeypatch,
        errno.EINVAL,
        lambda fd: bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT),
    )
    with file.lend_buffer(10, SIZE - 10) as room:
        file.load(10, room)
        assert room == before[10:]
    assert not file.direct
    file.close()


def test_bytes_that_arrive_damaged_do_not_reach_the_file(make_world: Any, path: Path) -> None:
    world = make_world("tcp")
    here = world.open(
        "here",
        backends=(FaultInjection("tcp", FaultPlan(corrupt_rate=1.0)),),
        settings=TransferSettings(tries_per_path=1),
    )
    before = path.read_bytes()
    region = world.open("there").register_file(path)
    source = filled(here, SIZE, 5)
    with pytest.raises(Corrupted):
        move(here, "write", Piece(source.region, 0, region, 0, SIZE))
    assert path.read_bytes() == before


def test_sync_asks_the_device_before_it_acknowledges(path: Path) -> None:
    for sync in (True, False):
        file = FileRegion(path, sync=sync)
        opened = _open_descriptors_of(path)
        assert opened
        for fd in opened:
            assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC) is sync
        file.close()


def test_what_is_no_range_of_a_file_can_not_be_registered(make_world: Any, path: Path) -> None:
    there = make_world("tcp").open("there")
    with pytest.raises(ValueError, match=r"no region of 2 bytes at offset 299999 .* 300000 bytes"):
        there.register_file(path, offset=SIZE - 1, length=2)
    with pytest.raises(ValueError, match="no region"):
        there.register_file(path, offset=SIZE)
    with pytest.raises(ValueError, match="no region"):
        there.register_file(path, offset=-1, length=2)
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/null")):
        with pytest.raises(ValueError, match="neither a file nor a block device"):
            there.register_file(other)
    with pytest.raises(OSError, match="nothing"):
        there.register_file(path.with_name("nothing"))
    assert not _open_descriptors_of(path.parent)
    there.close()


def test_a_file_has_no_view_and_is_not_the_local_side(make_world: Any, path: Path) -> None:
    world = make_world("memory")
    here, there = world.open("here"), world.open("there")
    region, memory = there.register_file(path), there.allocate(10)
    assert there.view(region, 0, 10) is None
    assert here.view(region, 0, 10) is None
    for op in ("read", "write"):
        with pytest.raises(Rejected, match=f"the local region of a {op} is a file"):
            move(there, op, Piece(region, 0, memory.region, 0, 10))


def test_a_file_beside_memory_goes_over_the_next_path(make_world: Any, path: Path) -> None:
    world = make_world("shm,tcp")
    here, there = world.open("here"), world.open("there")
    region, memory = there.register_file(path), filled(there, 1000, 7)
    local = here.allocate(SIZE + 1000)
    pieces = [
        Piece(local.region, 0, region, 0, SIZE),
        Piece(local.region, SIZE, memory.region, 0, 1000),
    ]
    report = here.submit("read", pieces).result(PATIENCE_S)
    assert local.view == path.read_bytes() + bytes(memory.view)
    assert set(report.path) == {"shm", "tcp"}


def test_a_file_is_closed_after_its_last_access(path: Path) -> None:
    file = FileRegion(path)
    inside, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        file._enter()
        inside.set()
        let_go.wait(PATIENCE_S)
        file._leave()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    file.close()
    assert _open_descriptors_of(path)
    let_go.set()
    thread.join()
    assert not _open_descriptors_of(path)
    with pytest.raises(OSError, match="was closed"):
        file.load(0, memoryview(bytearray(1)))


def test_a_pool_that_is_closed_still_does_the_work() -> None:
    pool = FileThreadPool("halfmoon-transfer-test")
    done: list[int] = []
    pool.run({i: lambda i=i: done.append(i) for i in range(5)})  # type: ignore[misc]
    pool.close()
    pool.run({i: lambda i=i: done.append(i) for i in range(5, 9)})  # type: ignore[misc]
    assert sorted(done) == list(range(9))


@pytest.fixture
def block_device() -> Iterator[Path]:
    """A device whose bytes may be overwritten: see `with_nvme_namespace.sh`."""
    path = os.environ.get("HALFMOON_TEST_BLOCK_DEVICE")
    if not path:
        pytest.skip("HALFMOON_TEST_BLOCK_DEVICE names no block device that may be overwritten")
    yield Path(path)


@pytest.mark.block_device
def test_a_block_device_is_a_region(make_world: Any, block_device: Path) -> None:
    world = make_world("tcp")
    here, there = world.open("here", settings=TransferSettings()), world.open("there")
    region: Region = there.register_file(block_device, sync=True)
    size = min(region.length, 64 * 1024 * 1024) - 1001
    source, back = filled(here, size, 8), here.allocate(size)
    move(here, "write", Piece(source.region, 0, region, 1001, size))
    move(here, "read", Piece(back.region, 0, region, 1001, size))
    assert back.view == source.view
    with block_device.open("rb") as device:
        device.seek(1001)
        assert device.read(size) == source.view
