"""Engines to test with, and a watch that nothing of them is left behind."""

import gc
import mmap
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess, on_device
from halfmoon_transfer import ClusterKey, Memory, TransferEngine, TransferSettings
from halfmoon_transfer.backends import BACKENDS, backend_class
from halfmoon_transfer.backends.backend_interface import BackendCapabilities
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.rdma import verbs
from halfmoon_transfer.backends.tcp import native
from halfmoon_transfer.interface import BackendUnavailable


def _devices() -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """RDMA devices for this end and that end, if there are any."""
    try:
        names = verbs.device_names()
    except BackendUnavailable:
        return None
    ours = tuple(name for name in names if name.startswith("rxa"))
    theirs = tuple(name for name in names if name.startswith("rxb"))
    # On a machine with other devices each end takes all of them.
    return (ours, theirs) if names else None


#: Empty when there are none.
DEVICES = _devices() or ((), ())


def _why_missing(name: str) -> str:
    """Why a backend can't be tested on this machine; empty if it can."""
    try:
        TransferEngine.open("probe", metadata=MemoryStore(), backends=(name,)).close()
    except BackendUnavailable as error:
        return str(error)
    return ""


#: Every backend of the registry that can't be tested here, and why.
MISSING = {name: reason for name in BACKENDS if (reason := _why_missing(name))}
#: What each of them says of itself.
CAPABILITIES = {name: backend_class(name).capabilities for name in BACKENDS}
MARKS = {"rdma": [pytest.mark.rdma]}


def _worlds(*, far: bool = False, host_memory: bool = False) -> list[Any]:
    """The backends of the registry that can be tested here; each over memory that it reaches."""
    return [
        pytest.param(name if able.host_memory else f"{name}/both", marks=MARKS.get(name, []))
        for name, able in CAPABILITIES.items()
        if name not in MISSING
        and (able.other_processes or not far)
        and (able.host_memory or not host_memory)
    ]


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


class OwnMemoryEngine(TransferEngine):
    """One whose regions are memory that it did not make; nobody can map it."""

    def allocate(self, n_bytes: int, location: str = "cpu:0") -> Memory:
        view = memoryview(bytearray(n_bytes))
        return Memory(self.register(view, location), view)


class World:
    """Engines that find each other, all over the same backends; closed at the test's end.

    Engines whose name says that they are "there" may be of another kind, with regions of theirs.
    `on_device` says whose regions are device memory: "here", "there", "both" or nobody's.
    `native` says whether the first engine, the third and so on use the extension in C, and
    whether the others do. With a `key`, TCP is encrypted.
    """

    def __init__(
        self,
        kind: str,
        stack: ExitStack,
        far: type[TransferEngine] = TransferEngine,
        bind: str = "127.0.0.1",
        on_device: str = "",
        native: tuple[bool, bool] = (True, True),
        key: ClusterKey | None = None,
    ) -> None:
        self.kind = kind
        self.native = native
        self.key = key
        self._bind = bind
        self._near = DeviceEngine if on_device in ("both", "here") else TransferEngine
        self._far = DeviceEngine if on_device in ("both", "there") else far
        self.on_device = on_device
        #: Whether memory "there" can be looked at without a copy.
        self.has_views = self.capabilities.views and self._far not in (
            OwnMemoryEngine,
            DeviceEngine,
        )
        self.metadata = MemoryStore()
        self._stack = stack
        self._engines: list[TransferEngine] = []

    @property
    def capabilities(self) -> BackendCapabilities:
        """Those of the first backend."""
        first = self.kind.split(",")[0]
        return CAPABILITIES[first.removeprefix("faults(").removesuffix(")")]

    def open(self, name: str, **overrides: Any) -> TransferEngine:
        faulty = self.kind.startswith("faults")
        if faulty:
            plan = FaultPlan(seed=len(self._engines), drop_rate=0.1, corrupt_rate=0.1)
            backends: tuple[str | FaultInjection, ...] = (FaultInjection("memory", plan),)
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
            native=self.native[len(self._engines) % 2],
            cluster_key=self.key,
        )
        arguments: dict[str, Any] = {
            "metadata": self.metadata,
            "backends": backends,
            "settings": settings,
            "bind": self._bind,
        }
        kind = self._far if "there" in name else self._near
        engine = kind.open(name, **(arguments | overrides))
        self._stack.callback(engine.close)
        self._engines.append(engine)
        return engine

    def start(self, name: str, generation: int, n_bytes: int) -> SegmentProcess:
        settings = TransferSettings(
            rdma_devices=DEVICES[1], native=self.native[1], cluster_key=self.key
        )
        registered = self._far is OwnMemoryEngine
        process = SegmentProcess(
            name,
            generation,
            self.kind,
            n_bytes,
            self.metadata,
            settings,
            on_device=self.on_device in ("both", "there"),
            registered=registered,
        )
        return self._stack.enter_context(process)

    def check(self) -> None:
        for engine in self._engines:
            engine.check()


def eventually(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def stands_still(pid: int) -> bool:
    """Whether all threads of a process have stopped: that takes a while after the signal."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in tasks)


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
    if _our_descriptors():  # left by a test that failed
        gc.unfreeze()
        gc.collect()
    # All that exists before a test is left out of collections, for good: half a second of each.
    gc.freeze()
    yield
    if _our_descriptors():
        gc.collect()
    assert _our_threads() == []
    assert _our_descriptors() == []
    # Semaphores are multiprocessing's, of whatever else runs on this machine.
    appeared = [path for path in Path("/dev/shm").iterdir() if path not in shared]
    assert [path for path in appeared if not path.name.startswith("sem.")] == []


#: Regions of another kind, and the backend that leads to them.
FAR: dict[str, tuple[str, type[TransferEngine]]] = {
    "file": ("tcp", FileEngine),
    "shm, not mapped": ("shm", OwnMemoryEngine),
}


#: Backends, and after a slash whose regions are memory of a device.
ON_DEVICES = [
    "tcp/both",
    "shm/here",
    "mooncake/here",
    "cuda/there",
    "faults(memory)/both",
]
#: TCP with the extension in C at neither end, or at one; "tcp" has it at both where it is built.
PURE_ENDS = {
    "tcp, pure": (False, False),
    "tcp, native to pure": (True, False),
    "tcp, pure to native": (False, True),
}
NEEDS_NATIVE = pytest.mark.skipif(
    bool(native.missing), reason=f"the extension is not built (`make native`): {native.missing}"
)
#: The same for TCP that is encrypted.
ENCRYPTED_ENDS = {
    "tcp, encrypted": (True, True),
    "tcp, encrypted, native to pure": (True, False),
    "tcp, encrypted, pure to native": (False, True),
}
PURE_TCP = [pytest.param(ends, marks=NEEDS_NATIVE) for ends in PURE_ENDS]
#: The second and third would repeat the first where the extension can't encrypt.
ENCRYPTED_TCP = [
    "tcp, encrypted",
    *[pytest.param(ends, marks=NEEDS_NATIVE) for ends in list(ENCRYPTED_ENDS)[1:]],
]


WORLDS = [
    *_worlds(),
    *PURE_TCP,
    *ENCRYPTED_TCP,
    "tcp, IPv6",
    "faults(memory)",
    *FAR,
    *ON_DEVICES,
]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend, and every kind of memory."""
    with ExitStack() as stack:
        world = _world_of(request.param, stack)
        yield world
        world.check()


def _world_of(param: str, stack: ExitStack) -> World:
    if param == "tcp, IPv6":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this machine has no IPv6 loopback: {error}")
        return World("tcp", stack, bind="::1")
    if param in ENCRYPTED_ENDS:
        key = ClusterKey("what crosses this wire is encrypted")
        return World("tcp", stack, native=ENCRYPTED_ENDS[param], key=key)
    if param in PURE_ENDS:
        return World("tcp", stack, native=PURE_ENDS[param])
    param, _, on_device = param.partition("/")
    kind, far = FAR.get(param, (param, TransferEngine))
    return World(kind, stack, far, on_device=on_device)


@pytest.fixture(
    params=[
        *_worlds(far=True),
        *PURE_TCP,
        "tcp, encrypted",
        "shm,tcp",
        "shm, not mapped",
        "tcp/both",
    ]
)
def far_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend that leads into another process."""
    with ExitStack() as stack:
        yield _world_of(request.param, stack)


@pytest.fixture(params=_worlds(host_memory=True))
def host_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend that reaches memory of the host."""
    with ExitStack() as stack:
        yield _world_of(request.param, stack)


@pytest.fixture(params=["memory", "tcp", *PURE_TCP, "shm,tcp"])
def checked_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Backends whose owner checks each access, the last one beside one that maps memory."""
    with ExitStack() as stack:
        world = _world_of(request.param, stack)
        yield world
        world.check()


@pytest.fixture
def make_world() -> Iterator[Callable[[str], World]]:
    """One backend, chosen by the test."""
    with ExitStack() as stack:
        yield lambda kind: World(kind, stack)
