"""Give each tenant an equal share of a queue: start-time fair queueing, with credit for bursts.

After Goyal, Vin and Cheng, 'Start-time Fair Queueing', SIGCOMM 1996. Work is counted in units that
the caller chooses, such as tokens. A tenant's virtual finish is where all its work so far ends if
every tenant with work gets an equal share. A request starts at its tenant's virtual finish, and
finishes its own work later. The queue serves the earliest finish first. The virtual time is the
latest start of a request that was served.

A tenant that was idle starts so much work before the virtual time: its credit. So a tenant that
uses less than its share waits for no other's backlog, only for the work in service. One that
floods the queue gets its share. A tenant's requests keep their order; with one tenant the order is
that of arrival.
"""

from collections import Counter
from dataclasses import dataclass

#: Tokens that an idle tenant may have computed before others' backlogs: a long prompt or two.
BURST_TOKENS = 65_536
#: Tenants that are remembered before those without work are forgotten.
_MAX_IDLE_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class FairTag:
    """Place a request's work in virtual time."""

    start: float = 0.0
    #: Its place in the queue.
    finish: float = 0.0


class FairShares:
    """The virtual time of one queue, and the virtual finish of each tenant."""

    def __init__(self, credit: float) -> None:
        """Create the shares of an empty queue.

        Args:
            credit: work that an idle tenant may have served before others' backlogs.
        """
        self._credit = credit
        self._now = 0.0
        self._finishes: dict[str, float] = {}

    def tag(self, tenant: str, work: float) -> FairTag:
        """Return the tag of a tenant's next request.

        Args:
            tenant: its name; empty for requests without a tenant, which share as one.
            work: of the request, more than 0.
        """
        # Credit counts against others' work: the first tenant has none.
        earliest = self._now - self._credit if self._finishes else self._now
        start = max(earliest, self._finishes.get(tenant, earliest))
        finish = self._finishes[tenant] = start + work
        return FairTag(start, finish)

    def settle(self, tenant: str, more: float) -> None:
        """Count work of a tenant that its tag did not say; less than 0: it was never done."""
        if tenant in self._finishes:
            self._finishes[tenant] += more

    def paid_tag(self) -> FairTag:
        """Return the tag of a request whose work was counted before: it waits for no backlog."""
        return FairTag(self._now, self._now)

    def is_within_share(self, tag: FairTag) -> bool:
        """Return whether a tenant has used less than its share, this request included."""
        return tag.finish <= self._now

    def on_served(self, tag: FairTag) -> None:
        """Note that a request is being served."""
        self._now = max(self._now, tag.start)
        if len(self._finishes) > _MAX_IDLE_TENANTS:
            earliest = self._now - self._credit
            self._finishes = {name: at for name, at in self._finishes.items() if at > earliest}


class FairRoom:
    """Count the requests of each tenant where so many may be at once.

    A flood fills a room. A tenant with less than an equal share of it is let in all the same. So a
    room holds no more than twice its limit.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Count a request."""
        self._counts[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a request no more."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    @property
    def n_tenants(self) -> int:
        """Tenants that have requests here."""
        return len(self._counts)

    def holds(self, tenant: str) -> bool:
        """Return whether a tenant has requests here."""
        return tenant in self._counts

    def is_within_share(self, tenant: str, limit: int) -> bool:
        """Return whether a tenant with requests here has no more than an equal share of `limit`."""
        return self._counts[tenant] <= limit // len(self._counts)
