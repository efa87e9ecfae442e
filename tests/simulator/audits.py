"""Audit a simulated world while it runs: after every event at night, after some by day."""

from collections.abc import Callable
from typing import Protocol

from halfmoon_simulator.results.run_results import RunResult
from tests.nightly import by_day

#: Events from one audit to the next. What an audit looks for stays wrong for many events.
EVERY = by_day(7, at_night=1)


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
