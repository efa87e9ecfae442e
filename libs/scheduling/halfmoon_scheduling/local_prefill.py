"""Conditional disaggregation: a short rest of a prompt is prefilled where it is decoded.

A prompt of which nearly all is cached needs one small forward pass. Sent through the prefill
pool it waits there and its KV is written twice over the network; put into the decode worker's
next step it makes that step longer for everybody in it. Mooncake inlines it if it needs no
chunking and keeps the time between tokens (arXiv 2407.00079, section 5.1); here it must also
be the faster way.

Plain functions: no decode worker of ours prefills yet, see `docs/scheduling.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.cost_model import unscaled_prefill_s


@dataclass(frozen=True, slots=True)
class LocalCandidate:
    """A decode worker that may prefill, as it is now."""

    worker_id: WorkerId
    prefill_cost: PrefillCost
    #: Predicted seconds of its steps, without the request and with it decoding.
    step_s: float
    step_with_s: float
    free_pages: int
    #: Prompt tokens whose KV it could fetch, whole blocks, and the seconds of that.
    n_cached: int
    fetch_s: float


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """A prefill inside a decode worker's next step."""

    worker_id: WorkerId
    #: Seconds to the first token: fetching, then the step that holds the prefill.
    ttft_s: float
    #: Seconds of that step: the longest wait that it brings to others.
    stalled_step_s: float


def choose_local(
    candidates: Sequence[LocalCandidate],
    *,
    n_tokens: int,
    n_pages: int,
    disaggregated_ttft_s: float,
    tbt_slo_s: float,
    chunk_tokens: int,
) -> LocalPrefill | None:
    """The decode worker to prefill at, or None when the prefill pool is to do it.

    Args:
        candidates: decode workers.
        n_tokens: tokens of the prompt.
        n_pages: pages that decode must have free for it.
        disaggregated_ttft_s: predicted time to first token by way of the prefill pool, until
            its KV has landed.
        tbt_slo_s: the least limit of all requests in those workers' batches, seconds.
        chunk_tokens: a longer rest would take several steps.
    """
    choices = []
    for candidate in candidates:
        n_computed = n_tokens - candidate.n_cached
        if candidate.free_pages < n_pages or n_computed > chunk_tokens:
            continue
        prefill_s = unscaled_prefill_s(candidate.prefill_cost, n_tokens, candidate.n_cached)
        stalled_s = candidate.step_s + prefill_s
        ttft_s = candidate.fetch_s + stalled_s
        keeps = max(stalled_s, candidate.step_with_s) <= tbt_slo_s
        if keeps and ttft_s < disaggregated_ttft_s:
            choices.append(LocalPrefill(candidate.worker_id, ttft_s, stalled_s))
    return min(choices, key=lambda c: (c.ttft_s, c.worker_id), default=None)
