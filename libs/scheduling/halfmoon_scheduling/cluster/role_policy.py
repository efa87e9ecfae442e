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
#: The side that gives a worker, by the side that gets it.
OTHER_SIDE: dict[Side, Side] = {"prefill": "decode", "decode": "prefill"}


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


@dataclass(frozen=True, slots=True)
class RoleForecast:
    """The change that the policy proposes next if the loads stay as they are."""

    #: Mean load of each side; 0 for a side without workers.
    loads: dict[Side, float]
    #: The next change; None: no change follows from these loads.
    change: RoleChange | None
    #: Seconds until `change` is proposed, if there is one.
    due_s: float
    #: Seconds in which no change is proposed, because one was made.
    rest_s: float
    #: Why there is a change, or none.
    reason: str


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
        busier, _ = self._busier_side(prefill_loads, decode_loads)
        if busier != self._busier:
            self._busier, self._since_s = busier, now
        forecast = self.forecast(prefill_loads, decode_loads, now, movable=movable)
        if forecast.change is None or forecast.due_s > 0:
            return None
        self.rest(now)
        return forecast.change

    def rest(self, now: float) -> None:
        """Propose no change for a while: a worker changes now."""
        self._rests_until_s = now + self.limits.rest_s
        self._since_s = now

    def forecast(
        self,
        prefill_loads: Mapping[WorkerId, float],
        decode_loads: Mapping[WorkerId, float],
        now: float,
        *,
        movable: Container[WorkerId] | None = None,
    ) -> RoleForecast:
        """Return the change that follows if the loads stay; arguments as `observe`.

        Nothing changes.
        """
        loads: dict[Side, Mapping[WorkerId, float]] = {
            "prefill": prefill_loads,
            "decode": decode_loads,
        }
        means: dict[Side, float] = {side: _mean(each) for side, each in loads.items()}
        rest_s = max(0.0, self._rests_until_s - now)
        busier, reason = self._busier_side(prefill_loads, decode_loads)
        if busier is None:
            return RoleForecast(means, None, 0.0, rest_s, reason)
        giver = OTHER_SIDE[busier]
        able = [worker for worker in loads[giver] if movable is None or worker in movable]
        if not able:
            reason = (
                f"{busier} has a load of {means[busier]:.2f}, but no {giver} worker may change:"
                " each lists one role or is pinned"
            )
            return RoleForecast(means, None, 0.0, rest_s, reason)
        since_s = self._since_s if busier == self._busier else now
        due_s = max(0.0, max(self._rests_until_s, since_s + self.limits.lasting_s) - now)
        reason = (
            f"{busier} has had a load of {means[busier]:.2f}, the other side of "
            f"{means[giver]:.2f}, for {self.limits.lasting_s:.3g} s"
        )
        worker_id = min(able, key=lambda worker: (loads[giver][worker], worker))
        change = RoleChange(worker_id, busier, reason)
        return RoleForecast(means, change, due_s, rest_s, reason)

    def _busier_side(
        self, prefill_loads: Mapping[WorkerId, float], decode_loads: Mapping[WorkerId, float]
    ) -> tuple[Side | None, str]:
        """Return the side that should get a worker, if the other can spare one; or why none."""
        limits = self.limits
        sides: list[tuple[Side, Mapping[WorkerId, float], Mapping[WorkerId, float]]] = [
            ("prefill", prefill_loads, decode_loads),
            ("decode", decode_loads, prefill_loads),
        ]
        reason = (
            f"no side has a load of {limits.busy_load:g} or more that is {limits.ratio:g} times"
            " the other side's"
        )
        for side, busy, idle in sides:
            busy_load, idle_load = _mean(busy), _mean(idle)
            if not busy or busy_load < max(limits.busy_load, limits.ratio * idle_load):
                continue
            other = OTHER_SIDE[side]
            if len(idle) <= limits.least_workers:
                reason = (
                    f"{side} has a load of {busy_load:.2f}, but {other} has {len(idle)}"
                    f" and keeps {limits.least_workers} at least"
                )
                continue
            # The same work over one worker more, and over one less.
            busy_after = busy_load * len(busy) / (len(busy) + 1)
            idle_after = idle_load * len(idle) / (len(idle) - 1)
            if idle_after < busy_after:
                return side, ""
            reason = (
                f"{side} has a load of {busy_load:.2f}, but with one worker less {other} would"
                " be the busier side"
            )
        return None, reason


def _mean(loads: Mapping[WorkerId, float]) -> float:
    return sum(loads.values()) / len(loads) if loads else 0.0
