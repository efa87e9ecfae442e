"""Make the choice of `placement_policy:place` without a visit to all workers.

The best rows are found among three kinds of prefill workers:

- those whose kvstore holds a part of the prompt: the prefix index names them, all are compared;
- those whose transfers from the sender of the longest prefix were observed: each has a time of its
  own for the transfer;
- all others: for one prompt their times differ by queue and cost alone. The order of the pool
  yields those that may be soon enough.

A search of the order ends when no other worker can be among the best rows. Its bounds are sums of
the same numbers as the rows, rounded at other places. So a worker whose bound is over the limit by
a rounding error is compared too, and the choice is the same to the bit.
"""

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.prefill_order import PrefillOrder, PrefillTwins
from halfmoon_scheduling.placement.cached_prefixes import CachedPrefixes
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.placement_mode import (
    PlacementMode,
    PrefixSource,
    TtftSlo,
    rank_of,
)
from halfmoon_scheduling.placement.placement_policy import estimate_row
from halfmoon_scheduling.prediction.cost_model import CostModel

#: Rows that a placement keeps besides those of the chosen and the preferred worker.
KEPT_ROWS = 8
#: Relative error of a bound: a thousand times that of the few additions that it is made of.
_ROUNDING = 1e-12


class RowSearch:
    """Find the best rows of one request."""

    def __init__(
        self,
        mode: PlacementMode,
        job: PlacementRequest,
        cached: CachedPrefixes,
        cluster: Cluster,
        costs: CostModel,
        now: float,
        excluded: Collection[WorkerId] = (),
    ) -> None:
        """Prepare a search over the prefill workers that take work.

        Args:
            mode: one that states what it ranks rows by.
            job: the request, which fits all of them.
            cached: its cached prefixes.
            cluster: live workers, none of which is a part of a server.
            costs: predictions.
            now: seconds.
            excluded: prefill workers that are left out; few.
        """
        self._excluded = excluded
        self._mode, self._job, self._cached = mode, job, cached
        self._cluster, self._costs, self._now = cluster, costs, now
        self._rank = rank_of(mode)
        self._rows: dict[WorkerId, Estimate] = {}
        #: The best rows, each behind its rank.
        self._best: list[tuple[Any, ...]] = []
        #: Readers with transfer times of their own: they are compared one by one.
        self._readers: Collection[WorkerId] = ()

    def row_of(self, worker_id: WorkerId) -> Estimate | None:
        """Return the row of a worker; None: it takes no work."""
        if (row := self._rows.get(worker_id)) is not None:
            return row
        if worker_id in self._excluded or not self._cluster.prefills.takes_work(worker_id):
            return None
        candidate = self._cluster.prefill_candidate(worker_id, self._now, self._job.priority)
        row = estimate_row(self._mode, self._job, candidate, self._cached, self._costs)
        self._rows[worker_id] = row
        return row

    def place(
        self,
        candidates: Sequence[WorkerInfo],
        order: PrefillOrder,
        ttft_slo_s: TtftSlo,
        decode: WorkerId | None,
        tbt_s: float,
    ) -> Placement:
        """Choose a prefill worker.

        Args:
            candidates: prefill workers that take work, by their ids; not all are excluded.
            order: the same, ordered for requests of this priority.
            ttft_slo_s: the limit of its time to first token at a prefill worker.
            decode: the chosen decode worker, if one has room.
            tbt_s: its predicted seconds between tokens.
        """
        n_candidates = len(candidates) - len(self._excluded)
        self._compare_holders()
        n_holders = len(self._rows)
        self._compare_others(order)
        rows = {row.worker_id: row for *_, row in self._best}
        wanted = self._mode.preferred_worker(self._job)
        if (
            wanted is not None
            and self._cluster.prefills.takes_whole_prompts(wanted)
            and (row := self.row_of(wanted)) is not None
        ):
            rows[wanted] = row
        chosen, preferred = self._drawn(candidates, n_candidates), None
        if chosen is not None:
            rows[chosen.worker_id] = chosen
        by_id = tuple(rows[worker_id] for worker_id in sorted(rows))
        if chosen is None:
            chosen, preferred = self._mode.choose(self._job, by_id, ttft_slo_s)
        return Placement(
            chosen,
            decode,
            tbt_s,
            by_id,
            preferred,
            n_more=n_candidates - len(by_id),
            known_blocks=self._known_blocks(n_candidates > n_holders),
        )

    def _drawn(self, candidates: Sequence[WorkerInfo], n_candidates: int) -> Estimate | None:
        """Return the row that the mode draws; None: it compares rows."""
        index = self._mode.drawn_index(self._job, n_candidates)
        if index is None:
            return None
        for worker_id in sorted(self._excluded):
            index += candidates[index].worker_id >= worker_id
        return self.row_of(candidates[index].worker_id)

    def _compare_holders(self) -> None:
        for kvstore in self._cached.matches:
            for worker_id in self._cluster.guests(kvstore):
                if self._cluster.prefills.takes_whole_prompts(worker_id):
                    self._compare(worker_id)

    def _compare_others(self, order: PrefillOrder) -> None:
        """Compare workers that hold nothing of the prompt, as far as they may be soon enough."""
        cached, job = self._cached, self._job
        if self._mode.ranks_by == "queue":
            self._search(order, (0.0, 0.0, 0.0), 0.0)
            return
        source = cached.if_none_own
        if source is not PrefixSource.OWN:
            assert cached.longest is not None
            self._readers = self._costs.readers(cached.longest)
            n_bytes = cached.n_longest * job.block_bytes
            extra_s = self._costs.unseen_transfer_s(cached.longest, n_bytes, cached.n_active)
            self._search(order, self._weights(cached.n_longest * job.block_size), extra_s)
        if source is not PrefixSource.LONGEST:
            self._search(order, self._weights(0), 0.0)
        for worker_id in self._readers:
            if self._cluster.prefills.takes_whole_prompts(worker_id):
                self._compare(worker_id)

    def _weights(self, n_cached: int) -> tuple[float, float, float]:
        n_tokens = self._job.n_tokens
        n_computed = n_tokens - n_cached
        return 1.0, float(n_computed), float(n_computed * (n_tokens + n_cached))

    def _search(
        self, order: PrefillOrder, weights: tuple[float, float, float], extra_s: float
    ) -> None:
        order.search(weights, extra_s, self._limit(), self._now, self._see)

    def _see(self, twins: PrefillTwins) -> float:
        """Compare the first of some twins: the others are later in order of their ids."""
        n_seen = 0
        for worker_id in twins.members:
            if worker_id not in self._rows and not self._is_apart(worker_id):
                self._compare(worker_id)
                n_seen += 1
                if n_seen == KEPT_ROWS:
                    break
        return self._limit()

    def _compare(self, worker_id: WorkerId) -> None:
        if worker_id not in self._rows and (row := self.row_of(worker_id)) is not None:
            insort(self._best, (*self._rank(row), row))
            del self._best[KEPT_ROWS:]

    def _is_apart(self, worker_id: WorkerId) -> bool:
        """Return whether a worker is compared by itself, or not at all."""
        return worker_id in self._readers or worker_id in self._excluded

    def _limit(self) -> float:
        """Return the time above which a bound excludes a worker."""
        if len(self._best) < KEPT_ROWS:
            return inf
        worst: float = self._best[-1][0]
        return worst + _ROUNDING * (worst + abs(self._now))

    def _known_blocks(self, has_others: bool) -> int:
        """Return the blocks of the longest prefix that a candidate holds, or would use.

        In modes where the faster prefix is used, that needs the rows of all workers if none holds
        the longest one: then only the rows that were compared count.
        """
        if has_others and self._cached.if_none_own is PrefixSource.LONGEST:
            return self._cached.n_longest
        return max((max(r.n_blocks, r.local_blocks) for r in self._rows.values()), default=0)


def keep_best_rows(placement: Placement, mode: PlacementMode) -> Placement:
    """Return a placement with its best rows, and with those of the chosen and preferred worker."""
    rows = placement.estimates
    if len(rows) <= KEPT_ROWS:
        return placement
    rank = rank_of(mode)
    best = sorted(range(len(rows)), key=lambda i: rank(rows[i]))[:KEPT_ROWS]
    kept = {
        *best,
        *(i for i, row in enumerate(rows) if row is placement.chosen),
        *(i for i, row in enumerate(rows) if row.worker_id == placement.preferred),
    }
    return replace(
        placement,
        estimates=tuple(rows[i] for i in sorted(kept)),
        n_more=placement.n_more + len(rows) - len(kept),
    )
