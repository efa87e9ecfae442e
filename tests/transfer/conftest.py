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
from halfmoon_transfer.backends.interface import Unavailable
from halfmoon_transfer.backends.rdma import verbs
from halfmoon_transfer.testing import SegmentProcess, on_device


def _devices() -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """RDMA devices for this end and that end, if there are any."""
    try:
        names = verbs.device_names()
    except Unavailable:
        return None
    ours = tuple(name for name in names if name.startswith("rxa"))
    theirs = tuple(name for name in names if name.startswith("rxb"))
    # On a machine with other devices each end takes all of them.
    return (ours, theirs) if names else None


#: Empty when there are none.
DEVICES = _devices() or ((), ())
RDMA = [pytest.param("rdma", marks=pytest.mark.rdma)] if _devices() else []


class FileEngine(TransferEngine):
    """One whose regions are files; their bytes are looked at by mapping them."""

    def allocate(self, n_bytes: int, location: str = "cpu:0") -> Memory:
        with tempfile.NamedTemporaryFile(prefix="halfmoon-region-") as file:
            file.truncate(n_bytes)
            # Through the page cache, as the mapping: O_DIRECT has tests of its own.
            region = self.register_file(file.name, location=location, direct=False)
            return Memory(region, memoryview(mmap.mmap(file.fileno(), n_bytes)))


class DeviceEngine(TransferEngine):
    """One whose regions are memory of an emulated device, looked at as if one sat on it."""

    def allocate(self, n_bytes: int, location: str = "emulated:0") -> Memory:
        return on_device(self, n_bytes)


class World:
    """Engines that find each other, all over the same backends; closed at the test's end.

    With `far_files`, the regions of all engines whose name says that they are "there" are
    files. `on_device` says whose regions are device memory: "here", "there", "both" or nobody's.
    """

    def __init__(
        self, kind: str, stack: ExitStack, *, far_files: bool = False, on_device: str = ""
    ) -> None:
        self.kind = kind
        self._far_files = far_files
        self.on_device = on_device
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
        devices = DEVICES[len(self._engines) % 2] if "rdma" in self.kind else ()
        # Small slices and batches, so that small tests meet many of them.
        settings = TransferSettings(
            slice_bytes=50_000,
            copy_slice_bytes=70_000,
            batch_bytes=400_000,
            batch_slices=40,
            tries_per_path=tries,
            rdma_devices=devices,
            # Room for a few parts only, so that some find none.
            staging_bytes=400_000,
            staging_part_bytes=150_000,
        )
        arguments: dict[str, Any] = {
            "metadata": self.metadata,
            "backends": backends,
            "settings": settings,
        }
        kind: type[TransferEngine] = TransferEngine
        far = "there" in name
        if self._far_files and far:
            kind = FileEngine
        elif self.on_device in ("both", "there" if far else "here"):
            kind = DeviceEngine
        engine = kind.open(name, **(arguments | overrides))
        self._stack.callback(engine.close)
        self._engines.append(engine)
        return engine

    def start(self, name: str, generation: int, n_bytes: int) -> SegmentProcess:
        settings = TransferSettings(rdma_devices=DEVICES[1])
        process = SegmentProcess(
            name,
            generation,
            self.kind,
            n_bytes,
            self.metadata,
            settings,
            on_device=self.on_device in ("both", "there"),
        )
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


#: Backends, and after a slash whose regions are memory of a device.
ON_DEVICES = [
    "tcp/both",
    "shm/here",
    "mooncake/here",
    "cuda/both",
    "cuda/there",
    "faults(memory)/both",
]


@pytest.fixture(
    params=["memory", "shm", "tcp", "mooncake", "faults(memory)", "file", *RDMA, *ON_DEVICES]
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend; for files, TCP leads to them."""
    with ExitStack() as stack:
        far_files = request.param == "file"
        kind, _, on_device = request.param.partition("/")
        kind = "tcp" if far_files else kind
        world = World(kind, stack, far_files=far_files, on_device=on_device)
        yield world
        world.check()


@pytest.fixture(params=["shm", "tcp", "shm,tcp", "mooncake", *RDMA, "tcp/both", "cuda/both"])
def far_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend that leads into another process."""
    with ExitStack() as stack:
        kind, _, on_device = request.param.partition("/")
        yield World(kind, stack, on_device=on_device)


@pytest.fixture
def make_world() -> Iterator[Callable[[str], World]]:
    """One backend, chosen by the test."""
    with ExitStack() as stack:
        yield lambda kind: World(kind, stack)
