"""TCP over several addresses: all are used, those that fail are done without, nothing is wrong."""

import gc
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.transfer_soak import TcpValve, TransferSoak
from halfmoon_transfer import Cancelled, Lost, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.tcp import multi_rail
from halfmoon_transfer.backends.tcp.route_lookup import nic_towards
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor, rail_name
from halfmoon_transfer.planning.topology import Topology

World = Any
Eventually = Callable[..., None]
PATIENCE_S = 60.0
MIB = 1024 * 1024
HOSTS = ("127.0.0.1", "127.0.0.2")
#: Quick to notice; and many tries, as a busy machine may look like a silent rail.
QUICK = TransferSettings(
    slice_bytes=64 * 1024,
    batch_bytes=256 * 1024,
    lanes=4,
    tries_per_path=50,
    rail_stall_s=0.4,
    rail_cooldown_s=0.05,
    rail_cooldown_max_s=0.4,
)


def addresses(engine: TransferEngine) -> list[str]:
    return [rail.address for rail in engine.descriptor.rails("tcp")]


class Pair:
    """Two engines; the far one listens at two addresses, and the second can be cut."""

    def __init__(self, world: World, valve: TcpValve) -> None:
        self.valve = valve
        self.faults = FaultInjection("tcp", FaultPlan())
        self.here: TransferEngine = world.open("here", backends=(self.faults,), settings=QUICK)
        self.there: TransferEngine = world.open("there", bind=HOSTS, port=free_port())
        first, second = (split_address(address, 0) for address in addresses(self.there))
        assert first[1] == second[1]
        valve.target = second
        # Peers dial the valve in place of the second address.
        self.there.close()
        self.there = world.open(
            "there",
            bind=HOSTS,
            port=second[1],
            advertise=(first[0], valve.address),
        )
        self.rails = addresses(self.there)


@pytest.fixture
def pair(make_world: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        valve = stack.enter_context(TcpValve(HOSTS[1]))
        # Engines are closed before the valve, or it would wait for their connections.
        made = Pair(make_world("tcp"), valve)
        stack.callback(made.there.close)
        stack.callback(made.here.close)
        yield made


def block(pair: Pair, n_bytes: int) -> tuple[Any, Any, Piece]:
    local, remote = pair.here.allocate(n_bytes), pair.there.allocate(n_bytes)
    return local, remote, Piece(local.region, 0, remote.region, 0, n_bytes)


# Addresses.


def test_every_address_is_listened_at_and_published(make_world: Any) -> None:
    there = make_world("tcp").open("there", bind=HOSTS)
    published = addresses(there)
    assert [address.partition(":")[0] for address in published] == list(HOSTS)
    assert list(there.descriptor.endpoints) == ["tcp", "tcp/1"]
    for address in published:
        socket.create_connection(split_address(address, 0), timeout=PATIENCE_S).close()


def test_rails_are_the_numbered_endpoints_without_a_gap() -> None:
    endpoints = {rail_name("tcp", index): Endpoint(str(index)) for index in (0, 1, 3)}
    found = SegmentDescriptor("there", 1, "host", endpoints)
    assert [rail.address for rail in found.rails("tcp")] == ["0", "1"]
    assert found.rails("shm") == ()


def test_as_many_addresses_are_advertised_as_are_bound(make_world: Any) -> None:
    world = make_world("tcp")
    with pytest.raises(ValueError, match="2 addresses to listen at and 1 to advertise"):
        world.open("there", bind=HOSTS, advertise="127.0.0.1")
    with pytest.raises(ValueError, match="0 addresses"):
        world.open("there", bind=[])


def test_an_address_that_is_not_ours_leaves_nothing_listening(make_world: Any) -> None:
    port = free_port()
    with pytest.raises(OSError):
        make_world("tcp").open("there", bind=("127.0.0.1", "192.0.2.1"), port=port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


# Use.


def test_a_large_transfer_uses_all_rails_and_is_right(pair: Pair) -> None:
    local, remote, piece = block(pair, 8 * MIB)
    local.view[:] = random.Random(1).randbytes(8 * MIB)
    report = pair.here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
    assert remote.view == local.view
    assert report.path == ("faults(tcp)",)
    assert len(pair.valve.pumps()) >= 2, "nothing went over the second rail"
    local.view[:] = bytes(8 * MIB)
    pair.here.submit("read", [piece], PATIENCE_S).result(PATIENCE_S)
    assert remote.view == local.view


def test_a_rail_that_is_partitioned_is_done_without_and_returns(
    pair: Pair, eventually: Eventually
) -> None:
    local, remote, piece = block(pair, 100)
    pair.faults.partition(pair.rails[0])
    for number in range(20):
        local.view[:] = bytes([number]) * 100
        pair.here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
        assert remote.view == local.view
    n_retries = pair.here.stats().n_retries
    assert n_retries >= 1
    pair.faults.heal(pair.rails[0])
    pair.faults.partition(pair.rails[1])

    def first_rail_works() -> bool:
        report = pair.here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
        return bool(report.retries == 0)

    eventually(first_rail_works)


def held_in_the_valve(pair: Pair, eventually: Eventually, piece: Piece) -> Any:
    """A write that was sent over the second rail and hangs there; the first one works."""
    pair.faults.partition(pair.rails[0])
    pair.here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
    pair.valve.shut()
    transfer = pair.here.submit("write", [piece], PATIENCE_S)
    eventually(lambda: pair.valve.n_held_bytes > 0)
    pair.faults.heal(pair.rails[0])
    return transfer


def test_a_rail_that_falls_silent_costs_its_patience_and_no_more(
    pair: Pair, eventually: Eventually
) -> None:
    local, remote, piece = block(pair, 4 * MIB)
    local.view[:] = random.Random(5).randbytes(4 * MIB)
    report = held_in_the_valve(pair, eventually, piece).result(PATIENCE_S)
    assert remote.view == local.view
    assert report.retries > 0
    pair.valve.open()


def test_what_a_silent_rail_held_back_does_not_land_later(
    pair: Pair, eventually: Eventually
) -> None:
    """The old bytes arrive when the new ones are there already: they must change nothing."""
    local, remote, piece = block(pair, 2 * MIB)
    local.view[:] = b"old!" * (MIB // 2)
    transfer = held_in_the_valve(pair, eventually, piece)
    held = pair.valve.pumps()
    assert transfer.result(PATIENCE_S).retries > 0
    local.view[:] = b"new!" * (MIB // 2)
    pair.here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
    assert remote.view == local.view
    pair.valve.open()
    # All that was held is delivered, or refused, when these have ended.
    eventually(lambda: not any(pump.is_alive() for pump in held))
    eventually(lambda: pair.here.stats().n_live == 0)
    assert remote.view == local.view


def test_a_write_that_was_cancelled_lands_no_more_once_its_peer_is_settled(
    pair: Pair, eventually: Eventually
) -> None:
    """Its bytes are on their way when the caller is told that it has ended."""
    local, remote, piece = block(pair, 2 * MIB)
    assert not pair.here.is_unsettled(remote.region)
    local.view[:] = b"old!" * (MIB // 2)
    transfer = held_in_the_valve(pair, eventually, piece)
    held = pair.valve.pumps()
    transfer.cancel()
    with pytest.raises(Cancelled):
        transfer.result(PATIENCE_S)
    assert pair.here.is_unsettled(remote.region)
    pair.here.settle(remote.region, PATIENCE_S)
    assert not pair.here.is_unsettled(remote.region)
    remote.view[:] = b"mine" * (MIB // 2)  # its owner has given it to other data
    pair.valve.open()
    eventually(lambda: not any(pump.is_alive() for pump in held))
    assert remote.view == b"mine" * (MIB // 2)


def test_an_owner_that_does_not_answer_leaves_a_peer_unsettled(
    pair: Pair, eventually: Eventually
) -> None:
    _, remote, piece = block(pair, 2 * MIB)
    transfer = held_in_the_valve(pair, eventually, piece)
    transfer.cancel()
    with pytest.raises(Cancelled):
        transfer.result(PATIENCE_S)
    pair.there.close()
    with pytest.raises(Lost):
        pair.here.settle(remote.region, 0.5)
    assert pair.here.is_unsettled(remote.region)
    pair.valve.open()


# Nearness.


def test_a_card_near_the_memory_is_preferred(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {HOSTS[0]: "far_card", HOSTS[1]: "near_card"}
    monkeypatch.setattr(multi_rail, "nic_towards", cards.__getitem__)
    world = make_world("tcp")
    near = Topology({"cpu:1": (("near_card",), ("far_card",))})
    with TcpValve(HOSTS[0]) as valve:
        there = world.open("there", bind=HOSTS, advertise=(valve.address, HOSTS[1]))
        valve.target = split_address(addresses(there)[1], 0)
        with world.open("here", backends=("tcp",), topology=near) as here:
            remote = there.allocate(100)
            for location, used in (("cpu:1", False), ("cpu:0", True)):
                local = here.allocate(100, location)
                piece = Piece(local.region, 0, remote.region, 0, 100)
                for _ in range(4):
                    here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
                assert bool(valve.pumps()) is used, location


def test_the_card_towards_an_address_is_found_out() -> None:
    assert nic_towards("127.0.0.1") == nic_towards("127.0.0.2") == "lo"
    assert nic_towards("not an address") == ""


# Everything at once.


@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_transfers_over_two_paths_with_one_cut_at_random_are_all_right(
    pair: Pair, eventually: Eventually, seed: int
) -> None:
    soak = TransferSoak(pair.here, pair.there, n_workers=4, seed=seed)
    assert soak.run(40, PATIENCE_S).errors == ()
    # The prober and the watch come and go; couriers and servers' threads are as many as needed.
    threads = threading.active_count() + 2
    over = threading.Event()

    def cut_and_mend() -> None:
        dice = random.Random(seed)
        while not over.is_set():
            pair.valve.shut()
            time.sleep(dice.uniform(0.0, 0.5))
            pair.valve.open()
            pair.faults.partition(dice.choice(pair.rails))
            time.sleep(dice.uniform(0.0, 0.1))
            for rail in pair.rails:
                pair.faults.heal(rail)
            time.sleep(dice.uniform(0.0, 0.2))

    bad_luck = threading.Thread(target=cut_and_mend)
    bad_luck.start()
    try:
        # It counts what it did before, too.
        result = soak.run(800, PATIENCE_S)
    finally:
        over.set()
        bad_luck.join()
    assert result.errors == ()
    assert result.wrong == ()
    assert (result.n_reported_twice, result.n_notified_wrong) == (0, 0)
    assert result.n_notified >= 200
    # Nothing lands later, and everything that was needed is given back.
    before = soak.far_bytes()
    stats = pair.here.stats()
    assert (stats.n_live, stats.n_failures) == (0, 0)
    pair.here.release_peer("there")
    eventually(lambda: pair.here.stats().n_connections == 0)
    eventually(lambda: pair.there.stats().n_connections == 0)
    eventually(lambda: not pair.valve.pumps())
    assert soak.far_bytes() == before
    eventually(lambda: threading.active_count() <= threads)
    soak.release()
    gc.collect()
    assert pair.here.stats().n_regions == pair.there.stats().n_regions == 0
