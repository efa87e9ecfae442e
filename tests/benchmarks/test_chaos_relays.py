"""The relays between services, on real sockets, and full disks, on a real file system."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from benchmarks.chaos.chaos_cluster import plan_hosts
from benchmarks.chaos.service_relays import Link, LinkCondition, ServiceRelays

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
