"""Choose the decode worker of a request among those with room."""

from collections.abc import Sequence
from math import inf

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.estimates import DecodeCandidate, PlacementRequest


def choose_decode(
    job: PlacementRequest, decodes: Sequence[DecodeCandidate]
) -> tuple[WorkerId | None, float]:
    """Return the decode worker with the least predicted TBT that has room, and that TBT.

    Among equals the one with the fewest requests is chosen. Then the one that may have pages of the
    prompt's prefix, then the one with the most free pages. So work is spread also where the cost
    model sees no difference.
    """
    n_pages, n_tokens, pages_at = job.n_pages, job.n_tokens, job.pages_at
    best: DecodeCandidate | None = None
    best_s = inf
    for decode in decodes:
        if decode.free_pages < n_pages:
            continue
        tbt_s = decode.step_s + decode.per_token_s * n_tokens
        if (
            best is None
            or tbt_s < best_s
            or (tbt_s == best_s and _rank(decode, pages_at) < _rank(best, pages_at))
        ):
            best, best_s = decode, tbt_s
    return (None, 0.0) if best is None else (best.worker_id, best_s)


def _rank(decode: DecodeCandidate, pages_at: WorkerId | None) -> tuple[int, bool, int, WorkerId]:
    is_other = decode.worker_id != pages_at
    return decode.n_requests, is_other, -decode.free_pages, decode.worker_id
