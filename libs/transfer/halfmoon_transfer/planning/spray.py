"""Which rail next: the one that is expected to be done first. Pure; time is an argument.

A *rail* is one of several ways of the same kind to one peer: an address, a network card. What
is expected of a rail is what it did:

    seconds = (bytes under way on it + bytes to send) / its bandwidth x penalty for its distance

The bandwidth is a moving average of what batches saw, by the same formula turned over, so that
a rail that is shared with other traffic looks as slow as it is. Now and then another rail than
the best one is taken, or an estimate that was bad once would stay so for ever.

A rail is in one of three states:

    good --(a batch was lost on it)--> paused --(its time is over, see `due`)--> probing
     ^                                   ^                                         |
     +---------(the probe, or any batch begun since the pause, got through)--------+--(it failed)

Each pause is twice as long as the one before, until the rail stays good for as long as its
last pause was. While no rail is good, the one that is paused least long from now is taken:
a transfer is never refused for our low opinion of its rails.
"""

from collections.abc import Mapping, Sequence

import msgspec

#: What the far ones cost more: preferred for this memory, secondary, neither.
PENALTIES = (1.0, 5.0, 10.0)
#: Bytes per second, until a rail has shown something.
_NOMINAL = 1e9
#: Below this a batch says more about latency than about bandwidth.
_MIN_OBSERVED_BYTES = 64 * 1024
#: Weight of a new observation, and how far it may be off the average.
_WEIGHT = 0.2
_CLAMP = 10.0
#: Ratio of expectations within which two rails count as equally good: they take turns.
_TIE = 1.05


class SprayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Patience with rails; see `TransferSettings`."""

    cooldown_s: float = 1.0
    cooldown_max_s: float = 60.0
    #: Every so many choices are for a rail that is not the best one.
    explore_every: int = 100


class SprayTicket(msgspec.Struct, frozen=True):
    """A batch on its way over a rail; to be given back with what became of it."""

    rail: str
    n_bytes: int
    #: Under way on this rail when it set out, itself included.
    queued_bytes: int
    started: float
    #: The rail's pauses and returns until then.
    epoch: int


class _Rail:
    """What is known of one rail."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: The bytes of all tickets that are out.
        self.queued_bytes = 0
        self.bandwidth = _NOMINAL
        self.measured = False
        #: The number of the choice that it was taken in last.
        self.last_chosen = -1
        #: Counts changes of state; a ticket from before says nothing about now.
        self.epoch = 0
        #: When the pause ends; None: good. While probing it lies in the past.
        self.paused_until: float | None = None
        #: Whether a probe is out, and the epoch that it was sent in.
        self.probing = False
        self.probe_epoch = -1
        #: Length of the last pause, 0 for none, and when the rail was good again.
        self.pause_s = 0.0
        self.good_since = 0.0


class Spray:
    """The rails to one peer."""

    def __init__(self, rails: Sequence[str], limits: SprayLimits) -> None:
        """Start with all of them good.

        Args:
            rails: their names, at least one.
            limits: patience.
        """
        assert rails
        self._limits = limits
        self._rails = {name: _Rail(name) for name in rails}
        self._n_choices = 0
        self._n_out = 0

    @property
    def n_out(self) -> int:
        """Tickets that are out."""
        return self._n_out

    def paused(self) -> list[str]:
        """The rails that are not good."""
        return [rail.name for rail in self._rails.values() if rail.paused_until is not None]

    @property
    def n_good(self) -> int:
        """Rails that are not paused."""
        return sum(rail.paused_until is None for rail in self._rails.values())

    def next_due(self) -> float | None:
        """When the next pause ends; None when no rail waits for that."""
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
            n_bytes: the batch's.
            now: seconds on a clock that doesn't go back.
            distances: by rail, an index into `PENALTIES`; 0 for those that are missing.
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
        self._n_out += 1
        return SprayTicket(rail.name, n_bytes, rail.queued_bytes, now, rail.epoch)

    def _best(self, good: Sequence[_Rail], n_bytes: int, distances: Mapping[str, int]) -> _Rail:
        def expected_s(rail: _Rail) -> float:
            # Nothing to send still has to queue: one byte, so that queues are compared.
            seconds = (rail.queued_bytes + max(n_bytes, 1)) / rail.bandwidth
            return seconds * PENALTIES[distances.get(rail.name, 0)]

        least = min(expected_s(rail) for rail in good)
        best = [rail for rail in good if expected_s(rail) <= least * _TIE]
        others = [rail for rail in good if rail not in best]
        explore = others and self._n_choices % self._limits.explore_every == 0
        return min(others if explore else best, key=lambda each: each.last_chosen)

    def expected_s(self, ticket: SprayTicket) -> float | None:
        """How long the batch should take; None when nothing was measured on this rail yet."""
        rail = self._rails[ticket.rail]
        return ticket.queued_bytes / rail.bandwidth if rail.measured else None

    def got_through(self, ticket: SprayTicket, now: float) -> None:
        """The far side answered for the whole batch."""
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
        """Some of the batch was lost with its rail; whether that is news and pauses it."""
        rail = self._settle(ticket)
        if ticket.epoch != rail.epoch:
            return False
        self._pause(rail, now)
        return True

    def dropped(self, ticket: SprayTicket) -> None:
        """Nobody wanted the batch any more; that says nothing about the rail."""
        self._settle(ticket)

    def due(self, now: float, *, limit: int) -> list[str]:
        """Rails whose pause is over: probe them, and say with `probed` how it went."""
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
        """A probe is back."""
        rail = self._rails[name]
        if not rail.probing:
            return
        rail.probing = False
        if rail.probe_epoch != rail.epoch:
            return  # A batch was quicker to tell.
        if ok:
            self._return(rail, now)
        else:
            self._pause(rail, now)

    def _settle(self, ticket: SprayTicket) -> _Rail:
        rail = self._rails[ticket.rail]
        rail.queued_bytes -= ticket.n_bytes
        self._n_out -= 1
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
        """Assert what must hold between calls."""
        assert self._n_out >= 0
        for rail in self._rails.values():
            assert rail.queued_bytes >= 0
            assert rail.bandwidth > 0
            assert rail.pause_s <= self._limits.cooldown_max_s
        if self._n_out == 0:
            assert not any(rail.queued_bytes for rail in self._rails.values())
