"""A real Mooncake Transfer Engine and ours, each as initiator and as target.

The wheel lives in an environment of its own under the user's cache folder, made when it is
first needed; without a package registry these tests are skipped. To make it anew, remove the
folder.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from halfmoon_metadata.http_server import metadata_app
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.processes.etcd_server import EtcdServer
from halfmoon_transfer import Memory, Piece, Rejected, TransferEngine, TransferSettings
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_api import Mooncake, MooncakeBuffer
from halfmoon_transfer.settings import MooncakeSettings
from tests.installed_programs import skip_without

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DRIVER = Path(__file__).with_name("wheel_peer.py")
P2P = "P2PHANDSHAKE"
PATIENCE_S = 60.0
KIB, MIB = 1024, 1024 * 1024
SIZES = [4 * KIB, 64 * KIB, MIB + 12, 16 * MIB]
ROOM = 16 * MIB

Start = Callable[..., "Wheel"]


# The environment.


@pytest.fixture(scope="session")
def wheel_python() -> Path:
    """The Python of an environment that holds the wheel."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    tag = f"{sys.implementation.cache_tag}-{WHEEL.partition('==')[2]}"
    folder = cache / "halfmoon" / "test-venvs" / f"mooncake-{tag}"
    python = folder / "bin" / "python"
    if not python.exists():
        _make_environment(folder)
    tried = subprocess.run(
        [python, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"the Mooncake wheel can't be loaded here: {_last_line(tried.stderr)}")
    return python


def _make_environment(folder: Path) -> None:
    """Make it beside and move it into place whole, so that an interrupted one is not used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as partial:
        made = Path(partial) / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
        # Its dependencies are for parts of it that aren't used here.
        pip = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install"]
        quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
        quick = ["--retries", "1", "--timeout", "20"]
        done = subprocess.run(
            [*pip, *quiet, *quick, WHEEL], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"{WHEEL} can't be installed: {_last_line(done.stderr)}")
        with contextlib.suppress(OSError):  # somebody else was quicker
            made.rename(folder)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


# The wheel.


class Wheel:
    """A process with a real Mooncake Transfer Engine and one registered buffer."""

    def __init__(
        self, python: Path, name: str, metadata: str, environment: dict[str, str], log: Path
    ) -> None:
        reading, writing = os.pipe()
        local = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
        # What the test run has on its own path is for another environment.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MC_"))}
        with log.open("a") as out:
            self._process = start_bound(
                [python, DRIVER, str(writing)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[writing],
                text=True,
                env=inherited | local | environment,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        code, port = self.ask("initialize", name, metadata)
        assert code == 0
        self.name = f"127.0.0.1:{port}" if metadata == P2P else name
        self.address: int = self.ask("allocate", ROOM)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, f"the wheel's process ended with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["is"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._answers.close()


@pytest.fixture(scope="module")
def start(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    log = tmp_path_factory.mktemp("wheel") / "log"
    with ExitStack() as stack:

        def begin(name: str = "127.0.0.1", metadata: str = P2P, **environment: str) -> Wheel:
            wheel = Wheel(wheel_python, name, metadata, environment, log)
            stack.callback(wheel.close)
            return wheel

        yield begin


@pytest.fixture(scope="module")
def p2p_wheel(start: Start) -> Wheel:
    return start()


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="module")
def url(store: MemoryStore) -> Iterator[str]:
    """Our metadata server over HTTP."""
    config = uvicorn.Config(metadata_app(store), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/metadata"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def http_wheel(start: Start, url: str) -> Wheel:
    return start("wheel", url)


@pytest.fixture(scope="module")
def etcd_url() -> Iterator[str]:
    skip_without("etcd")
    with EtcdServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def etcd_wheel(start: Start, etcd_url: str) -> Wheel:
    return start("wheel", etcd_url)


# Ours.


class Side:
    """One of our engines beside a wheel."""

    def __init__(self, engine: TransferEngine, wheel: Wheel) -> None:
        self.engine = engine
        self.wheel = wheel
        self.mooncake = Mooncake(engine)
        self.memory: Memory = engine.allocate(ROOM)
        self.address = self.mooncake.address(self.memory.region)

    def theirs(self) -> MooncakeBuffer:
        return next(
            each
            for each in self.mooncake.open(self.wheel.name).buffers
            if each.address == self.wheel.address
        )

    def move(self, op: Any, *pieces: Piece) -> Any:
        return self.engine.submit(op, pieces, PATIENCE_S).result(PATIENCE_S)


@pytest.fixture(params=["p2p", "http", "etcd"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    wheel = request.getfixturevalue(f"{request.param}_wheel")
    urls = {"http": "url", "etcd": "etcd_url"}
    metadata = request.getfixturevalue(urls[request.param]) if request.param in urls else P2P
    settings = TransferSettings(mooncake=MooncakeSettings(metadata=metadata))
    # A name of its own for each: the wheel remembers segments.
    with TransferEngine.open(
        f"us-{time.monotonic_ns()}",
        metadata=MemoryStore(),
        backends=("mooncake",),
        settings=settings,
    ) as engine:
        made = Side(engine, wheel)
        yield made
        engine.check()
        assert engine.stats().n_malformed == 0
        del made.memory


def bytes_of(seed: int, n_bytes: int) -> bytes:
    """As in the driver."""
    return random.Random(seed).randbytes(n_bytes)


# The wheel as initiator.


@pytest.mark.parametrize("n_bytes", SIZES)
def test_the_wheel_writes_to_us_and_reads_it_back(side: Side, n_bytes: int) -> None:
    wheel = side.wheel
    wheel.ask("fill", wheel.address, n_bytes, n_bytes)
    assert wheel.ask("write", side.mooncake.name, wheel.address, side.address, n_bytes) == 0
    assert side.memory.view[:n_bytes] == bytes_of(n_bytes, n_bytes)
    assert not any(side.memory.view[n_bytes : n_bytes + 100])
    side.memory.view[:n_bytes] = bytes_of(n_bytes + 1, n_bytes)
    assert wheel.ask("read", side.mooncake.name, wheel.address, side.address, n_bytes) == 0
    assert wheel.ask("holds", wheel.address, n_bytes, n_bytes + 1)


@pytest.mark.parametrize("op", ["write", "read"])
def test_the_wheel_moves_batches(side: Side, op: str) -> None:
    wheel, size = side.wheel, 30_000
    for i in range(64):
        wheel.ask("fill", wheel.address + i * 2 * size, size, i)
        side.memory.view[i * size : (i + 1) * size] = bytes_of(i + 100, size)
    theirs = [wheel.address + i * 2 * size for i in range(64)]
    ours = [side.address + i * size for i in range(64)]
    assert wheel.ask("batch", op, side.mooncake.name, theirs, ours, size) == 0
    for i in range(64):
        if op == "write":
            assert side.memory.view[i * size : (i + 1) * size] == bytes_of(i, size)
        else:
            assert wheel.ask("holds", theirs[i], size, i + 100)


@pytest.mark.parametrize("op", ["write", "read"])
def test_the_wheel_is_refused_what_is_not_ours(side: Side, op: str) -> None:
    wheel = side.wheel
    before = bytes(side.memory.view[-5000:])
    for offset, n_bytes in ((ROOM - 4000, 4001), (1, ROOM), (-8, 16)):
        address = side.address + offset
        assert wheel.ask(op, side.mooncake.name, wheel.address, address, n_bytes) < 0
    assert bytes(side.memory.view[-5000:]) == before
    # And goes on.
    assert wheel.ask(op, side.mooncake.name, wheel.address, side.address, 4096) == 0


def test_the_wheel_notifies_us_after_its_data(side: Side) -> None:
    wheel = side.wheel
    wheel.ask("fill", wheel.address, 5000, 9)
    ours = (side.mooncake.name, wheel.address, side.address, 5000)
    assert wheel.ask("write_and_notify", *ours, "wheel", "it is there") == 0
    assert side.mooncake.notifications() == [
        mooncake_records.MooncakeNotification("wheel", "it is there")
    ]
    assert side.memory.view[:5000] == bytes_of(9, 5000)


def test_the_wheel_sees_that_we_are_alive_and_finds_our_first_buffer(side: Side) -> None:
    assert side.wheel.ask("probe", side.mooncake.name) == 0
    assert side.wheel.ask("first_buffer", side.mooncake.name) == side.address


# Ours as initiator.


@pytest.mark.parametrize("n_bytes", SIZES)
def test_we_write_to_the_wheel_and_read_it_back(side: Side, n_bytes: int) -> None:
    buffer = side.theirs()
    side.memory.view[:n_bytes] = bytes_of(n_bytes + 2, n_bytes)
    side.move("write", Piece(side.memory.region, 0, buffer.region, 0, n_bytes))
    assert side.wheel.ask("holds", side.wheel.address, n_bytes, n_bytes + 2)
    side.wheel.ask("fill", side.wheel.address, n_bytes, n_bytes + 3)
    report = side.move("read", Piece(side.memory.region, 0, buffer.region, 0, n_bytes))
    assert side.memory.view[:n_bytes] == bytes_of(n_bytes + 3, n_bytes)
    assert (report.n_bytes, report.path, report.retries) == (n_bytes, ("mooncake",), 0)


def test_we_scatter_and_gather_over_the_wheels_memory(side: Side) -> None:
    buffer, size = side.theirs(), 30_000
    pieces = []
    for i in range(64):
        at = (i * 37 % 64) * 2 * size
        side.memory.view[i * size : (i + 1) * size] = bytes_of(i, size)
        pieces.append(Piece(side.memory.region, i * size, buffer.region, at, size))
    side.move("write", *pieces)
    for i, piece in enumerate(pieces):
        assert side.wheel.ask("holds", side.wheel.address + piece.remote_offset, size, i)
    expected = bytes(side.memory.view[: 64 * size])
    side.memory.view[: 64 * size] = bytes(64 * size)
    side.move("read", *pieces)
    assert side.memory.view[: 64 * size] == expected


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("n_bytes", [100, 8 * MIB])
def test_the_wheel_refuses_us_what_is_not_its_own(side: Side, op: str, n_bytes: int) -> None:
    buffer = side.theirs()
    forged = msgspec.structs.replace(buffer.region, length=10**12)
    with pytest.raises(Rejected, match="has no buffer that holds them"):
        side.move(op, Piece(side.memory.region, 0, forged, ROOM - 50, n_bytes))
    side.move(op, Piece(side.memory.region, 0, buffer.region, 0, 100))


def test_the_wheel_hears_our_notifications_and_answers_our_probe(side: Side) -> None:
    side.mooncake.notify(side.wheel.name, "us", "first")
    side.mooncake.notify(side.wheel.name, "us", "second ✓")
    assert side.wheel.ask("notifies") == [["us", "first"], ["us", "second ✓"]]
    side.mooncake.probe(side.wheel.name)


# Version 1.


def test_a_wheel_that_speaks_version_1_is_served(start: Start) -> None:
    wheel = start(MC_TCP_PROTO="1")
    with TransferEngine.open("us", metadata=MemoryStore(), backends=("mooncake",)) as engine:
        side = Side(engine, wheel)
        wheel.ask("fill", wheel.address, MIB, 5)
        there = (side.mooncake.name, wheel.address, side.address, MIB)
        assert wheel.ask("write", *there) == 0
        # Nobody tells it when the bytes are here: what it reads may be older than them.
        deadline = time.monotonic() + PATIENCE_S
        while side.memory.view[:MIB] != bytes_of(5, MIB):
            assert time.monotonic() < deadline, "the bytes did not come"
            time.sleep(0.005)
        wheel.ask("fill", wheel.address, MIB, 6)
        assert wheel.ask("read", *there) == 0
        assert wheel.ask("holds", wheel.address, MIB, 5)
        del side.memory


# Metadata over HTTP.


def test_a_cluster_id_keeps_clusters_apart(start: Start, url: str, store: MemoryStore) -> None:
    wheel = start("in-blue", url, MC_METADATA_CLUSTER_ID="blue")
    settings = TransferSettings(mooncake=MooncakeSettings(metadata=url, cluster="blue"))
    with TransferEngine.open(
        "us-in-blue", metadata=MemoryStore(), backends=("mooncake",), settings=settings
    ) as engine:
        side = Side(engine, wheel)
        side.move("read", Piece(side.memory.region, 0, side.theirs().region, 0, 100))
        assert wheel.ask("write", "us-in-blue", wheel.address, side.address, 100) == 0
        assert "mooncake/blue/ram/us-in-blue" in store.list("mooncake/blue/")
        del side.memory
    assert "mooncake/blue/ram/us-in-blue" not in store.list("mooncake/blue/")


# The end of a peer.
