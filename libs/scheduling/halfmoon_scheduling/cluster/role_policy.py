"""Decide when a worker should change between prefill and decode, and which one.

A pool's load is a predicted time over its limit (see `admission_modes`). When one side's load stays
above the other's, a change of one worker of the other side is proposed. A change has a cost: the
worker must finish its requests, and it may load other kernels. So the imbalance must last and be
large. Only one worker changes at a time, and then none for a while. A change that would only
reverse the imbalance is not proposed, so that roles do not oscillate.

The policy proposes (see `role_balancer`); the worker's own process makes the change.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from halfmoon_protocol.ids import WorkerId

Side = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A proposal: a worker finishes its requests and changes to the other side."""

    worker_id: WorkerId
    to: Side
    reason: str


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """Conditions under which a change is proposed."""

    #: Least load of the busier side, and least ratio of it to the other side's.
    busy_load: float = 0.8
    ratio: float = 1.5
    #: Seconds that the imbalance must last.
    lasting_s: float = 60.0
    #: Seconds after a change in which none is proposed.
    rest_s: float = 300.0
    #: Least workers that a side keeps.
    least_workers: int = 1


@dataclass(slots=True)
class RolePolicy:
    """Propose changes, and remember how long one side has been the busier one."""

    limits: RoleLimits = field(default_factory=RoleLimits)
    _busier: Side | None = field(default=None, init=False)
    _since_s: float = field(default=0.0, init=False)
    _rests_until_s: float = field(default=float("-inf"), init=False)

    def observe(
        self,
        prefill_loads: Mapping[WorkerId, float],
        decode_loads: Mapping[WorkerId, float],
        now: float,
        *,
        movable: Container[WorkerId] | None = None,
    ) -> RoleChange | None:
        """Compare both sides' loads, and return the change to make, if any.

        Args:
            prefill_loads: load of each prefill worker.
            decode_loads: load of each decode worker.
            now: seconds.
            movable: workers that can change; None: all can.
        """
        loads = {"prefill": prefill_loads, "decode": decode_loads}
        busier = self._busier_side(prefill_loads, decode_loads)
        if busier != self._busier:
            self._busier, self._since_s = busier, now
        if busier is None or now < max(self._rests_until_s, self._since_s + self.limits.lasting_s):
            return None
        givers = loads["decode" if busier == "prefill" else "prefill"]
        able = [worker for worker in givers if movable is None or worker in movable]
        if not able:
            return None
        worker_id = min(able, key=lambda worker: (givers[worker], worker))
        self._rests_until_s = now + self.limits.rest_s
        self._since_s = now
        return RoleChange(
            worker_id,
            busier,
            f"{busier} has had a load of {_mean(loads[busier]):.2f}, the other side of "
            f"{_mean(givers):.2f}, for {self.limits.lasting_s:.3g} s",
        )

    def _busier_side(
        self, prefill_loads: Mapping[WorkerId, float], decode_loads: Mapping[WorkerId, float]
    ) -> Side | None:
        """Return the side that should get a worker, if the other one can spare one."""
        sides: list[tuple[Side, Mapping[WorkerId, float], Mapping[WorkerId, float]]] = [
            ("prefill", prefill_loads, decode_loads),
            ("decode", decode_loads, prefill_loads),
        ]
        for side, busy, idle in sides:
            if len(idle) <= self.limits.least_workers or not busy:
                continue
            busy_load, idle_load = _mean(busy), _mean(idle)
            if busy_load < max(self.limits.busy_load, self.limits.ratio * idle_load):
                continue
            # The same work over one worker more, and over one less.
            busy_after = busy_load * len(busy) / (len(busy) + 1)
            idle_after = idle_load * len(idle) / (len(idle) - 1)
            if idle_after < busy_after:
                return side
        return None


def _mean(loads: Mapping[WorkerId, float]) -> float:
    return sum(loads.values()) / len(loads)
