"""Workers between the two pools: who should change sides, and when.

A pool's load is a predicted time over its limit (see `admission`). When one side's stays above
the other's, one worker of the other side is proposed to change. Changing costs: the worker
must finish what it has, and it may load other kernels. So the imbalance must last, it must be
large, only one worker changes at a time, and then nothing happens for a while. What would only
turn the imbalance round is not proposed, so that roles do not swing.

The policy proposes (see `role_changes`); the worker, or whoever runs it, does it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from halfmoon_protocol.ids import WorkerId

Side = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker is to finish what it has and go over to the other side."""

    worker_id: WorkerId
    to: Side
    reason: str


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """When a change is proposed."""

    #: The one side's load at the least, and how many times the other's.
    busy_load: float = 0.8
    ratio: float = 1.5
    #: Seconds that it must stay so.
    lasting_s: float = 60.0
    #: Seconds after a change in which none is proposed.
    rest_s: float = 300.0
    #: Workers that a side keeps at the least.
    least_workers: int = 1


@dataclass(slots=True)
class RolePolicy:
    """Remembers how long one side has been the busier one."""

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
        """Look at both sides' loads, and say who should change, if anybody.

        Args:
            prefill_loads: load of each prefill worker.
            decode_loads: load of each decode worker.
            now: seconds.
            movable: those that can change; None: all can.
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
        """The side that should get a worker, if the other one can spare it."""
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
