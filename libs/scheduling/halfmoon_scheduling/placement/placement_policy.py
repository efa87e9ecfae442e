"""Choose the prefill worker, the source of the cached prefix, and the decode worker.

`place` is a function of its arguments. It predicts the time to first token at every prefill
worker; the placement mode says which cached prefix a worker uses, and which row is the best.
"""

from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.estimates import (
    DecodeCandidate,
    Estimate,
    Placement,
    PlacementRequest,
    PrefillCandidate,
)
from halfmoon_scheduling.placement.placement_mode import PlacementMode, PrefixSource, TtftSlo
from halfmoon_scheduling.prediction.cost_model import CostModel

# Every placement compares these for every worker: looking up an enum's member is slow.
_OWN, _FASTER = PrefixSource.OWN, PrefixSource.FASTER


def place(
    mode: PlacementMode,
    job: PlacementRequest,
    prefills: Sequence[PrefillCandidate],
    decodes: Sequence[DecodeCandidate],
    prefixes: Mapping[WorkerId, int],
    active_transfers: Mapping[WorkerId, int],
    costs: CostModel,
    ttft_slo_s: TtftSlo,
) -> Placement:
    """Choose workers for one request.

    Args:
        mode: which prefix a worker uses, and which worker is the best.
        job: the request.
        prefills: live prefill workers that can take it; at least one.
        decodes: live decode workers that could ever hold it; those without room are skipped.
        prefixes: blocks of its prefix that each kvstore holds.
        active_transfers: transfers under way at each kvstore.
        costs: predictions.
        ttft_slo_s: the limit of its time to first token at a prefill worker.

    Returns:
        The placement; without a decode worker when none has room now.
    """
    matches = {
        kvstore: min(n, job.max_cached_blocks)
        for kvstore, n in prefixes.items()
        if min(n, job.max_cached_blocks) > 0
    }
    longest = min(
        matches,
        key=lambda k: (-matches[k], active_transfers.get(k, 0), k),
        default=None,
    )
    n_longest = matches[longest] if longest is not None else 0
    n_active = active_transfers.get(longest, 0) if longest is not None else 0
    # Most workers hold nothing of a prompt: the mode is asked once for all of these.
    if_none_own = mode.prefix_source(0, n_longest) if n_longest else _OWN
    rows: list[Estimate] = []
    for candidate in sorted(prefills, key=attrgetter("worker_id")):
        home = candidate.home
        own = matches.get(home, 0) if home is not None else 0
        prefix_source = if_none_own
        if own:
            prefix_source = mode.prefix_source(own, n_longest) if own < n_longest else _OWN
        if prefix_source is _OWN:
            rows.append(_estimate(job, candidate, home if own else None, own, own, 0, costs))
            continue
        row = _estimate(job, candidate, longest, n_longest, own, n_active, costs)
        if prefix_source is _FASTER:
            own_row = _estimate(job, candidate, home if own else None, own, own, 0, costs)
            row = row if row.ttft_s < own_row.ttft_s else own_row
        rows.append(row)
    decode, tbt_s = _choose_decode(job, decodes)
    chosen, preferred = mode.choose(job, rows, ttft_slo_s)
    return Placement(chosen, decode, tbt_s, tuple(rows), preferred)


def _estimate(
    job: PlacementRequest,
    candidate: PrefillCandidate,
    source: WorkerId | None,
    n_blocks: int,
    local_blocks: int,
    n_active: int,
    costs: CostModel,
) -> Estimate:
    """Predict the times of one prefill worker if the first `n_blocks` come from `source`."""
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


def _choose_decode(
    job: PlacementRequest, decodes: Sequence[DecodeCandidate]
) -> tuple[WorkerId | None, float]:
    """Return the decode worker with the least predicted TBT that has room, and that TBT.

    Among equals the one with the fewest requests is chosen, then the one with the most free pages.
    So work is spread also where the cost model sees no difference.
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
