"""Decide whether a placed request is admitted, when it arrives and when its prefill is done.

`halfmoon_scheduling.admission_modes` defines the modes and what a load is. `late_admission` has
the wait for decode after the prefill.
"""

from dataclasses import dataclass, replace
from typing import Literal

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.admission_modes import ADMISSION_MODES, DecodeLoadPredictor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.placement.estimates import Placement
from halfmoon_scheduling.prediction.error_quantiles import ErrorBound

#: Seconds after which a refused client may retry, at least.
MIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionCase:
    """A placed request that is to be admitted, and its limits."""

    placement: Placement
    n_tokens: int
    #: Time to first token from arrival, seconds; None: no limit.
    ttft_slo_s: float | None
    #: Time between tokens, seconds; None: no limit.
    tbt_slo_s: float | None
    #: Now, and how long ago the request arrived, seconds.
    now: float
    waited_s: float = 0.0
    #: Seconds to the first token, and between tokens, by the workers' profiles alone, if nothing
    #: is ahead of the request there. Such a request is a probe: with these within the limits it is
    #: admitted, whatever corrections and errors say. Nothing else could prove them wrong.
    profile_ttft_s: float | None = None
    profile_tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The predicted loads for a request, and whether it is admitted."""

    #: Predicted times, or their bounds, over their limits; 0 where there is no limit, or no
    #: prediction.
    prefill_load: float = 0.0
    decode_load: float = 0.0
    #: The limit that would be missed; "" admits the request.
    misses: Literal["", "ttft", "tbt"] = ""
    reason: str = ""
    retry_after_s: float = 0.0
    #: The time between tokens that was forecast at arrival; 0: none was.
    forecast_tbt_s: float = 0.0
    #: What was compared with the limits, unless that was the mean prediction.
    ttft: ErrorBound | None = None
    tbt: ErrorBound | None = None


ADMITTED = AdmissionVerdict()


def decide_on_arrival(
    mode: str,
    case: AdmissionCase,
    predictor: DecodeLoadPredictor,
    bounds: LimitBounds | None = None,
) -> AdmissionVerdict:
    """Admit a request when it arrives, or return the reason not to.

    Args:
        mode: a name in `ADMISSION_MODES`.
        case: the placed request.
        predictor: predicts the decode workers' times.
        bounds: bounds predictions by their errors; None: the mean predictions count.
    """
    admission = ADMISSION_MODES[mode]
    if not admission.checks_limits:
        return ADMITTED
    placement, now = case.placement, case.now
    ttft = None
    if bounds is not None and case.ttft_slo_s is not None:
        ttft = bounds.ttft(case.n_tokens, placement.chosen, now)
    left_s = placement.ttft_s if ttft is None else ttft.bound_s
    ttft_s = case.waited_s + left_s
    prefill_load = _load(ttft_s, case.ttft_slo_s)
    if prefill_load > 1 and not _is_within(case.profile_ttft_s, case.ttft_slo_s, case.waited_s):
        # The queue ahead shrinks by a second each second. So long until the request would fit; if
        # it never fits, until the queue is empty.
        queue_s = placement.chosen.queue_s
        excess_s = ttft_s - (case.ttft_slo_s or 0.0)
        if ttft is not None:
            excess_s /= ttft.ratio
        predicted = f"{ttft_s:.3g} s"
        if ttft is not None:
            predicted = f"{case.waited_s:.3g} s and {ttft}" if case.waited_s else str(ttft)
        return AdmissionVerdict(
            prefill_load,
            misses="ttft",
            reason=f"predicted time to first token is {predicted} at {placement.prefill} "
            f"(queue {queue_s:.3g} s), the limit is {case.ttft_slo_s:.3g} s",
            retry_after_s=max(MIN_RETRY_S, min(excess_s, queue_s)),
            ttft=ttft,
        )
    expected_tbt_s = admission.expected_tbt_s
    if expected_tbt_s is None or placement.decode is None or case.tbt_slo_s is None:
        return AdmissionVerdict(prefill_load, ttft=ttft)
    prefill_done_s = now + placement.ttft_s
    tbt_s = expected_tbt_s(predictor, case.n_tokens, prefill_done_s, now)
    tbt = None if bounds is None else bounds.forecast_tbt(case.n_tokens, tbt_s, now)
    verdict = _compare_tbt(prefill_load, tbt_s, tbt, case.tbt_slo_s, placement.decode)
    if verdict.misses and _is_within(case.profile_tbt_s, case.tbt_slo_s):
        verdict = AdmissionVerdict(prefill_load, verdict.decode_load, tbt=tbt)
    return replace(verdict, forecast_tbt_s=tbt_s, ttft=ttft)


def refuses_after_prefill(config: SchedulingConfig) -> bool:
    """Return whether a request may be refused after its prefill, which is then wasted."""
    admission = ADMISSION_MODES[config.admission]
    return admission.checks_after_prefill or (config.double_check and admission.checks_limits)


def decide_after_prefill(
    decode: WorkerId,
    n_tokens: int,
    tbt_slo_s: float | None,
    predictor: DecodeLoadPredictor,
    now: float = 0.0,
    bounds: LimitBounds | None = None,
) -> AdmissionVerdict:
    """Admit a prefilled request to its decode worker's batch, or return the reason not to.

    Args:
        decode: its decode worker.
        n_tokens: tokens of its prompt.
        tbt_slo_s: limit of the time between tokens, seconds; None: no limit.
        predictor: predicts the decode workers' times.
        now: seconds.
        bounds: as in `decide_on_arrival`.
    """
    if tbt_slo_s is None:
        return ADMITTED
    tbt_s = predictor.running_tbt_s(decode, n_tokens)
    tbt = None if bounds is None else bounds.joined_tbt(n_tokens, tbt_s, now)
    return _compare_tbt(0.0, tbt_s, tbt, tbt_slo_s, decode)


def _compare_tbt(
    prefill_load: float,
    tbt_s: float,
    tbt: ErrorBound | None,
    tbt_slo_s: float,
    decode: WorkerId,
) -> AdmissionVerdict:
    decode_load = (tbt_s if tbt is None else tbt.bound_s) / tbt_slo_s
    if decode_load <= 1:
        return AdmissionVerdict(prefill_load, decode_load, tbt=tbt)
    predicted = f"{tbt_s:.3g} s" if tbt is None else str(tbt)
    return AdmissionVerdict(
        prefill_load,
        decode_load,
        misses="tbt",
        reason=f"predicted time between tokens is {predicted} at {decode}, "
        f"the limit is {tbt_slo_s:.3g} s",
        retry_after_s=MIN_RETRY_S,
        tbt=tbt,
    )


def _is_within(profile_s: float | None, limit_s: float | None, waited_s: float = 0.0) -> bool:
    return profile_s is not None and limit_s is not None and waited_s + profile_s <= limit_s


def _load(seconds: float, limit_s: float | None) -> float:
    return 0.0 if limit_s is None else seconds / limit_s
