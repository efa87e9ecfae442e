"""RDMA on real devices: rails that fail and return, and what is refused. See `make test-rdma`.

The rails of two nodes, as the virtual machine sets them up: devices rxa0, rxa1 on interfaces
ra0, ra1 for this end; rxb0, rxb1 on rb0, rb1, which are wired to them, for the other.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess, fill_seeded
from halfmoon_transfer import (
    Lost,
    Notification,
    Piece,
    Rejected,
    Transfer,
    TransferEngine,
    TransferSettings,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.rdma import rail_notifications, rdma_handshake, verbs
from halfmoon_transfer.backends.rdma.link import RdmaLink
from halfmoon_transfer.backends.rdma.rail import Rail
from halfmoon_transfer.backends.rdma.rail_health import RdmaPeerGone
from halfmoon_transfer.backends.rdma.rdma_backend import RdmaBackend
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    NotificationResult,
    RdmaRegionGrant,
)
from halfmoon_transfer.backends.rdma.rdma_memory import RdmaMemoryTable
from halfmoon_transfer.devices.device_interface import DmaBuf
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.devices.emulated_device import EmulatedBuffer, EmulatedDevice
from halfmoon_transfer.devices.pinned_pool import PinnedPool
from halfmoon_transfer.interface import BackendUnavailable
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.byte_ops import checksum
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.threads.stop_signal import StopSignal
from tests.installed_programs import needs_programs

Eventually = Callable[..., None]
MIB = 1024 * 1024
PATIENCE_S = 120.0
OURS, THEIRS = ("rxa0", "rxa1"), ("rxb0", "rxb1")


def why_not(*needed: str) -> str:
    """Why tests with devices can't run; empty if they can."""
    try:
        names = verbs.device_names()
    except BackendUnavailable as error:
        return str(error)
    missing = [name for name in needed if name not in names]
    if missing or not names:
        return f"no RDMA devices {', '.join(missing) or 'at all'}; there are {names}"
    return ""


def needs(*devices: str) -> Callable[[Any], Any]:
    reason = why_not(*devices)
    return lambda test: pytest.mark.rdma(pytest.mark.skipif(bool(reason), reason=reason)(test))


# Without devices.


@pytest.mark.skipif(not why_not(), reason="this machine has RDMA devices")
def test_a_machine_without_devices_says_so_or_leaves_it_out_as_asked() -> None:
    with pytest.raises(BackendUnavailable, match="backend rdma"):
        TransferEngine.open("x", metadata=MemoryStore(), backends=("rdma", "tcp"))
    with TransferEngine.open("x", metadata=MemoryStore(), backends=("rdma?", "tcp")) as engine:
        assert set(engine.descriptor.endpoints) == {"tcp"}


def test_without_pyverbs_the_message_says_where_it_comes_from() -> None:
    program = (
        "import sys; sys.modules['pyverbs'] = None\n"
        "from halfmoon_transfer.backends.rdma import rdma_backend, verbs\n"
        "try: verbs.device_names()\n"
        "except OSError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "python3-pyverbs" in said.stdout, said.stderr


class Card:
    """A network card that says what it was told to register, and takes it or does not."""

    name = "card"

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.told: list[tuple[bool, int, int, bool]] = []
        self.closed = 0
        self.context = self

    def register_dma_buf(self, fd: int, offset: int, n_bytes: int, *, writable: bool) -> Any:
        same_file = os.fstat(fd).st_size == 8192
        self.told.append((same_file, offset, n_bytes, writable))
        if self.refusal:
            raise verbs.VerbsError(self.refusal)
        return SimpleNamespace(lkey=1, rkey=77, close=self._close)

    def _close(self) -> None:
        self.closed += 1


class Exporting(EmulatedDevice):
    """A device whose driver exports its memory: as a file that stands for a dma-buf."""

    def dma_buf(self, address: int, n_bytes: int) -> DmaBuf:
        fd = os.memfd_create("pages")
        os.truncate(fd, 8192)
        return DmaBuf(fd, 100)


def memory_on(device: type[EmulatedDevice], card: Card, stack: contextlib.ExitStack) -> Any:
    regions = RegionTable("here", 1)
    driver = device("emulated:0")
    stack.callback(driver.close)
    pool = PinnedPool(memoryview(bytearray(65536)))
    span = EmulatedBuffer(4000).span()
    region = regions.register_backed(DeviceRegion(span, driver, pool), "emulated:0")
    return RdmaMemoryTable(regions, {card.name: cast("RdmaDevice", card)}), region


def test_memory_of_a_device_is_lent_as_the_dma_buf_that_its_driver_exports() -> None:
    card = Card()
    with contextlib.ExitStack() as stack:
        table, region = memory_on(Exporting, card, stack)
        # Bytes of it are addressed by their place in the dma-buf.
        assert table.lend(1, region.key) == RdmaRegionGrant(100, 4000, True, {"card": 77})
        assert table.lend(1, region.key).rkeys == {"card": 77}
        assert card.told == [(True, 100, 4000, True)]
        held = [
            str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
        ]
        assert not any("memfd:pages" in each for each in held)
        with pytest.raises(AccessRefused), table.borrow([region]):
            pass
        table.revoke(region.key)
        assert card.closed == 1


@pytest.mark.parametrize(
    ("device", "refusal"),
    [(Exporting, "not supported"), (EmulatedDevice, "")],
    ids=["the card does not take it", "the driver exports none"],
)
def test_memory_of_a_device_that_no_card_can_reach_is_refused_for_the_next_path(
    device: type[EmulatedDevice], refusal: str
) -> None:
    card = Card(refusal)
    with contextlib.ExitStack() as stack:
        table, region = memory_on(device, card, stack)
        with pytest.raises(AccessRefused) as refused:
            table.lend(1, region.key)
        assert refused.value.status is AccessStatus.NOT_SHAREABLE


# With devices.


def connected(make_world: Any) -> tuple[Any, Any]:
    world = make_world("rdma")
    return world.open("here"), world.open("there")


def backend_of(engine: TransferEngine) -> RdmaBackend:
    backend = engine.backend("rdma")
    assert isinstance(backend, RdmaBackend)
    return backend


def move(engine: TransferEngine, op: Any, *pieces: Piece) -> Any:
    return engine.submit(op, pieces, PATIENCE_S).result(PATIENCE_S)


@needs()
def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(BackendUnavailable, match=r"no device nic9; there are: \w+"):
        TransferEngine.open(
            "x",
            metadata=MemoryStore(),
            backends=("rdma",),
            settings=TransferSettings(rdma_devices=("nic9",)),
        )


@needs()
def test_taking_one_region_back_harms_no_transfer_of_another(make_world: Any) -> None:
    here, there = connected(make_world)
    n_bytes = 2 * MIB
    local, kept = here.allocate(n_bytes), there.allocate(n_bytes)
    fill_seeded(local.view, 1)
    for _ in range(5):
        taken = there.allocate(n_bytes)
        doomed = Piece(local.region, 0, taken.region, 0, n_bytes)
        move(here, "write", doomed)
        late = [here.submit("write", [doomed], PATIENCE_S) for _ in range(3)]
        good = [
            here.submit("write", [Piece(local.region, 0, kept.region, 0, n_bytes)], PATIENCE_S)
            for _ in range(3)
        ]
        there.unregister(taken.region)
        taken.view[:] = bytes(n_bytes)
        for transfer in late:
            with contextlib.suppress(Rejected):
                transfer.result(PATIENCE_S)
        for transfer in good:
            transfer.result(PATIENCE_S)
        assert not any(taken.view), "bytes came after the region was taken back"
        assert kept.view == local.view
        kept.view[:] = bytes(n_bytes)
        del taken
    assert backend_of(here).impaired_rails() == {}


@needs()
def test_a_local_region_taken_back_during_its_transfer_ends_it_one_way_or_the_other(
    make_world: Any,
) -> None:
    here, there = connected(make_world)
    remote = there.allocate(4 * MIB)
    for _ in range(3):
        local = here.allocate(4 * MIB)
        transfer = here.submit(
            "read", [Piece(local.region, 0, remote.region, 0, 4 * MIB)], PATIENCE_S
        )
        here.unregister(local.region)
        with contextlib.suppress(Rejected):
            transfer.result(PATIENCE_S)
        del local


@needs()
def test_a_cancelled_read_leaves_its_memory_alone(make_world: Any) -> None:
    here, there = connected(make_world)
    local, remote = here.allocate(8 * MIB), there.allocate(8 * MIB)
    fill_seeded(remote.view, 2)
    for _ in range(3):
        transfer = here.submit(
            "read", [Piece(local.region, 0, remote.region, 0, 8 * MIB)], PATIENCE_S
        )
        transfer.cancel()
        with contextlib.suppress(Exception):
            transfer.result(PATIENCE_S)
        local.view[:] = bytes(8 * MIB)
        move(here, "write", Piece(local.region, 0, remote.region, 0, 1))
        assert not any(local.view)
        fill_seeded(remote.view, 2)


@needs()
def test_links_are_kept_at_most_as_many_as_lanes_and_closed_with_the_peer(
    make_world: Any, eventually: Eventually
) -> None:
    here, there = connected(make_world)
    local, remote = here.allocate(MIB), there.allocate(MIB)
    transfers = [
        here.submit("write", [Piece(local.region, 0, remote.region, 0, MIB)], PATIENCE_S)
        for _ in range(10)
    ]
    for transfer in transfers:
        transfer.result(PATIENCE_S)
    assert 1 <= here.stats().n_connections <= 2
    here.release_peer("there")
    assert here.stats().n_connections == 0
    eventually(lambda: there.stats().n_connections == 0)


@needs()
def test_strangers_on_the_side_channel_get_nothing(make_world: Any, eventually: Eventually) -> None:
    here, there = connected(make_world)
    local, memory = here.allocate(100), there.allocate(100)
    host, port = addresses.split_address(there.descriptor.endpoints["rdma"].address, 0)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x01\xc1", b"\0\0\0\0", b"\0\0\0\x09half"):
        with socket.create_connection((host, port), timeout=PATIENCE_S) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    eventually(lambda: there.stats().n_malformed == 4)
    move(here, "read", Piece(local.region, 0, memory.region, 0, 100))


@needs()
def test_a_driver_that_wants_an_object_for_each_operation_is_served(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = verbs.VerbsContext.queue_pair
    monkeypatch.setattr(
        verbs.VerbsContext,
        "queue_pair",
        lambda self, queue, depth, *, extended=True: made(self, queue, depth, extended=False),
    )
    here, there = connected(make_world)
    local, remote = here.allocate(5 * MIB), there.allocate(5 * MIB)
    for op, source, target in (("write", local, remote), ("read", remote, local)):
        fill_seeded(source.view, 5)
        sent = bytes(source.view)
        target.view[:] = bytes(5 * MIB)
        move(here, op, Piece(local.region, 0, remote.region, 0, 5 * MIB))
        assert target.view == sent


# Notifications.


@contextlib.contextmanager
def dialled(here: TransferEngine, there: TransferEngine) -> Iterator[tuple[RdmaLink, Rail]]:
    """A link of its own, and a connected rail of it."""
    link = backend_of(here)._dial(there.descriptor, StopSignal.after(PATIENCE_S))
    try:
        link.connect(link.rails[0])
        yield link, link.rails[0]
    finally:
        link.close()


@needs()
def test_a_notice_that_arrived_before_its_rail_was_fenced_is_answered_before_the_fence(
    make_world: Any,
) -> None:
    here, there = connected(make_world)
    notice = OutgoingNotification(os.urandom(16), "here", b"just in time")
    with dialled(here, there) as (link, rail):
        assert rail.announce(rail_notifications.encode(there.generation, notice))
        assert there.notifications(PATIENCE_S) == Notification("here", b"just in time")
        rail.drain()
        assert link._fence(rail) == NotificationResult(notice.id, AccessStatus.OK)
        # Sent again over a rail that is connected anew, it is still the same one.
        link.connect(rail)
        assert link.announce(
            rail, notice.id, rail_notifications.encode(there.generation, notice)
        ) == NotificationResult(notice.id, AccessStatus.OK)
        assert there.notifications() is None


@needs()
@pytest.mark.parametrize("body", [b"\xc1", b"\x90", bytes(rdma_handshake.SLOT_BYTES)])
def test_who_announces_what_is_no_notice_is_hung_up_on(
    make_world: Any, eventually: Eventually, body: bytes
) -> None:
    here, there = connected(make_world)
    with dialled(here, there) as (link, rail), pytest.raises(RdmaPeerGone):
        link.announce(rail, bytes(16), body)
    eventually(lambda: there.stats().n_malformed == 1)
    assert there.notifications() is None
    local, memory = here.allocate(10), there.allocate(10)
    move(here, "read", Piece(local.region, 0, memory.region, 0, 10))


# Rails that fail.


class Rails:
    """The virtual machine's wires: cut them, mend them, count what goes over them."""

    def cut(self, rail: int, how: str) -> None:
        match how:
            case "own side down":
                self._run("ip", "link", "set", f"ra{rail}", "down")
            case "far side down":
                self._run("ip", "link", "set", f"rb{rail}", "down")
            case "all lost":
                self._run(*f"tc qdisc add dev ra{rail} root netem loss 100%".split())

    def mend(self, rail: int) -> None:
        subprocess.run(
            ["tc", "qdisc", "del", "dev", f"ra{rail}", "root"], capture_output=True, check=False
        )
        # A link that was down has lost its routes and neighbours.
        for end, other, table in (("a", "b", 1000), ("b", "a", 1001)):
            ours, theirs = (1, 2) if end == "a" else (2, 1)
            device = f"r{end}{rail}"
            self._run("ip", "link", "set", device, "up")
            self._run(
                *f"ip route replace 10.10.{rail}.{theirs} dev {device}".split(),
                *f"src 10.10.{rail}.{ours} table {table}".split(),
            )
            self._run(
                *f"ip neigh replace 10.10.{rail}.{theirs} dev {device} nud permanent".split(),
                *f"lladdr 02:00:00:00:0{rail}:0{other}".split(),
            )

    def sent(self, rail: int) -> int:
        """Bytes that have left our side of it."""
        return int(Path(f"/sys/class/net/ra{rail}/statistics/tx_bytes").read_text())

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def rails() -> Iterator[Rails]:
    wires = Rails()
    yield wires
    for rail in range(2):
        wires.mend(rail)


@pytest.fixture
def two_nodes() -> Iterator[tuple[TransferEngine, SegmentProcess]]:
    """An engine here, and a segment of 64 MiB in another process, over two rails."""
    metadata = MemoryStore()
    with (
        TransferEngine.open(
            "here",
            metadata=metadata,
            backends=("rdma",),
            settings=TransferSettings(rdma_devices=OURS),
        ) as here,
        SegmentProcess(
            "there", 1, "rdma", 64 * MIB, metadata, TransferSettings(rdma_devices=THEIRS)
        ) as there,
    ):
        yield here, there


def in_the_machine(test: Any) -> Any:
    """Mark a test that takes rails away from both ends."""
    return needs_programs("tc")(needs(*OURS, *THEIRS)(test))


@in_the_machine
@pytest.mark.timeout(280)
@pytest.mark.parametrize("how", ["own side down", "far side down", "all lost"])
def test_a_rail_may_be_cut_under_64_mib_each_way_and_returns(
    two_nodes: tuple[TransferEngine, SegmentProcess],
    rails: Rails,
    eventually: Eventually,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    here, there = two_nodes
    n_bytes, step = 64 * MIB, 4 * MIB
    local = here.allocate(n_bytes)

    def impaired() -> set[str]:
        return {pair.local for pair in backend_of(here).impaired_rails()}

    def carry_and_cut(op: Any) -> tuple[float, float]:
        """All bytes in transfers of `step`; seconds in all, and from the cut to rail 1 out."""
        begun = time.monotonic()

        def submit(at: int) -> Transfer:
            return here.submit(op, [Piece(local.region, at, there.region, at, step)], PATIENCE_S)

        transfers = [submit(at) for at in range(0, n_bytes, step)]

        def noticed() -> bool:
            # Only traffic meets the cut; on a busy machine all may have gone through before it.
            if all(transfer.done() for transfer in transfers):
                transfers.append(submit(0))
            return impaired() != set()

        transfers[2].result(PATIENCE_S)
        was_cut = time.monotonic()
        rails.cut(1, how)
        eventually(noticed, within_s=PATIENCE_S)
        failover_s = time.monotonic() - was_cut
        for transfer in transfers:
            assert transfer.result(PATIENCE_S).path == ("rdma",)
        return time.monotonic() - begun, failover_s

    for op, seed in (("write", 1), ("read", 2)):
        said = there.ask("fill 0") if op == "write" else there.ask(f"fill {seed}")
        if op == "write":
            fill_seeded(local.view, seed)
            said = str(checksum(local.view))
        seconds, failover_s = carry_and_cut(op)
        arrived = there.ask("digest") if op == "write" else str(checksum(local.view))
        assert arrived == said
        assert impaired() == {"rxa1"}
        rails.mend(1)
        mended = time.monotonic()
        eventually(lambda: impaired() == set(), within_s=PATIENCE_S)
        back_s = time.monotonic() - mended
        before = rails.sent(1)
        move(here, "write", Piece(local.region, 0, there.region, 0, 4 * step))
        assert rails.sent(1) - before > step / 4, "the rail is back, but nobody uses it"
        with capsys.disabled():
            print(
                f"\n{op} of 64 MiB, {how}: {seconds:.2f} s in all, rail out {failover_s:.2f} s "
                f"after the cut, used again {back_s:.2f} s after the repair"
            )


@in_the_machine
@pytest.mark.parametrize("how", ["own side down", "far side down", "all lost"])
def test_notifications_arrive_once_each_while_a_rail_is_cut(
    make_world: Any, rails: Rails, how: str
) -> None:
    here, there = connected(make_world)
    local, remote = here.allocate(100), there.allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    messages = [str(number).encode() for number in range(40)]
    for at, message in enumerate(messages):
        transfer = here.submit("write", [piece], PATIENCE_S, notify=message)
        if at == 15:
            rails.cut(0, how)
        assert transfer.result(PATIENCE_S).path == ("rdma",)
    assert {pair.local for pair in backend_of(here).impaired_rails()} == {"rxa0"}
    got = []
    while (notification := there.notifications()) is not None:
        got.append(notification.message)
    assert got == messages


@in_the_machine
def test_with_all_rails_cut_a_transfer_goes_another_way_or_is_lost(
    rails: Rails, eventually: Eventually
) -> None:
    metadata = MemoryStore()
    settings = TransferSettings(rdma_devices=OURS)
    with (
        TransferEngine.open(
            "only", metadata=metadata, backends=("rdma",), settings=settings
        ) as only,
        TransferEngine.open(
            "both", metadata=metadata, backends=("rdma", "tcp"), settings=settings
        ) as both,
        SegmentProcess(
            "there", 1, "rdma,tcp", MIB, metadata, TransferSettings(rdma_devices=THEIRS)
        ) as there,
    ):
        first, second = only.allocate(MIB), both.allocate(MIB)
        for engine, memory in ((only, first), (both, second)):
            move(engine, "write", Piece(memory.region, 0, there.region, 0, MIB))
        fill_seeded(second.view, 3)
        for rail in range(2):
            rails.cut(rail, "all lost")
        with pytest.raises(Lost, match=r"no acknowledgement|no rail"):
            move(only, "write", Piece(first.region, 0, there.region, 0, MIB))
        report = move(both, "write", Piece(second.region, 0, there.region, 0, MIB))
        assert report.path == ("tcp",)
        assert there.ask("digest") == str(checksum(second.view))
        for rail in range(2):
            rails.mend(rail)
        fill_seeded(first.view, 4)

        def works_again() -> bool:
            try:
                move(only, "write", Piece(first.region, 0, there.region, 0, MIB))
            except Lost:
                return False
            return True

        eventually(works_again, within_s=PATIENCE_S)
        assert there.ask("digest") == str(checksum(first.view))
        del memory, second


@needs(OURS[0], THEIRS[0])
def test_what_is_no_dma_buf_is_refused_by_the_device() -> None:
    context = verbs.VerbsContext(OURS[0])
    fd = os.memfd_create("ordinary")
    try:
        os.truncate(fd, 8192)
        with pytest.raises(verbs.VerbsError, match="registering 4096 bytes of a dma-buf"):
            context.register_dma_buf(fd, 0, 4096, writable=True)
    finally:
        os.close(fd)
        context.close()
