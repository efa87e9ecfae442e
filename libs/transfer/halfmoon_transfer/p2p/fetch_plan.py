"""Choose the next shard and its source for one getter, without sockets, clock or dice.

A shard that a replica has goes before a shard that only a gold holder has. So the publisher
uploads each shard about once, however many getters there are: other getters take it from the
first one. The caller's dice choose among equally good shards and sources, so that getters that
start together fetch different shards.

    missing ──next──> in flight ──on_fetched──> completed
       ^                  |
       └───on_failed──────┘   another source; a source that keeps failing is left alone
"""

from collections.abc import Callable, Sequence

import msgspec

from halfmoon_transfer.p2p.object_record import ShardSource
from halfmoon_transfer.p2p.p2p_settings import P2PSettings

#: Draws an index below a number.
Dice = Callable[[int], int]
#: Failures of the shard so far, and whether the source is gold. The lowest rank goes first.
Rank = tuple[int, bool]
_HOPELESS: Rank = (1 << 30, True)


class ShardOffer(msgspec.Struct, frozen=True):
    """The shards that one source offers."""

    source: ShardSource
    gold: bool
    shards: frozenset[int]


class FetchShard(msgspec.Struct, frozen=True):
    """Fetch this shard from this source; the outcome comes back to the plan."""

    shard: int
    source: ShardSource


class FetchPlan:
    """The state of one getter."""

    def __init__(self, n_shards: int, settings: P2PSettings) -> None:
        self._n_shards = n_shards
        self._settings = settings
        #: Neither completed nor in flight.
        self._missing = set(range(n_shards))
        self._in_flight: dict[int, ShardSource] = {}
        self._completed: set[int] = set()
        self._offers: tuple[ShardOffer, ...] = ()
        #: Failures in a row, by source.
        self._strikes: dict[ShardSource, int] = {}
        #: Failures, by shard and source.
        self._failures: dict[tuple[int, ShardSource], int] = {}
        #: The last failure's reason, by source.
        self._reasons: dict[ShardSource, str] = {}
        self._gone: set[ShardSource] = set()

    @property
    def completed_shards(self) -> frozenset[int]:
        """Shards that were fetched and verified."""
        return frozenset(self._completed)

    @property
    def done(self) -> bool:
        """True once every shard is completed."""
        return len(self._completed) == self._n_shards

    @property
    def n_in_flight(self) -> int:
        """Fetches that were handed out and have no outcome yet."""
        return len(self._in_flight)

    @property
    def suspects(self) -> frozenset[ShardSource]:
        """Sources that failed and have delivered nothing since."""
        return frozenset(self._strikes) | self._gone

    def on_offers(self, offers: Sequence[ShardOffer]) -> None:
        """Replace the known offers of all sources."""
        self._offers = tuple(offers)

    @property
    def is_saturated(self) -> bool:
        """True while as many fetches are in flight as the settings allow."""
        return len(self._in_flight) >= self._settings.parallel

    def next(self, dice: Dice, *, gold_too: bool = True) -> FetchShard | None:
        """Return the next fetch; None while no source can be asked, or enough is in flight.

        Without `gold_too`, choose replicas only. Use that while the offers are old: a replica
        may have got meanwhile what only gold had.
        """
        if self.is_saturated:
            return None
        offers = [
            each
            for each in self._offers
            if self._trusted(each.source) and (gold_too or not each.gold)
        ]
        ranks = {shard: self._best(shard, offers) for shard in self._missing & _held(offers)}
        best = min((rank for rank, _ in ranks.values()), default=_HOPELESS)
        if best == _HOPELESS:
            return None
        # In order, so that the same dice choose the same fetch.
        wanted = sorted(shard for shard, (rank, _) in ranks.items() if rank == best)
        shard = wanted[dice(len(wanted))]
        sources = ranks[shard][1]
        fetch = FetchShard(shard, sources[dice(len(sources))])
        self._missing.discard(shard)
        self._in_flight[shard] = fetch.source
        return fetch

    def _trusted(self, source: ShardSource) -> bool:
        return source not in self._gone and self._strikes.get(source, 0) < self._settings.strikes

    def _best(self, shard: int, offers: Sequence[ShardOffer]) -> tuple[Rank, list[ShardSource]]:
        """Return the best rank for a shard and its sources: fewest failures, then replicas."""
        rank, sources = _HOPELESS, list[ShardSource]()
        for each in offers:
            if shard in each.shards:
                n_failures = self._failures.get((shard, each.source), 0)
                own = (n_failures, each.gold)
                if n_failures >= self._settings.tries_per_source or own > rank:
                    continue
                if own < rank:
                    rank, sources = own, []
                sources.append(each.source)
        return rank, sorted(sources)

    def on_fetched(self, shard: int) -> None:
        """Complete a shard that arrived with the right checksum."""
        source = self._in_flight.pop(shard)
        self._completed.add(shard)
        self._strikes.pop(source, None)

    def on_failed(self, shard: int, reason: str, *, gone: bool = False) -> None:
        """Put a shard back after a failure; `gone` means that its source no longer has it."""
        source = self._in_flight.pop(shard)
        self._missing.add(shard)
        self._failures[shard, source] = self._failures.get((shard, source), 0) + 1
        self._strikes[source] = self._strikes.get(source, 0) + 1
        self._reasons[source] = reason
        if gone:
            self._gone.add(source)

    def stuck_reason(self) -> str:
        """Explain why no source can be asked for the missing shards."""
        nowhere = sorted(self._missing - _held(self._offers))
        parts = [f"{len(self._missing)} of {self._n_shards} shards are missing"]
        if nowhere:
            parts.append(f"no source has {len(nowhere)} of them, the first is {nowhere[0]}")
        parts += [f"{source.segment}: {why}" for source, why in sorted(self._reasons.items())]
        return "; ".join(parts)

    def check(self) -> None:
        """Assert what must hold between calls."""
        in_flight, completed = set(self._in_flight), self._completed
        assert self._missing | in_flight | completed == set(range(self._n_shards))
        assert len(self._missing) + len(in_flight) + len(completed) == self._n_shards
        assert len(in_flight) <= self._settings.parallel


def _held(offers: Sequence[ShardOffer]) -> frozenset[int]:
    return frozenset().union(*(each.shards for each in offers))
