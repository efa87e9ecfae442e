"""Decide when a failed rail is repaired and used again. Pure: time is an argument.

    available --failed--> out --due--> repairing --repaired--> cooling --time--> available
                           ^               |                      |
                           +----(longer)---+ <------failed--------+

A rail that keeps failing waits longer for each repair and cools down longer after it. So a rail
with a bad cable costs little. After a while without failures the waits are short again.
"""

from enum import Enum

#: Seconds until the first repair after a failure; doubled with each failed repair.
_FIRST_REPAIR_S = 0.2
_MAX_REPAIR_S = 10.0
#: Seconds from a repair until the next use; doubled with each recent failure.
_FIRST_COOL_DOWN_S = 0.5
_MAX_COOL_DOWN_S = 30.0
#: Seconds of availability after which earlier failures are forgotten.
_FORGIVEN_AFTER_S = 60.0


class RailPhase(Enum):
    """The phase of a rail's repair."""

    AVAILABLE = "available"
    OUT = "out"
    REPAIRING = "repairing"
    COOLING = "cooling down"


class RailState:
    """The health of one rail."""

    def __init__(self) -> None:
        self.phase = RailPhase.AVAILABLE
        #: End of the phase: for OUT the next repair, for COOLING the next use. For AVAILABLE: its
        #: start.
        self.at = 0.0
        #: Failures that are not forgotten, and failed repairs since it is out.
        self.n_failures = 0
        self.n_failed_repairs = 0
        self.reason = ""

    def usable(self, now: float) -> bool:
        """Return whether slices may be posted; end a cool-down that is over."""
        if self.phase is RailPhase.COOLING and now >= self.at:
            self.phase = RailPhase.AVAILABLE
        return self.phase is RailPhase.AVAILABLE

    def on_failed(self, now: float, reason: str) -> bool:
        """Record a failed operation; return whether that takes the rail out (it may be out)."""
        if self.phase in (RailPhase.OUT, RailPhase.REPAIRING):
            return False
        if self.phase is RailPhase.AVAILABLE and now - self.at >= _FORGIVEN_AFTER_S:
            self.n_failures = 0
        self.n_failures += 1
        self.n_failed_repairs = 0
        self.reason = reason
        self.phase, self.at = RailPhase.OUT, now + _FIRST_REPAIR_S
        return True

    def begin_repair(self, now: float) -> bool:
        """Begin a repair if one is due; return whether it began, so that its end is reported."""
        if self.phase is not RailPhase.OUT or now < self.at:
            return False
        self.phase = RailPhase.REPAIRING
        return True

    def on_repair_failed(self, now: float, reason: str) -> None:
        """Record a failed repair."""
        assert self.phase is RailPhase.REPAIRING
        self.n_failed_repairs += 1
        self.reason = reason
        wait_s = min(_MAX_REPAIR_S, _FIRST_REPAIR_S * 2.0 ** min(self.n_failed_repairs, 32))
        self.phase, self.at = RailPhase.OUT, now + wait_s

    def on_repaired(self, now: float) -> float:
        """Record a successful repair; return the seconds until the rail is used again."""
        assert self.phase is RailPhase.REPAIRING
        exponent = min(self.n_failures - 1, 32)
        wait_s = min(_MAX_COOL_DOWN_S, _FIRST_COOL_DOWN_S * 2.0**exponent)
        self.phase, self.at = RailPhase.COOLING, now + wait_s
        return wait_s

    def check(self) -> None:
        """Assert what must hold between calls."""
        assert self.n_failures > 0 or self.phase is RailPhase.AVAILABLE
        assert (self.reason == "") == (self.n_failures == 0)
