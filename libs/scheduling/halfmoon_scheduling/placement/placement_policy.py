"""Which prefill worker, which decode worker, and where the cached prefix comes from.

`place` is a function of its arguments. The modes differ in which prefill worker they take,
and in whether a prefix may be fetched from a kvstore that is not the worker's own:

    random           any, by a hash of seed and request; own kvstore's prefix
    load_balance     the shortest queue;                 own kvstore's prefix
    cache_aware      the least TTFT;                     own kvstore's prefix
    kvcache_centric  the least TTFT;                     Algorithm 1 decides own or best
    min_ttft         the least TTFT;                     whichever is faster, own or best

Algorithm 1 is that of Mooncake (arXiv 2407.00079, section 6). A prefill worker's own prefix
is what its home kvstore holds; the best is the longest that any kvstore holds. With
``best/own <= threshold`` the own one is used (also when nobody has any), else the best one:
an own prefix of 0 beside a best one above 0 is an infinite ratio.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import msgspec

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.config import PlacementMode
from halfmoon_scheduling.prediction.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement needs to know of a request."""

    request_id: RequestId
    n_tokens: int
    #: Pages that decode must have free for it: its KV and one to grow into.
    n_pages: int
    block_size: int
    block_bytes: int

    @property
    def max_cached_blocks(self) -> int:
        """Whole blocks that may come from a cache: at least one token is computed."""
        return (self.n_tokens - 1) // self.block_size


# Structs, which are made five times as fast as frozen dataclasses: every placement makes one
# of each kind for every worker.


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker that may get the request."""

    worker_id: WorkerId
    cost: PrefillCost
    #: Its kvstore, if any is there.
    home: WorkerId | None
    #: Predicted seconds until it would begin.
    queue_s: float


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A decode worker that may get the request, with what has been promised to it already."""

    worker_id: WorkerId
    n_requests: int
    free_pages: int
    #: Predicted seconds of a step with one request more, and what each token of it adds.
    step_s: float
    per_token_s: float


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """What is predicted for one prefill worker: a row of the table that explains a choice."""

    worker_id: WorkerId
    home: WorkerId | None
    #: Blocks that its home holds.
    local_blocks: int
    #: Where the cached prefix would come from, and how long it is; None with 0 blocks.
    source: WorkerId | None
    n_blocks: int
    #: Blocks of those that its home does not hold.
    transfer_blocks: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    #: Predicted seconds to the first token: the sum of the three.
    ttft_s: float

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All who compute and write; the first one is told to, and answers."""
        return (self.worker_id,)

    @property
    def pool_worker(self) -> WorkerId:
        """The prefill worker that a time on an idle worker is taken of."""
        return self.worker_id


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and what it was chosen from."""

    #: The row of `estimates` that was taken.
    chosen: Estimate
    #: None when no decode worker has room now.
    decode: WorkerId | None
    #: Predicted seconds between tokens at `decode`, this request included; 0 without one.
    tbt_s: float
    #: One row per prefill worker, in order of their ids; then one per group, and one
    #: per decode worker that could prefill it by itself.
    estimates: tuple[Estimate, ...]

    @property
    def prefill(self) -> WorkerId:
        """The prefill worker."""
        return self.chosen.worker_id

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.chosen.ttft_s


def choose_home(
    prefill: WorkerId,
    host: str,
    preferred: WorkerId | None,
    kvstores: Mapping[WorkerId, str],
) -> WorkerId | None:
    """The kvstore that a prefill worker keeps its blocks in.

    The preferred one if it is there; else one on the same host; else any. Among several the
    highest hash of both names decides, so that workers spread, and a kvstore that comes or
    goes moves only its own.

    Args:
        prefill: the prefill worker.
        host: its host.
        preferred: the kvstore that its settings name.
        kvstores: hosts of the live kvstores.
    """
    if preferred is not None and preferred in kvstores:
        return preferred
    near = [kvstore for kvstore, where in kvstores.items() if where == host]
    return max(near or kvstores, key=lambda k: (_draw(prefill, k), k), default=None)


def place(
    mode: PlacementMode,
    job: PlacementRequest,
    prefills: Sequence[PrefillCandidate],
    decodes: Sequence[DecodeCandidate],
    prefixes: Mapping[WorkerId, int],
    active_transfers: Mapping[WorkerId, int],
    costs: CostModel,
    *,
    threshold: float,
    seed: int,
) -> Placement:
    """Choose workers for one request.

    Args:
        mode: see the module's table.
        job: the request.
        prefills: live prefill workers that can take it; at least one.
        decodes: live decode workers that could ever hold it; those without room are passed by.
        prefixes: blocks of its prefix that each kvstore holds.
        active_transfers: transfers under way at each kvstore.
        costs: predictions.
        threshold: the balancing threshold of mode "kvcache_centric".
        seed: of mode "random".

    Returns:
        The placement; without a decode worker when none has room now.
    """
    matches = {
        kvstore: min(n, job.max_cached_blocks)
        for kvstore, n in prefixes.items()
        if min(n, job.max_cached_blocks) > 0
    }
    best = min(
        matches,
        key=lambda k: (-matches[k], active_transfers.get(k, 0), k),
        default=None,
    )
    n_best = matches[best] if best is not None else 0
    n_active = active_transfers.get(best, 0) if best is not None else 0
    for_strangers = _may_transfer(mode, 0, n_best, threshold)
    rows: list[Estimate] = []
    for candidate in sorted(prefills, key=attrgetter("worker_id")):
        home = candidate.home
        own = matches.get(home, 0) if home is not None else 0
        if not (_may_transfer(mode, own, n_best, threshold) if own else for_strangers):
            rows.append(_estimate(job, candidate, home if own else None, own, own, 0, costs))
            continue
        row = _estimate(job, candidate, best, n_best, own, n_active, costs)
        if mode == "min_ttft":
            local = _estimate(job, candidate, home if own else None, own, own, 0, costs)
            row = row if row.ttft_s < local.ttft_s else local
        rows.append(row)
    decode, tbt_s = _choose_decode(job, decodes)
    return Placement(_choose_prefill(mode, job, rows, seed), decode, tbt_s, tuple(rows))


def _may_transfer(mode: PlacementMode, own_blocks: int, best_blocks: int, threshold: float) -> bool:
    """Whether the best prefix comes into question beside the own one.

    In mode "kvcache_centric" if best/own > threshold; an own prefix of 0 is an infinite ratio.
    The quotient is compared, not a product: it is the double nearest to the true ratio, as a
    threshold written in decimals is, so that equal ones are equal.
    """
    if own_blocks >= best_blocks:
        return False
    if mode == "kvcache_centric":
        return own_blocks == 0 or best_blocks / own_blocks > threshold
    return mode == "min_ttft"


def _estimate(
    job: PlacementRequest,
    candidate: PrefillCandidate,
    source: WorkerId | None,
    n_blocks: int,
    local_blocks: int,
    n_active: int,
    costs: CostModel,
) -> Estimate:
    """The times of one prefill worker if the first `n_blocks` blocks come from `source`."""
    worker_id = candidate.worker_id
    transfer_blocks = n_blocks - local_blocks
    queue_s = candidate.queue_s
    transfer_s = 0.0
    if source is not None and transfer_blocks:
        n_bytes = transfer_blocks * job.block_bytes
        transfer_s = costs.transfer_s(source, worker_id, n_bytes, n_active)
    prefill_s = costs.prefill_s(worker_id, candidate.cost, job.n_tokens, n_blocks * job.block_size)
    return Estimate(
        worker_id,
        candidate.home,
        local_blocks,
        source,
        n_blocks,
        transfer_blocks,
        queue_s,
        transfer_s,
        prefill_s,
        queue_s + transfer_s + prefill_s,
    )


def _choose_prefill(
    mode: PlacementMode, job: PlacementRequest, rows: list[Estimate], seed: int
) -> Estimate:
    if mode == "random":
        return rows[_draw(str(seed), job.request_id) % len(rows)]
    if mode == "load_balance":
        return min(rows, key=attrgetter("queue_s", "worker_id"))
    return min(rows, key=attrgetter("ttft_s", "queue_s", "worker_id"))


def _choose_decode(
    job: PlacementRequest, decodes: Sequence[DecodeCandidate]
) -> tuple[WorkerId | None, float]:
    """The decode worker with the least predicted TBT among those that have room.

    Of equal ones the one with the fewest requests, then the one with the most room, so that
    work is spread also where the cost model sees no difference.
    """
    n_pages, n_tokens = job.n_pages, job.n_tokens
    best: DecodeCandidate | None = None
    best_s = inf
    for decode in decodes:
        if decode.free_pages < n_pages:
            continue
        tbt_s = decode.step_s + decode.per_token_s * n_tokens
        if best is None or tbt_s < best_s or (tbt_s == best_s and _rank(decode) < _rank(best)):
            best, best_s = decode, tbt_s
    return (None, 0.0) if best is None else (best.worker_id, best_s)


def _rank(decode: DecodeCandidate) -> tuple[int, int, WorkerId]:
    return decode.n_requests, -decode.free_pages, decode.worker_id


def _draw(*names: str) -> int:
    """A number that looks random and is the same for the same names."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return int.from_bytes(digest[:8], "big")
