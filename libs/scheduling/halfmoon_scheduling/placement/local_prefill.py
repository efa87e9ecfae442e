"""Prefill the uncached rest of a prompt where it is decoded: conditional disaggregation.

A prompt of which nearly all is cached needs one small forward pass. In the prefill pool it waits
in a queue, and its KV crosses the network twice. In a step of the decode worker it makes that step
longer for all requests in it. Mooncake inlines it if it needs no chunking and keeps the time
between tokens (arXiv 2407.00079, section 5.1). Here it must also bring the first token sooner. A
decode worker's record says whether it can, and up to how many tokens. One that takes whole prompts
in parts is a hybrid worker: prefill and decode on one machine, behind the same placement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.placement.estimates import (
    DecodeCandidate,
    Estimate,
    Placement,
    PlacementRequest,
)
from halfmoon_scheduling.prediction.cost_model import CostModel, unscaled_prefill_s
from halfmoon_scheduling.prefill.part_pacing import forecast_parts


class LocalPrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A decode worker that may prefill, with its reservations counted."""

    worker_id: WorkerId
    prefill_cost: PrefillCost
    #: Most tokens of an uncached rest that it computes.
    max_tokens: int
    #: Predicted seconds of its steps with its present requests; 0 without any.
    step_s: float
    #: Seconds of the steps of prompts that were sent here before.
    queue_s: float
    #: The least TBT limit of its requests, seconds; infinite without one.
    tbt_slo_s: float
    #: Most seconds of a step with a part of a prompt, and the mean between tokens that its parts
    #: leave: `WorkerInfo.local_prefill_step_s` and `local_prefill_tbt_s`.
    max_step_s: float = 0.0
    paced_tbt_s: float = 0.0


class LocalPrefillEstimate(Estimate, frozen=True, gc=False):
    """The estimate of a decode worker that prefills: `prefill_s` has its steps meanwhile."""

    #: Mean seconds between tokens of other requests there meanwhile, and their limit.
    stalled_step_s: float
    tbt_slo_s: float
    #: The prefill worker, or first stage of a group, that would prefill otherwise.
    instead_of: WorkerId

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """No worker of the prefill pool."""
        return ()

    @property
    def pool_worker(self) -> WorkerId:
        """The prefill worker that would prefill otherwise."""
        return self.instead_of


def prefer_local_prefill(
    placement: Placement,
    job: PlacementRequest,
    candidates: Sequence[tuple[DecodeCandidate, LocalPrefillCandidate]],
    prefixes: Mapping[WorkerId, int],
    active_transfers: Mapping[WorkerId, int],
    costs: CostModel,
    tbt_slo_s: Callable[[WorkerId], float | None],
) -> Placement:
    """Place a request at a decode worker that prefills by itself if that is better.

    It is better when the first token comes sooner than through the prefill pool. Neither the steps
    meanwhile nor those after it may take longer than the limits of the requests there allow. A
    worker that computes prompts in parts keeps a mean over its steps; others compute the rest in
    one step.

    Args:
        placement: the best placement through the prefill pool, with a decode worker.
        job: the request.
        candidates: decode workers that may prefill; those without room are skipped.
        prefixes: blocks of its prefix that each kvstore holds.
        active_transfers: transfers under way at each kvstore.
        costs: predictions.
        tbt_slo_s: the request's own limit at a worker, seconds; None: no limit.
    """
    most = job.max_cached_blocks
    source = min(
        (kvstore for kvstore, n in prefixes.items() if min(n, most) > 0),
        key=lambda k: (-min(prefixes[k], most), active_transfers.get(k, 0), k),
        default=None,
    )
    n_blocks = 0 if source is None else min(prefixes[source], most)
    n_cached = n_blocks * job.block_size
    n_active = 0 if source is None else active_transfers.get(source, 0)
    rows: list[tuple[LocalPrefillEstimate, float]] = []
    for decode, terms in candidates:
        if decode.free_pages < job.n_pages or job.n_tokens - n_cached > terms.max_tokens:
            continue
        tbt_s = decode.step_s + decode.per_token_s * job.n_tokens
        cost, n_computed = terms.prefill_cost, job.n_tokens - n_cached
        work_s = unscaled_prefill_s(cost, job.n_tokens, n_cached) - cost.c0_s
        forecast = forecast_parts(
            work_s,
            pass_s=cost.c0_s,
            block_s=work_s * min(1.0, job.block_size / n_computed),
            step_s=terms.step_s,
            max_step_s=terms.max_step_s,
            tbt_s=terms.paced_tbt_s,
        )
        stalled_s = forecast.mean_step_s
        own_s = tbt_slo_s(terms.worker_id)
        if stalled_s > terms.tbt_slo_s or tbt_s > terms.tbt_slo_s:
            continue
        if own_s is not None and tbt_s > own_s:
            continue
        transfer_s = 0.0
        if source is not None:
            n_bytes = n_blocks * job.block_bytes
            transfer_s = costs.transfer_s(source, terms.worker_id, n_bytes, n_active)
        queue_s = terms.queue_s + terms.step_s / 2  # half of the present step, on average
        row = LocalPrefillEstimate(
            terms.worker_id,
            source or placement.chosen.home,
            0,
            source,
            n_blocks,
            n_blocks,
            queue_s,
            transfer_s,
            forecast.seconds,
            queue_s + transfer_s + forecast.seconds,
            stalled_s,
            terms.tbt_slo_s,
            placement.chosen.worker_id,
        )
        rows.append((row, tbt_s))
    best = min(
        rows,
        key=lambda r: (r[0].ttft_s, r[0].worker_id != job.pages_at, r[0].worker_id),
        default=None,
    )
    if best is None:
        return placement
    placement = replace(
        placement,
        estimates=(*placement.estimates, *(row for row, _ in rows)),
        known_blocks=max(placement.known_blocks, n_blocks),
    )
    row, tbt_s = best
    if row.ttft_s < placement.ttft_s:
        return replace(placement, chosen=row, decode=row.worker_id, tbt_s=tbt_s)
    return placement
