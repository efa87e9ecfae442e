"""Notice that this process stood still, as by SIGSTOP, and when it has caught up with that.

Others may have given it up meanwhile, and have given its landings to other requests. Rounds of
housekeeping come about once a second at the least, so a longer time between two of them tells it.
"""

#: Longest time between two rounds that is no standstill. Conductors take a silent worker for lost
#: after three seconds, and decode gives its landings' pages to others six seconds later.
STANDSTILL_S = 4.0
#: Seconds after a standstill until connections that were closed meanwhile are known as such.
SETTLE_S = 0.5


class StandstillWatch:
    """Tells from the times of rounds what this process may have missed. Pure."""

    def __init__(self) -> None:
        """Watch from the first round on; before it there is nothing to miss."""
        self._round_s = float("inf")
        #: When the last standstill is settled.
        self._settled_s = float("-inf")
        #: The last round at which nothing was missed.
        self._current_s = float("inf")

    def begin_round(self, now: float) -> float:
        """Note a round; return the seconds of the standstill that ends with it, 0 for none."""
        stood_s, self._round_s = now - self._round_s, now
        if stood_s <= STANDSTILL_S:
            return 0.0
        self._settled_s = now + SETTLE_S
        return stood_s

    @property
    def settled_s(self) -> float:
        """Time from which on a look shows all that was missed in the last standstill."""
        return self._settled_s

    def end_round(self, now: float) -> None:
        """Note that all connections have been looked at that were due in this round."""
        if now >= self._settled_s:
            self._current_s = now

    def is_current(self, now: float) -> bool:
        """Return whether nothing can have been missed; from any thread."""
        return now <= self._current_s + STANDSTILL_S
