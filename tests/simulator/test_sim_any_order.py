"""Simulated clusters of every kind lose no request, leak nothing, and repeat themselves."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.events import AnyEvent
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_testing.simulator_inputs import tiny_costs
from tests.nightly import by_day
from tests.simulator.worlds import a_world, audited, hold_nothing, some_asks, text_of

#: Of each kind of cluster: what its shape, its conductor's settings and its costs have.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one by one": ({"chunk_tokens": 64}, {}, {}),
    "prefill at decode": ({"local_prefill_tokens": 64}, {"placement": "min_ttft"}, {}),
    "prefill at decode within limits": (
        {"local_prefill_tokens": 64},
        {"placement": "min_ttft", "tbt_slo_s": 2.0},
        {},
    ),
    "prefill in groups": (
        {"group_size": 2, "group_chunk_tokens": 50, "n_pages": 16},
        {"placement": "min_ttft", "group_least_gain": 1.0},
        {"prefill": PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0), "pass_s": 0.0}
        | {"activation_bytes": 20},
    ),
    "a disk below memory": (
        {"disk_bytes": 8 * 1024, "disk_bytes_per_s": 8e3, "promotion_wait_s": 50.0},
        {},
        {},
    ),
    "copies of what is hot": (
        {"n_slots": 20},
        {"replication_bytes_per_s": 1e6, "replication_hot_uses": 3.0},
        {},
    ),
}
Shape = tuple[str, int, int]
Losses = list[tuple[str, float, float | None]]
USUAL: Shape = ("kvcache_centric", 2, 2)


def world_of(kind: str, seed: int, shape: Shape, losses: Losses, watcher: Any = None) -> ClusterSim:
    spec, choices, costs = KINDS[kind]
    placement, n_prefill, n_decode = shape
    spec = {"n_pages": 14, "n_slots": 12, "max_new_tokens": 40} | spec
    if "group_size" in spec:
        spec |= {"group_size": max(2, n_prefill), "n_prefill": 3}
    return a_world(
        *some_asks(seed, sessions=kind == "one by one"),
        costs=tiny_costs(network_bytes_per_s=3000.0, local_bytes_per_s=9000.0, **costs),
        faults=[WorkerFault(at_s, worker, back) for worker, at_s, back in losses],
        choices={"placement": placement, "seed": seed, "max_attempts": 50} | choices,
        watcher=watcher,
        **({"n_prefill": n_prefill, "n_decode": n_decode} | spec),
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=by_day(15, at_night=100))
@given(
    st.integers(0, 10**6),
    st.tuples(st.sampled_from(list(PLACEMENT_MODES)), st.integers(1, 3), st.integers(1, 2)),
    st.lists(
        st.tuples(
            st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"]),
            st.floats(0.0, 60.0),
            st.sampled_from([None, 5.0, 5.0]),
        ),
        max_size=3,
    ),
)
@example(25261, USUAL, [("prefill-1", 0.0, None), ("decode-0", 3.0, None)])  # both in one pass
def test_every_request_ends_once_and_nothing_leaks(
    kind: str, seed: int, shape: Shape, losses: Losses
) -> None:
    losses = [loss for loss in losses if int(loss[0][-1]) < min(shape[1:])]
    world = world_of(kind, seed, shape, losses)
    result = audited(world)
    assert len(result.records) == 12
    # While nobody of a role is there, requests are refused or fail, said so.
    for_good = any(back_s is None for _, _, back_s in losses)
    for record in result.records:
        assert record.outcome
        assert record.outcome == "finished" or for_good or (losses and record.reason)
    if all(back_s is not None for _, _, back_s in losses):
        hold_nothing(world)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    losses: Losses = [("decode-0", 12.0, 5.0), ("prefill-1", 6.0, 3.0)]
    shape = ("random", 2, 2)
    texts = [text_of(world_of(kind, seed, shape, losses).run()) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_what_the_conductor_was_told_replays_to_the_same_commands() -> None:
    journal: list[tuple[float, AnyEvent, list[AnyCommand]]] = []
    losses: Losses = [("decode-0", 12.0, 5.0), ("prefill-1", 20.0, 3.0)]
    world = world_of("one by one", 5, ("random", 2, 2), losses, lambda *told: journal.append(told))
    world.run()
    again = Conductor(world.config)
    assert len(journal) > 100
    for now, event, commands in journal:
        assert again.handle(event, now) == commands
