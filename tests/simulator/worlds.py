"""Simulated worlds of a few workers, with times to be worked out by hand, audited as they run."""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.run_report import results_to_json
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.nightly import by_day

#: Events from one audit to the next. What an audit looks for stays wrong for many events.
EVERY = by_day(7, at_night=1)


def a_spec(**changes: Any) -> ClusterSpec:
    """Return a worker of each role, with blocks of 16 tokens."""
    return ClusterSpec(
        **{"n_prefill": 1, "n_decode": 1, "block_tokens": 16, "max_new_tokens": 100, **changes}
    )


def a_world(
    *asks: TraceRequest,
    costs: CostFile | None = None,
    faults: Iterable[WorkerFault] = (),
    watcher: Any = None,
    choices: Mapping[str, Any] | None = None,
    **spec: Any,
) -> ClusterSim:
    """Return a cluster of that shape, whose conductor has these settings."""
    costs = costs or tiny_costs()
    config = scheduling_for_simulation(costs, **(choices or {}))
    return ClusterSim(a_spec(**spec), costs, config, asks, faults=tuple(faults), watcher=watcher)


def some_asks(seed: int, *, sessions: bool = False) -> list[TraceRequest]:
    """Return a dozen prompts in a row, some of which begin alike."""
    dice = random.Random(seed)
    at_s, asks = 0.0, []
    for i in range(12):
        at_s += dice.choice([0.0, 0.3, 2.0])
        n_input, n_output, shared = (
            dice.randint(1, 150),
            dice.randint(1, 30),
            dice.choice([0, 1, 4]),
        )
        session = dice.choice([None, None, "s", "t"]) if sessions else None
        asks.append(
            a_trace_request(at_s, n_input, n_output, prompt=i, shared=shared, session=session)
        )
    return asks


class Steps(Protocol):
    """What can be gone through event by event."""

    def step(self) -> bool: ...

    def check(self) -> None: ...


class World(Steps, Protocol):
    """What has a result in the end."""

    def result(self) -> RunResult: ...


def audit_steps(world: Steps, every: int = EVERY, until: Callable[[], bool] | None = None) -> None:
    """Go on to the end, or until something holds; audit on the way and then."""
    n_events = 0
    while not (until is not None and until()) and world.step():
        n_events += 1
        if n_events % every == 0:
            world.check()
    world.check()


def audited(world: World) -> RunResult:
    """Run to the end, with audits."""
    audit_steps(world)
    return world.result()


def text_of(result: RunResult) -> str:
    """Return all that a result holds, to compare it by its bytes."""
    return results_to_json([("run", result)], with_requests=True)


def hold_nothing(world: ClusterSim) -> None:
    """Let what is on its way after the last token come, and look for what is still held."""
    for _ in range(2000):
        world.event_queue.step()
    world.check()
    for prefill in world.prefills.values():
        assert len(prefill.staging) == len(prefill.machine.queue) == 0
        assert prefill.pages.n_free == prefill.pages.n_pages
    for decode in world.decodes.values():
        assert decode.pages.n_free == decode.pages.n_pages
    for kvstore in world.kvstores.values():
        assert kvstore.cache.n_reserved == kvstore.cache.n_leased == 0
