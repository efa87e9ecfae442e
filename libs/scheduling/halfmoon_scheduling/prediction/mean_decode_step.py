"""Keep the mean decode step of a pool up to date, worker by worker.

A step is linear in its requests and their context. So four sums give the mean over all workers,
also with more of both spread evenly over them. Only sums live here; the decode pool knows which
request runs where.
"""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.prediction.cost_model import CostModel

#: Changes per worker after which the sums are computed again: sums of fractions drift.
_RENEWED_AFTER = 16
#: Seconds of a worker's terms above which the sums are computed again when these terms change: as
#: long as such a term is in a sum, that has lost the digits of the other workers.
_COARSE_S = 1e3

#: Seconds of a worker's empty step, seconds that its running requests add, and seconds that each
#: further request and each further token of context would add.
_Terms = tuple[float, float, float, float]


class MeanDecodeStep:
    """Compute the mean seconds of a decode step over all workers."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._terms: dict[WorkerId, _Terms] = {}
        #: Sums of the columns of `_terms`, except for rounding.
        self._sums: _Terms = (0.0, 0.0, 0.0, 0.0)
        self._n_changes = 0

    def put(
        self, worker_id: WorkerId, cost: DecodeCost, n_running: int, running_tokens: int
    ) -> None:
        """Set the load of a worker, or update it after its correction has changed."""
        costs = self._costs
        idle_s = costs.step_s(worker_id, cost, 0, 0)
        new = (
            idle_s,
            costs.step_s(worker_id, cost, n_running, running_tokens) - idle_s,
            costs.step_s(worker_id, cost, 1, 0) - idle_s,
            costs.per_token_s(worker_id, cost),
        )
        old = self._terms.get(worker_id, (0.0, 0.0, 0.0, 0.0))
        self._terms[worker_id] = new
        a, b, c, d = self._sums
        self._sums = (
            a + new[0] - old[0],
            b + new[1] - old[1],
            c + new[2] - old[2],
            d + new[3] - old[3],
        )
        self._n_changes += 1
        is_coarse = max(map(abs, old)) > _COARSE_S
        if is_coarse or self._n_changes >= _RENEWED_AFTER * len(self._terms):
            self._renew()

    def drop(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone."""
        del self._terms[worker_id]
        self._renew()

    def mean_s(self, n_more: float, tokens_more: float) -> float:
        """Return the mean seconds of a step with more requests and tokens in the whole pool.

        Args:
            n_more: requests to add; negative: to remove.
            tokens_more: their tokens of context. A load never falls below 0.
        """
        n_workers = len(self._terms)
        idle_s, load_s, per_request_s, per_token_s = self._sums
        more_s = (n_more * per_request_s + tokens_more * per_token_s) / n_workers
        return (idle_s + max(0.0, load_s + more_s)) / n_workers

    def check(self) -> None:
        """Check that the sums are those of the workers."""
        kept = self._sums
        self._renew()
        for one, other in zip(kept, self._sums, strict=True):
            assert abs(one - other) <= 1e-9 * max(1.0, abs(other))

    def _renew(self) -> None:
        self._n_changes = 0
        rows = self._terms.values()
        self._sums = (
            sum(row[0] for row in rows),
            sum(row[1] for row in rows),
            sum(row[2] for row in rows),
            sum(row[3] for row in rows),
        )
