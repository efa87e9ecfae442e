"""Which shard next, and from whom: the decisions of one getter, without sockets, clock or dice.

A shard that a replica has goes before one that only gold has, so that the publisher uploads
each shard about once, however many getters there are: what it gave to one of them, the others
get from there. Which shard, and which of its sources, is left to chance (the caller's), so
that getters that start together ask for different ones.

    missing ──next──> in flight ──on_fetched──> here
       ^                  |
       └───on_failed──────┘   another source; a source that keeps failing is left alone
"""

from collections.abc import Callable, Sequence

import msgspec

from halfmoon_transfer.p2p.object_record import ShardSource
from halfmoon_transfer.p2p.p2p_settings import P2PSettings

#: An index below the number given.
Dice = Callable[[int], int]
#: Failures of the shard so far, and whether the source is gold: the least goes first.
Rank = tuple[int, bool]
_HOPELESS: Rank = (1 << 30, True)


class ShardOffer(msgspec.Struct, frozen=True):
    """What one source has."""

    source: ShardSource
    gold: bool
    shards: frozenset[int]


class FetchShard(msgspec.Struct, frozen=True):
    """Get this shard from there; its outcome comes back to the plan."""

    shard: int
    source: ShardSource


class FetchPlan:
    """The state of one getter."""

    def __init__(self, n_shards: int, settings: P2PSettings) -> None:
        self._n_shards = n_shards
        self._settings = settings
        #: Neither here nor in flight.
        self._missing = set(range(n_shards))
        self._in_flight: dict[int, ShardSource] = {}
        self._here: set[int] = set()
        self._offers: tuple[ShardOffer, ...] = ()
        #: Failures in a row, by source.
        self._strikes: dict[ShardSource, int] = {}
        #: Failures, by shard and source.
        self._failures: dict[tuple[int, ShardSource], int] = {}
        #: The last failure's reason, by source.
        self._reasons: dict[ShardSource, str] = {}
        self._gone: set[ShardSource] = set()

    @property
    def here(self) -> frozenset[int]:
        """Shards that are fetched."""
        return frozenset(self._here)

    @property
    def done(self) -> bool:
        """Whether all are."""
        return len(self._here) == self._n_shards

    @property
    def n_in_flight(self) -> int:
        """Fetches given out and not back."""
        return len(self._in_flight)

    @property
    def suspects(self) -> frozenset[ShardSource]:
        """Sources that failed, and have not given anything since."""
        return frozenset(self._strikes) | self._gone

    def on_offers(self, offers: Sequence[ShardOffer]) -> None:
        """Who has what, now."""
        self._offers = tuple(offers)

    @property
    def full(self) -> bool:
        """Whether as much is in flight as may be."""
        return len(self._in_flight) >= self._settings.parallel

    def next(self, dice: Dice, *, gold_too: bool = True) -> FetchShard | None:
        """The next fetch; None while nothing can be asked for, or enough is in flight.

        Without `gold_too`, only of replicas: for when the offers are not of just now, and
        somebody may have meanwhile what only gold had.
        """
        if self.full:
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
        # In order, so that the same dice mean the same fetch.
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
        """Whom to ask for a shard: who failed it least, of those replicas first."""
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
        """It is here, and its checksum is right."""
        source = self._in_flight.pop(shard)
        self._here.add(shard)
        self._strikes.pop(source, None)

    def on_failed(self, shard: int, reason: str, *, gone: bool = False) -> None:
        """It is not; `gone`: the source said, or is known, not to have it any more."""
        source = self._in_flight.pop(shard)
        self._missing.add(shard)
        self._failures[shard, source] = self._failures.get((shard, source), 0) + 1
        self._strikes[source] = self._strikes.get(source, 0) + 1
        self._reasons[source] = reason
        if gone:
            self._gone.add(source)

    def stuck_reason(self) -> str:
        """Why nothing can be asked for, in words."""
        nowhere = sorted(self._missing - _held(self._offers))
        parts = [f"{len(self._missing)} of {self._n_shards} shards are missing"]
        if nowhere:
            parts.append(f"nobody holds {len(nowhere)} of them, the first is {nowhere[0]}")
        parts += [f"{source.segment}: {why}" for source, why in sorted(self._reasons.items())]
        return "; ".join(parts)

    def check(self) -> None:
        """Assert what must hold between calls."""
        flying = set(self._in_flight)
        assert not (self._missing & flying or self._missing & self._here or flying & self._here)
        assert self._missing | flying | self._here == set(range(self._n_shards))
        assert len(flying) <= self._settings.parallel


def _held(offers: Sequence[ShardOffer]) -> frozenset[int]:
    return frozenset().union(*(each.shards for each in offers))
