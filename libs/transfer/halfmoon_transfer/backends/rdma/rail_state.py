"""The health of one rail, as all that use it see it. Pure: time is an argument.

    available --failed--> out --due--> repairing --repaired--> cooling --time--> available
                           ^               |                      |
                           +----(longer)---+ <------failed--------+

A rail that keeps failing waits longer for each repair and cools down longer after it, so that
one with a bad cable costs little. After a while without failures that is forgotten.
"""

from enum import Enum

#: Until the first repair after a failure; doubled each time one fails.
_FIRST_REPAIR_S = 0.2
_MAX_REPAIR_S = 10.0
#: From a repair until it is used again; doubled with each failure shortly before.
_FIRST_COOL_DOWN_S = 0.5
_MAX_COOL_DOWN_S = 30.0
#: Available for so long, its earlier failures are forgotten.
_FORGIVEN_AFTER_S = 60.0


class RailPhase(Enum):
    """Where a rail is."""

    AVAILABLE = "available"
    OUT = "out"
    REPAIRING = "repairing"
    COOLING = "cooling down"


class RailState:
    """One rail's health."""

    def __init__(self) -> None:
        self.phase = RailPhase.AVAILABLE
        #: When the phase may end: OUT at the next repair, COOLING when it is used again;
        #: AVAILABLE: since when it is.
        self.at = 0.0
        #: Failures since it was last forgiven, and repairs that failed since it is out.
        self.n_failures = 0
        self.n_failed_repairs = 0
        self.reason = ""

    def usable(self, now: float) -> bool:
        """Whether slices may be given to it; ends a cool-down that is over."""
        if self.phase is RailPhase.COOLING and now >= self.at:
            self.phase = RailPhase.AVAILABLE
        return self.phase is RailPhase.AVAILABLE

    def on_failed(self, now: float, reason: str) -> bool:
        """An operation failed on it; whether that takes it out (it may be out already)."""
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
        """Whether a repair is due; then it has begun, and its end must be told."""
        if self.phase is not RailPhase.OUT or now < self.at:
            return False
        self.phase = RailPhase.REPAIRING
        return True

    def on_repair_failed(self, now: float, reason: str) -> None:
        """It is still no good."""
        assert self.phase is RailPhase.REPAIRING
        self.n_failed_repairs += 1
        self.reason = reason
        wait_s = min(_MAX_REPAIR_S, _FIRST_REPAIR_S * 2.0 ** min(self.n_failed_repairs, 32))
        self.phase, self.at = RailPhase.OUT, now + wait_s

    def on_repaired(self, now: float) -> float:
        """It works; the seconds until it is used again."""
        assert self.phase is RailPhase.REPAIRING
        exponent = min(self.n_failures - 1, 32)
        wait_s = min(_MAX_COOL_DOWN_S, _FIRST_COOL_DOWN_S * 2.0**exponent)
        self.phase, self.at = RailPhase.COOLING, now + wait_s
        return wait_s

    def check(self) -> None:
        """Assert what must hold between calls."""
        assert self.n_failures > 0 or self.phase is RailPhase.AVAILABLE
        assert (self.reason == "") == (self.n_failures == 0)
