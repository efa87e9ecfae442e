"""Workers of the simulated world that change sides. Times are those of `TINY`: see there."""

from typing import Any

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.events import AnyEvent, WorkerJoined, WorkerLost
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.workloads.load_oscillation import (
    LONG_ANSWERS,
    LONG_PROMPTS,
    PHASE_S,
    oscillating_load,
)
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator import worlds
from tests.simulator.worlds import audit_steps, text_of

#: Long prompts, five in ten seconds, each of which takes a prefill worker five.
ASKS = [a_trace_request(2.0 * i, n_input=400, n_output=2, prompt=i) for i in range(40)]


def a_world(**more: Any) -> ClusterSim:
    costs = tiny_costs(device_kv_bytes=1024 * 1024, host_kv_bytes=1024 * 1024)
    limits = {"ttft_slo_s": 10.0, "tbt_slo_s": 10.0}
    choices = limits | {"role_changes": True, "role_lasting_s": 10.0, "role_rest_s": 1000.0}
    shape: dict[str, Any] = {"n_decode": 3, "role_change_s": 7.0}
    return worlds.a_world(*ASKS, costs=costs, choices=choices, **shape, **more)


def test_a_worker_drains_leaves_and_is_back_on_the_other_side_after_the_stated_time() -> None:
    records: list[tuple[float, str, bool]] = []
    lost: list[float] = []

    def watch(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        if isinstance(event, WorkerLost):
            lost.append(now)
        if isinstance(event, WorkerJoined) and now > 0:
            info = event.worker
            records.append((now, f"{info.worker_id} {info.role} {info.generation}", info.draining))

    world = a_world(watcher=watch)
    audit_steps(world)
    (drains_s, before, draining), (back_s, after, still_draining) = records
    name = before.split()[0]
    assert (before, draining) == (f"{name} decode 1", True)
    assert (after, still_draining) == (f"{name} prefill 3", False)
    (left_s,) = lost
    assert left_s > drains_s
    assert back_s == pytest.approx(left_s + 7.0)
    assert WorkerId(name) in world.prefills and WorkerId(name) not in world.decodes
    result = world.result()
    assert result.summary().n_role_changes == 1
    # It finished what it had: nobody needed another try for it. And it prefills.
    assert {r.outcome for r in result.records} == {"finished"}
    assert {r.attempts for r in result.records} == {1}
    assert name in {r.prefill for r in result.records}


def test_a_worker_lost_while_it_drains_is_back_as_what_it_was() -> None:
    told: list[tuple[float, WorkerId]] = []

    def watch(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        if isinstance(event, WorkerJoined) and event.worker.draining:
            told.append((now, event.worker.worker_id))

    a_world(watcher=watch).run()
    ((told_s, name),) = told
    world = a_world(faults=[WorkerFault(told_s + 0.01, name, 5.0)])
    audit_steps(world)
    assert {r.outcome for r in world.result().records} == {"finished"}
    assert world.result().n_role_changes == 0
    assert name in world.decodes


def test_the_same_run_with_changes_gives_the_same_bytes() -> None:
    assert text_of(a_world().run()) == text_of(a_world().run())


def test_the_workload_swings() -> None:
    asks = oscillating_load(n_requests=6000, rate_per_s=2.0, seed=3)
    first = [ask for ask in asks if ask.at_s < PHASE_S]
    second = [ask for ask in asks if PHASE_S <= ask.at_s < 2 * PHASE_S]
    assert len(second) > 3 * len(first)
    for phase, (mean_input, mean_output, _) in ((first, LONG_PROMPTS), (second, LONG_ANSWERS)):
        assert abs(sum(a.n_input for a in phase) / len(phase) / mean_input - 1) < 0.1
        assert abs(sum(a.n_output for a in phase) / len(phase) / mean_output - 1) < 0.1
