"""The relays between services, on real sockets, and full disks, on a real file system."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import xxhash

from benchmarks.chaos.chaos_cluster import plan_hosts
from benchmarks.chaos.listening_ports import listening_ports, owner_of
from benchmarks.chaos.service_relays import Link, LinkCondition, ServiceRelays, worst_of
from benchmarks.chaos.small_disk import MountRefused, SmallDisk
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_scheduling.tiers.tier_commands import TierOutcome, WriteBack
from halfmoon_testing.block_client import SMALL_LAYOUT, block_content

ONE, OTHER = "decode-0", "kvstore-0"
WITHIN_S = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends_s, "it did not come about"
        time.sleep(0.01)


class Echo:
    """A service that sends back what it gets; `dial` reaches it over its relay."""

    def __init__(self, listens: str, relay: str) -> None:
        self._listener = socket.create_server((listens, 0))
        self.port = int(self._listener.getsockname()[1])
        self._relay = relay
        threading.Thread(target=self._accept, daemon=True).start()

    def dial(self) -> socket.socket:
        """Return a connection over the relay, which may begin to listen a moment later."""
        ends_s = time.monotonic() + WITHIN_S
        while True:
            try:
                return socket.create_connection((self._relay, self.port), timeout=WITHIN_S)
            except ConnectionRefusedError:
                assert time.monotonic() < ends_s, "the relay does not listen"
                time.sleep(0.01)

    def close(self) -> None:
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with ExitStack() as stack, suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                stack.enter_context(near)
                threading.Thread(target=self._echo, args=(near,), daemon=True).start()

    def _echo(self, near: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)


@pytest.fixture
def hosts() -> dict[str, tuple[str, str]]:
    return plan_hosts(os.getpid())


@pytest.fixture
def relays(hosts: dict[str, tuple[str, str]]) -> Iterator[ServiceRelays]:
    with ServiceRelays(hosts, lambda: {ONE: os.getpid()}) as relays:
        yield relays


@pytest.fixture
def echo(hosts: dict[str, tuple[str, str]], relays: ServiceRelays) -> Iterator[Echo]:
    """The service `OTHER`; this process counts as `ONE`."""
    echo = Echo(*hosts[OTHER])
    yield echo
    echo.close()


def exchange(near: socket.socket) -> None:
    near.sendall(b"x")
    assert near.recv(1) == b"x"


def receive(near: socket.socket, n_bytes: int) -> bytes:
    got = b""
    while len(got) < n_bytes and (data := near.recv(1 << 16)):
        got += data
    return got


def test_bytes_cross_a_relay_unchanged_and_so_does_the_end(
    echo: Echo, relays: ServiceRelays
) -> None:
    sent = random.Random(7).randbytes(1 << 20)
    with echo.dial() as near:
        threading.Thread(target=near.sendall, args=(sent,), daemon=True).start()
        assert receive(near, len(sent)) == sent
        near.shutdown(socket.SHUT_WR)
        assert near.recv(1) == b""
    assert relays.counts["connections relayed"] == 1
    assert relays.counts["bytes relayed"] == 2 * len(sent)


def test_a_relay_closes_its_port_when_its_service_does(echo: Echo) -> None:
    echo.dial().close()
    echo.close()

    def is_refused() -> bool:
        try:
            socket.create_connection((echo._relay, echo.port), timeout=WITHIN_S).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(is_refused)


def test_a_slow_link_delays_both_directions_and_keeps_the_order(
    echo: Echo, relays: ServiceRelays
) -> None:
    with echo.dial() as near:
        exchange(near)
        relays.set(Link(ONE, OTHER), LinkCondition(delay_s=(0.05, 0.1)))
        began_s = time.monotonic()
        for each in range(10):
            near.sendall(bytes([each]))
            time.sleep(0.005)
        assert receive(near, 10) == bytes(range(10))
        assert time.monotonic() - began_s >= 0.1
        relays.set(Link(ONE, OTHER), None)
        exchange(near)


def test_a_narrow_link_takes_the_time_of_its_bytes(echo: Echo, relays: ServiceRelays) -> None:
    with echo.dial() as near:
        relays.set(Link(OTHER), LinkCondition(bytes_per_s=1e6))
        began_s = time.monotonic()
        near.sendall(bytes(100_000))
        assert len(receive(near, 100_000)) == 100_000
        assert time.monotonic() - began_s >= 0.1


def test_a_stalled_link_holds_bytes_ends_and_new_connections_until_it_is_lifted(
    echo: Echo, relays: ServiceRelays
) -> None:
    with echo.dial() as near:
        exchange(near)
        relays.set(Link(ONE), LinkCondition(holds=True))
        near.sendall(b"held")
        near.shutdown(socket.SHUT_WR)
        with echo.dial() as later:
            later.sendall(b"later")
            for each in (near, later):
                each.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    each.recv(1)
                each.settimeout(WITHIN_S)
            relays.set(Link(ONE), None)
            assert receive(near, 4) == b"held"
            assert near.recv(1) == b""
            assert receive(later, 5) == b"later"


def test_a_cut_resets_the_connections_of_its_link_alone(echo: Echo, relays: ServiceRelays) -> None:
    with echo.dial() as near:
        exchange(near)
        links = Link(ONE, OTHER), Link(OTHER), Link("prefill-0", OTHER)
        assert [relays.n_connections(link) for link in links] == [1, 1, 0]
        assert relays.cut(Link("prefill-0")) == 0
        exchange(near)
        assert relays.cut(Link(ONE, OTHER)) == 1
        with pytest.raises(ConnectionResetError):
            near.recv(1)
    wait_until(lambda: relays.n_connections(Link(OTHER)) == 0)
    with echo.dial() as near:
        exchange(near)
    assert relays.counts["connections cut"] == 1


def test_damage_inverts_one_byte_of_a_transfer_and_none_of_zeromq(
    echo: Echo, relays: ServiceRelays
) -> None:
    for greeting, n_damaged in ((b"\0", 1), (b"\xff", 0)):
        with echo.dial() as near:
            near.sendall(greeting)
            assert near.recv(1) == greeting
            relays.damage(Link(ONE, OTHER), damages=True)
            near.sendall(bytes(1000))
            got = receive(near, 1000)
            assert got.count(0xFF) in (0, n_damaged, 2 * n_damaged)
            assert got.count(0) == 1000 - got.count(0xFF)
    assert 1 <= relays.counts["bytes damaged"] <= 2


def test_of_several_conditions_the_worst_holds() -> None:
    assert worst_of(()) == LinkCondition()
    slow, narrow = LinkCondition(delay_s=(0.1, 0.3)), LinkCondition(bytes_per_s=1e3)
    quick, stalled = LinkCondition(delay_s=(0.1, 0.2)), LinkCondition(holds=True)
    assert worst_of((slow, narrow, quick)) == LinkCondition((0.1, 0.3), 1e3)
    assert worst_of((stalled, slow)) == LinkCondition((0.1, 0.3), holds=True)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_tells_listeners_and_owners(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", 0))
        listener.listen()
        address = ("127.0.0.1", listener.getsockname()[1])
        assert address in listening_ports(frozenset({"127.0.0.1"}))
        assert address not in listening_ports(frozenset({"127.9.9.9"}))
        with socket.create_connection(address) as near:
            ends = near.getsockname(), address
            assert owner_of(*ends, {"init": 1 << 30, "us": os.getpid()}) == "us"
            assert owner_of(*ends, {}) == ""
            assert owner_of(address, address, {"us": os.getpid()}) == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk", 2)
    try:
        disk.mount()
    except MountRefused as error:
        pytest.skip(f"this process may not mount a file system: {error}")
    yield disk
    disk.unmount()


def write_back(folder: SegmentFolder, i: int, slot: int) -> TierOutcome:
    block = BlockHash(i.to_bytes(16, "big"))
    content = bytearray(block_content(block, SMALL_LAYOUT.block_bytes))
    record = BlockRecord(block, None, 0, xxhash.xxh3_64_intdigest(content))
    return folder.perform(WriteBack(record, 0, slot), memoryview(content))


def test_a_full_disk_refuses_writes_to_slots_without_room_until_it_is_freed(
    small_disk: SmallDisk,
) -> None:
    folder = SegmentFolder(small_disk.path, 1 << 20, generation=1)
    folder.open(SMALL_LAYOUT)
    assert write_back(folder, 1, 0) == "ok"
    assert small_disk.fill(random.Random(1)) >= folder.n_slots - 1
    outcomes = {write_back(folder, slot, slot) for slot in range(1, folder.n_slots)}
    assert outcomes == {"failed"}
    small_disk.free()
    assert {write_back(folder, slot, slot) for slot in range(folder.n_slots)} == {"ok"}
    folder.close()


def test_a_start_on_a_full_disk_finds_no_room_and_the_next_one_does(small_disk: SmallDisk) -> None:
    for is_full in (False, True, False):
        if is_full:
            small_disk.empty()
            small_disk.fill_rest()
        folder = SegmentFolder(small_disk.path, 1 << 20, generation=1)
        folder.open(SMALL_LAYOUT)
        assert (folder.n_slots == 0) is is_full
        folder.close()
        small_disk.free()
