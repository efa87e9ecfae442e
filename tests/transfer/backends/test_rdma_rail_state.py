"""When a rail is used, left alone, repaired and used again; which devices make rails. Pure."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_transfer.backends.rdma.rail_pairing import pair_devices
from halfmoon_transfer.backends.rdma.rail_state import RailPhase, RailState
from halfmoon_transfer.backends.rdma.rdma_device import Gid, choose_gid, read_gids


def out_at(now: float) -> RailState:
    state = RailState()
    assert state.on_failed(now, "cable")
    return state


def next_repair(state: RailState) -> float:
    """Go on until a repair has begun; when that was."""
    assert state.phase is RailPhase.OUT
    now = state.at
    assert state.begin_repair(now)
    return now


def test_a_rail_that_fails_is_out_until_it_is_repaired_and_has_cooled_down() -> None:
    state = RailState()
    assert state.usable(100.0)
    assert state.on_failed(100.0, "cable")
    assert not state.usable(1e9)
    assert not state.begin_repair(100.0)
    now = next_repair(state)
    assert 100.0 < now <= 101.0
    assert not state.begin_repair(now)
    wait_s = state.on_repaired(now)
    assert wait_s > 0
    assert not state.usable(now + 0.9 * wait_s)
    assert state.usable(now + wait_s)
    assert state.phase is RailPhase.AVAILABLE


def test_a_rail_goes_out_once_however_many_say_so() -> None:
    state = out_at(0.0)
    assert not state.on_failed(0.1, "again")
    next_repair(state)
    assert not state.on_failed(0.3, "and again")
    state.on_repaired(0.3)
    assert state.on_failed(0.4, "while it cooled down")
    assert state.phase is RailPhase.OUT


def test_repairs_that_fail_become_rarer_up_to_a_bound() -> None:
    state = out_at(0.0)
    waits = []
    for _ in range(40):
        now = next_repair(state)
        state.on_repair_failed(now, "still no good")
        waits.append(round(state.at - now, 6))
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] <= 10.0
    assert waits[0] < 1.0
    assert state.reason == "still no good"


def cool_down_after(state: RailState, now: float) -> float:
    state.on_failed(now, "flaps")
    return state.on_repaired(next_repair(state))


def test_a_rail_that_flaps_cools_down_longer_each_time_up_to_a_bound() -> None:
    state, now, waits = RailState(), 100.0, []
    for _ in range(40):
        waits.append(cool_down_after(state, now))
        now = state.at
        assert state.usable(now)
    assert waits[1] == 2 * waits[0]
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] <= 30.0


def test_failures_are_forgiven_after_a_while_without_any() -> None:
    state = RailState()
    first = cool_down_after(state, 100.0)
    assert state.usable(state.at)
    assert cool_down_after(state, state.at + 10.0) == 2 * first
    assert state.usable(state.at)
    assert cool_down_after(state, state.at + 1000.0) == first


EVENTS = st.sampled_from(["usable", "failed", "begin", "repaired", "repair failed"])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100)), max_size=60))
def test_whatever_happens_only_an_available_rail_is_usable(events: list[tuple[str, float]]) -> None:
    state, now = RailState(), 0.0
    for event, pause in events:
        now += pause
        match event:
            case "usable":
                assert state.usable(now) == (state.phase is RailPhase.AVAILABLE)
            case "failed":
                state.on_failed(now, "why")
                assert not state.usable(now)
            case "begin":
                was_out = state.phase is RailPhase.OUT and now >= state.at
                assert state.begin_repair(now) == was_out
            case "repaired" if state.phase is RailPhase.REPAIRING:
                state.on_repaired(now)
                assert not state.usable(now)
            case "repair failed" if state.phase is RailPhase.REPAIRING:
                state.on_repair_failed(now, "why not")
                assert not state.usable(now)
        state.check()


# Which devices make rails.


def gid(address: str) -> str:
    """IPv4-mapped, as the kernel writes it."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def gids(**addresses: str) -> dict[str, str]:
    return {name: gid(address) for name, address in addresses.items()}


def test_devices_on_the_same_network_are_paired() -> None:
    local = gids(a0="10.10.0.1", a1="10.10.1.1", a2="10.10.2.1")
    remote = gids(b2="10.10.2.2", b0="10.10.0.2", b1="10.10.1.2")
    assert sorted(pair_devices(local, remote)) == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_on_one_host_each_device_talks_to_itself() -> None:
    both = gids(x="10.0.0.1", y="10.0.0.2", z="10.0.0.3")
    assert sorted(pair_devices(both, both)) == [("x", "x"), ("y", "y"), ("z", "z")]


def test_each_device_has_one_partner_even_where_all_reach_all() -> None:
    pairs = pair_devices(gids(a0="10.0.0.1", a1="10.0.0.2"), gids(b0="10.0.0.3", b1="10.0.0.4"))
    assert len(pairs) == 2
    assert {near for near, _ in pairs} == {"a0", "a1"}
    assert {far for _, far in pairs} == {"b0", "b1"}


def test_a_device_left_over_joins_a_partner_on_its_network_only() -> None:
    remote = gids(b0="10.0.0.3", b1="10.0.0.4", far="10.9.0.1")
    pairs = pair_devices(gids(a="10.0.0.1"), remote)
    assert sorted(pairs) == [("a", "b0"), ("a", "b1")]


def test_devices_on_different_networks_are_paired_too_if_there_is_nothing_better() -> None:
    assert pair_devices(gids(a="10.0.0.1"), gids(b="192.168.7.1")) == [("a", "b")]
    assert pair_devices({}, gids(b="10.0.0.1")) == []


LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:000a"
GLOBAL = "fd00:0000:0000:0000:0000:0000:0000:0001"


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        ([(0, LINK_LOCAL, "RoCE v2"), (1, gid("10.0.0.1"), "RoCE v2")], 1),
        ([(0, gid("10.0.0.1"), "IB/RoCE v1"), (1, gid("10.0.0.1"), "RoCE v2")], 1),
        ([(0, LINK_LOCAL, "RoCE v2"), (3, GLOBAL, "RoCE v2")], 3),
        ([(0, LINK_LOCAL, ""), (1, gid("10.0.0.1"), "")], 1),
        ([(5, LINK_LOCAL, "IB/RoCE v1")], 5),
        ([], None),
    ],
)
def test_an_ipv4_address_of_roce_v2_is_preferred(
    entries: list[tuple[int, str, str]], chosen: int | None
) -> None:
    found = choose_gid([Gid(*entry) for entry in entries])
    assert (found.index if found else None) == chosen


def test_the_table_is_read_with_its_gaps_and_without_its_empty_end(tmp_path: Path) -> None:
    port = tmp_path / "dev" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    for index in range(200):
        (port / "gids" / str(index)).write_text("0000:" * 7 + "0000\n")
    for index in (0, 4):
        (port / "gids" / str(index)).write_text(gid(f"10.0.0.{index}") + "\n")
    (port / "gid_attrs" / "types" / "4").write_text("RoCE v2\n")
    assert read_gids("dev", tmp_path) == [
        Gid(0, gid("10.0.0.0"), ""),
        Gid(4, gid("10.0.0.4"), "RoCE v2"),
    ]
    assert read_gids("none", tmp_path) == []
