"""Choose the prefill worker, the source of the cached prefix, and the decode worker.

`place` is a function of its arguments. It predicts the time to first token at every prefill
worker; the placement mode says which cached prefix a worker uses, and which row is the best. It
visits all workers; `ordered_placement` makes the same choice without that.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.cached_prefixes import CachedPrefixes
from halfmoon_scheduling.placement.decode_choice import choose_decode
from halfmoon_scheduling.placement.estimates import (
    DecodeCandidate,
    Estimate,
    Placement,
    PlacementRequest,
    PrefillCandidate,
    most_known,
)
from halfmoon_scheduling.placement.placement_mode import PlacementMode, PrefixSource, TtftSlo
from halfmoon_scheduling.placement.server_pairs import choose_pair, with_decode_steps
from halfmoon_scheduling.prediction.cost_model import CostModel

# Every placement compares these for every worker: looking up an enum's member is slow.
_OWN, _FASTER = PrefixSource.OWN, PrefixSource.FASTER
#: A cluster without servers: each worker may work with each other one.
NO_SERVERS: Mapping[WorkerId, str] = MappingProxyType({})


def place(
    mode: PlacementMode,
    job: PlacementRequest,
    prefills: Sequence[PrefillCandidate],
    decodes: Sequence[DecodeCandidate],
    prefixes: Mapping[WorkerId, int],
    active_transfers: Mapping[WorkerId, int],
    costs: CostModel,
    ttft_slo_s: TtftSlo,
    servers: Mapping[WorkerId, str] = NO_SERVERS,
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
        servers: the server of each worker that is a part of one.

    Returns:
        The placement; without a decode worker when none has room now.
    """
    cached = CachedPrefixes.of(mode, job, prefixes, active_transfers, servers)
    if servers:
        prefills = with_decode_steps(prefills, decodes, servers)
    rows = [
        estimate_row(mode, job, candidate, cached, costs, servers)
        for candidate in sorted(prefills, key=attrgetter("worker_id"))
    ]
    if servers:
        return choose_pair(mode, job, rows, decodes, servers, ttft_slo_s)
    decode, tbt_s = choose_decode(job, decodes)
    chosen, preferred = mode.choose(job, rows, ttft_slo_s)
    return Placement(chosen, decode, tbt_s, tuple(rows), preferred, known_blocks=most_known(rows))


def estimate_row(
    mode: PlacementMode,
    job: PlacementRequest,
    candidate: PrefillCandidate,
    cached: CachedPrefixes,
    costs: CostModel,
    servers: Mapping[WorkerId, str] = NO_SERVERS,
) -> Estimate:
    """Predict the times of one prefill worker with the prefix that the mode has it use."""
    home, n_longest = candidate.home, cached.n_longest
    own = cached.matches.get(home, 0) if home is not None else 0
    # Most workers hold nothing of a prompt: the mode is asked once for all of these.
    prefix_source = cached.if_none_own
    if own:
        prefix_source = mode.prefix_source(own, n_longest) if own < n_longest else _OWN
    if prefix_source is _OWN or candidate.worker_id in servers:
        return _estimate(job, candidate, home if own else None, own, own, 0, costs)
    longest, n_active = cached.longest, cached.n_active
    row = _estimate(job, candidate, longest, n_longest, own, n_active, costs)
    if prefix_source is _FASTER:
        own_row = _estimate(job, candidate, home if own else None, own, own, 0, costs)
        return row if row.ttft_s < own_row.ttft_s else own_row
    return row


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
