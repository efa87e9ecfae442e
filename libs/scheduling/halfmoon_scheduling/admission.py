"""Whether a placed request is let in: a promise is kept or not made.

A refusal here comes before anything is spent: no pages are reserved, no prefill is run.
"""

from dataclasses import dataclass

from halfmoon_scheduling.config import AdmissionMode
from halfmoon_scheduling.placement import Placement

#: Seconds that a refused client waits at the least.
MIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The request would miss its SLO."""

    reason: str
    retry_after_s: float


def decide(
    mode: AdmissionMode,
    placement: Placement,
    *,
    ttft_slo_s: float | None,
    tbt_slo_s: float | None,
    waited_s: float = 0.0,
) -> Refused | None:
    """Let a request in (None), or say why not.

    Args:
        mode: "none" lets all in; "early" refuses who would miss an SLO.
        placement: with its predictions.
        ttft_slo_s: time to first token from arrival, seconds; None: no limit.
        tbt_slo_s: time between tokens, seconds; None: no limit.
        waited_s: seconds since the request arrived.
    """
    if mode == "none":
        return None
    ttft_s = waited_s + placement.ttft_s
    if ttft_slo_s is not None and ttft_s > ttft_slo_s:
        # The queue ahead shrinks by a second a second: so long until the rest would fit, or,
        # if it never fits, until the queue is gone.
        excess_s = min(ttft_s - ttft_slo_s, placement.chosen.queue_s)
        return Refused(
            f"predicted time to first token is {ttft_s:.3g} s at {placement.prefill} "
            f"(queue {placement.chosen.queue_s:.3g} s), the limit is {ttft_slo_s:.3g} s",
            max(MIN_RETRY_S, excess_s),
        )
    if tbt_slo_s is not None and placement.tbt_s > tbt_slo_s:
        return Refused(
            f"predicted time between tokens is {placement.tbt_s:.3g} s at {placement.decode}, "
            f"the limit is {tbt_slo_s:.3g} s",
            MIN_RETRY_S,
        )
    return None
