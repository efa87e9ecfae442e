"""Choose the rail that is expected to finish a batch first. Pure; time is an argument.

A *rail* is one of several paths of the same kind to one peer: an address, a network card. The
expectation for a rail follows from its past:

    seconds = (bytes in flight on it + bytes to send) / its bandwidth x penalty for its distance

The bandwidth is a moving average over batches, by the same formula solved for it. So a rail
that is shared with other traffic looks as slow as it is. Now and then another rail than the
best one is taken; otherwise an estimate that was bad once would stay bad for ever.

A rail is in one of three states:

    good --(a batch was lost on it)--> paused --(its pause ends, see `due`)--> probing
     ^                                   ^                                       |
     +------(the probe, or any batch begun since the pause, got through)---------+--(it failed)

Each pause is twice as long as the one before, until the rail stays good for as long as its
last pause was. While no rail is good, the rail whose pause ends first is taken: a transfer
is never refused because its rails are paused.
"""

from collections.abc import Mapping, Sequence

import msgspec

#: Cost factors by distance: rails preferred for this memory, secondary ones, all others.
PENALTIES = (1.0, 5.0, 10.0)
#: Assumed bytes per second of a rail without measurements.
_NOMINAL = 1e9
#: Smaller batches measure latency rather than bandwidth.
_MIN_OBSERVED_BYTES = 64 * 1024
#: Weight of a new observation, and its largest ratio to the average.
_WEIGHT = 0.2
_CLAMP = 10.0
#: Ratio of expected times within which two rails count as equally good, and take turns.
_TIE = 1.05


class SprayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of pauses, and the rate of exploration; see `TransferSettings`."""

    cooldown_s: float = 1.0
    cooldown_max_s: float = 60.0
    #: One in so many choices takes a rail that is not the best one.
    explore_every: int = 100


class SprayTicket(msgspec.Struct, frozen=True):
    """A batch in flight on a rail; its outcome must be reported with this ticket."""

    rail: str
    n_bytes: int
    #: Bytes in flight on this rail when the batch started, the batch included.
    queued_bytes: int
    started: float
    #: The rail's number of pauses and returns when the batch started.
    epoch: int


class _Rail:
    """The measurements and the state of one rail."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Bytes of all open tickets.
        self.queued_bytes = 0
        self.bandwidth = _NOMINAL
        self.measured = False
        #: The number of the choice that took this rail last.
        self.last_chosen = -1
        #: Counts changes of state; tickets of an earlier epoch say nothing about the state now.
        self.epoch = 0
        #: End of the pause; None while good. While probing it lies in the past.
        self.paused_until: float | None = None
        #: True while a probe is in flight, and the epoch in which it was sent.
        self.probing = False
        self.probe_epoch = -1
        #: Length of the last pause, 0 for none, and the time of its end.
        self.pause_s = 0.0
        self.good_since = 0.0


class Spray:
    """The rails to one peer."""

    def __init__(self, rails: Sequence[str], limits: SprayLimits) -> None:
        """Start with all rails good.

        Args:
            rails: the names of the rails, at least one.
            limits: durations of pauses, and the rate of exploration.
        """
        assert rails
        self._limits = limits
        self._rails = {name: _Rail(name) for name in rails}
        self._n_choices = 0
        self._n_in_flight = 0

    @property
    def n_in_flight(self) -> int:
        """Tickets whose outcome was not reported yet."""
        return self._n_in_flight

    def paused(self) -> list[str]:
        """Return the rails that are paused or being probed."""
        return [rail.name for rail in self._rails.values() if rail.paused_until is not None]

    @property
    def n_good(self) -> int:
        """Rails that are not paused."""
        return sum(rail.paused_until is None for rail in self._rails.values())

    def next_due(self) -> float | None:
        """Return when the next pause ends; None when no pause is running."""
        times = [
            rail.paused_until
            for rail in self._rails.values()
            if rail.paused_until is not None and not rail.probing
        ]
        return min(times, default=None)

    def choose(
        self, n_bytes: int, now: float, distances: Mapping[str, int] | None = None
    ) -> SprayTicket:
        """Take a rail for a batch of so many bytes.

        Args:
            n_bytes: the batch's size.
            now: seconds on a clock that doesn't go back.
            distances: by rail, an index into `PENALTIES`; 0 for missing rails.
        """
        distances = distances or {}
        good = [rail for rail in self._rails.values() if rail.paused_until is None]
        self._n_choices += 1
        if good:
            rail = self._best(good, n_bytes, distances)
        else:
            rail = min(self._rails.values(), key=lambda each: each.paused_until or 0.0)
        rail.last_chosen = self._n_choices
        rail.queued_bytes += n_bytes
        self._n_in_flight += 1
        return SprayTicket(rail.name, n_bytes, rail.queued_bytes, now, rail.epoch)

    def _best(self, good: Sequence[_Rail], n_bytes: int, distances: Mapping[str, int]) -> _Rail:
        def expected_s(rail: _Rail) -> float:
            # A batch without bytes still queues: count one byte, so that queues are compared.
            seconds = (rail.queued_bytes + max(n_bytes, 1)) / rail.bandwidth
            return seconds * PENALTIES[distances.get(rail.name, 0)]

        least = min(expected_s(rail) for rail in good)
        best = [rail for rail in good if expected_s(rail) <= least * _TIE]
        others = [rail for rail in good if rail not in best]
        explore = others and self._n_choices % self._limits.explore_every == 0
        return min(others if explore else best, key=lambda each: each.last_chosen)

    def expected_s(self, ticket: SprayTicket) -> float | None:
        """Return the expected seconds of the batch; None while the rail has no measurement."""
        rail = self._rails[ticket.rail]
        return ticket.queued_bytes / rail.bandwidth if rail.measured else None

    def got_through(self, ticket: SprayTicket, now: float) -> None:
        """Record that the peer acknowledged the whole batch."""
        rail = self._settle(ticket)
        seconds = now - ticket.started
        if ticket.n_bytes >= _MIN_OBSERVED_BYTES and seconds > 0:
            seen = ticket.queued_bytes / seconds
            if rail.measured:
                seen = min(max(seen, rail.bandwidth / _CLAMP), rail.bandwidth * _CLAMP)
                seen = rail.bandwidth + _WEIGHT * (seen - rail.bandwidth)
            rail.bandwidth, rail.measured = seen, True
        if rail.paused_until is not None and ticket.epoch == rail.epoch:
            self._return(rail, now)

    def failed(self, ticket: SprayTicket, now: float) -> bool:
        """Record that the rail lost some of the batch; return True if that pauses the rail."""
        rail = self._settle(ticket)
        if ticket.epoch != rail.epoch:
            return False
        self._pause(rail, now)
        return True

    def dropped(self, ticket: SprayTicket) -> None:
        """Record that the batch was cancelled; that says nothing about the rail."""
        self._settle(ticket)

    def due(self, now: float, *, limit: int) -> list[str]:
        """Start probing the rails whose pause has ended; `probed` reports each outcome."""
        found = [
            rail
            for rail in self._rails.values()
            if rail.paused_until is not None and not rail.probing and rail.paused_until <= now
        ][:limit]
        for rail in found:
            rail.probing = True
            rail.probe_epoch = rail.epoch
        return [rail.name for rail in found]

    def probed(self, name: str, now: float, *, ok: bool) -> None:
        """Record the outcome of a probe."""
        rail = self._rails[name]
        if not rail.probing:
            return
        rail.probing = False
        if rail.probe_epoch != rail.epoch:
            return  # A batch has changed the state since.
        if ok:
            self._return(rail, now)
        else:
            self._pause(rail, now)

    def _settle(self, ticket: SprayTicket) -> _Rail:
        rail = self._rails[ticket.rail]
        rail.queued_bytes -= ticket.n_bytes
        self._n_in_flight -= 1
        return rail

    def _pause(self, rail: _Rail, now: float) -> None:
        recovered = rail.paused_until is None and now >= rail.good_since + rail.pause_s
        longer = 2 * rail.pause_s
        if recovered or rail.pause_s == 0.0:
            longer = self._limits.cooldown_s
        rail.pause_s = min(longer, self._limits.cooldown_max_s)
        rail.paused_until = now + rail.pause_s
        rail.epoch += 1

    def _return(self, rail: _Rail, now: float) -> None:
        rail.paused_until = None
        rail.good_since = now
        rail.epoch += 1

    def check(self) -> None:
        """Assert the invariants that hold between calls."""
        assert self._n_in_flight >= 0
        for rail in self._rails.values():
            assert rail.queued_bytes >= 0
            assert rail.bandwidth > 0
            assert rail.pause_s <= self._limits.cooldown_max_s
        if self._n_in_flight == 0:
            assert not any(rail.queued_bytes for rail in self._rails.values())
