"""Engines to test with, and a watch that nothing of them is left behind."""

import gc
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from halfmoon_metadata.memory import MemoryStore
from halfmoon_transfer import Memory, TransferEngine, TransferSettings
from halfmoon_transfer.backends.faults import FaultPlan, Faults
from halfmoon_transfer.testing import SegmentProcess


class FileEngine(TransferEngine):
    """One whose regions are files; their bytes are looked at by mapping them."""

    def allocate(self, n_bytes: int, location: str = "cpu:0") -> Memory:
        with tempfile.NamedTemporaryFile(prefix="halfmoon-region-") as file:
            file.truncate(n_bytes)
            # Through the page cache, as the mapping: O_DIRECT has tests of its own.
            region = self.register_file(file.name, location=location, direct=False)
            return Memory(region, memoryview(mmap.mmap(file.fileno(), n_bytes)))


class World:
    """Engines that find each other, all over the same backends; closed at the test's end.

    With `far_files`, the regions of all engines whose name says that they are "there" are
    files.
    """

    def __init__(self, kind: str, stack: ExitStack, *, far_files: bool = False) -> None:
        self.kind = kind
        self._far_files = far_files
        self.metadata = MemoryStore()
        self._stack = stack
        self._engines: list[TransferEngine] = []

    def open(self, name: str, **overrides: Any) -> TransferEngine:
        faulty = self.kind.startswith("faults")
        if faulty:
            plan = FaultPlan(seed=len(self._engines), drop_rate=0.1, corrupt_rate=0.1)
            backends: tuple[str | Faults, ...] = (Faults("memory", plan),)
        else:
            backends = tuple(self.kind.split(","))
        tries = 12 if faulty else 3
        # Small slices and batches, so that small tests meet many of them.
        settings = TransferSettings(
            slice_bytes=50_000,
            copy_slice_bytes=70_000,
            batch_bytes=400_000,
            batch_slices=40,
            tries_per_path=tries,
        )
        arguments: dict[str, Any] = {
            "metadata": self.metadata,
            "backends": backends,
            "settings": settings,
        }
        kind = FileEngine if self._far_files and "there" in name else TransferEngine
        engine = kind.open(name, **(arguments | overrides))
        self._stack.callback(engine.close)
        self._engines.append(engine)
        return engine

    def start(self, name: str, generation: int, n_bytes: int) -> SegmentProcess:
        process = SegmentProcess(name, generation, self.kind, n_bytes, self.metadata)
        return self._stack.enter_context(process)

    def check(self) -> None:
        for engine in self._engines:
            engine.check()


def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually


def _our_descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if "memfd:halfmoon" in target:
            found.append(target)
    return found


def _our_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "halfmoon-transfer" in each.name]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    shared = list(Path("/dev/shm").iterdir())
    yield
    if _our_descriptors():
        gc.collect()
    assert _our_threads() == []
    assert _our_descriptors() == []
    assert [name for name in Path("/dev/shm").iterdir() if name not in shared] == []


@pytest.fixture(params=["memory", "shm", "tcp", "faults(memory)", "file"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend; for files, TCP leads to them."""
    with ExitStack() as stack:
        far_files = request.param == "file"
        world = World("tcp" if far_files else request.param, stack, far_files=far_files)
        yield world
        world.check()


@pytest.fixture(params=["shm", "tcp", "shm,tcp"])
def far_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend that leads into another process."""
    with ExitStack() as stack:
        yield World(request.param, stack)


@pytest.fixture
def make_world() -> Iterator[Callable[[str], World]]:
    """One backend, chosen by the test."""
    with ExitStack() as stack:
        yield lambda kind: World(kind, stack)
