"""Decide whether a placed request is admitted, when it arrives and when its prefill is done.

`halfmoon_scheduling.admission_modes` defines the modes and what a load is. `late_admission` has
the wait for decode after the prefill.
"""

from dataclasses import dataclass
from typing import Literal

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission_modes import ADMISSION_MODES, DecodeLoadPredictor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.placement.estimates import Placement

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


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The predicted loads for a request, and whether it is admitted."""

    #: Predicted times over their limits; 0 where there is no limit, or no prediction.
    prefill_load: float = 0.0
    decode_load: float = 0.0
    #: The limit that would be missed; "" admits the request.
    misses: Literal["", "ttft", "tbt"] = ""
    reason: str = ""
    retry_after_s: float = 0.0


ADMITTED = AdmissionVerdict()


def decide_on_arrival(
    mode: str, case: AdmissionCase, predictor: DecodeLoadPredictor
) -> AdmissionVerdict:
    """Admit a request when it arrives, or return the reason not to.

    Args:
        mode: a name in `ADMISSION_MODES`.
        case: the placed request.
        predictor: predicts the decode workers' times.
    """
    admission = ADMISSION_MODES[mode]
    if not admission.checks_limits:
        return ADMITTED
    placement = case.placement
    ttft_s = case.waited_s + placement.ttft_s
    prefill_load = _load(ttft_s, case.ttft_slo_s)
    if prefill_load > 1:
        # The queue ahead shrinks by a second each second. So long until the request would fit; if
        # it never fits, until the queue is empty.
        queue_s = placement.chosen.queue_s
        excess_s = min(ttft_s - (case.ttft_slo_s or 0.0), queue_s)
        return AdmissionVerdict(
            prefill_load,
            misses="ttft",
            reason=f"predicted time to first token is {ttft_s:.3g} s at {placement.prefill} "
            f"(queue {queue_s:.3g} s), the limit is {case.ttft_slo_s:.3g} s",
            retry_after_s=max(MIN_RETRY_S, excess_s),
        )
    expected_tbt_s = admission.expected_tbt_s
    if expected_tbt_s is None or placement.decode is None or case.tbt_slo_s is None:
        return AdmissionVerdict(prefill_load)
    prefill_done_s = case.now + placement.ttft_s
    tbt_s = expected_tbt_s(predictor, case.n_tokens, prefill_done_s, case.now)
    return _compare_tbt(prefill_load, tbt_s, case.tbt_slo_s, placement.decode)


def refuses_after_prefill(config: SchedulingConfig) -> bool:
    """Return whether a request may be refused after its prefill, which is then wasted."""
    admission = ADMISSION_MODES[config.admission]
    return admission.checks_after_prefill or (config.double_check and admission.checks_limits)


def decide_after_prefill(
    decode: WorkerId, n_tokens: int, tbt_slo_s: float | None, predictor: DecodeLoadPredictor
) -> AdmissionVerdict:
    """Admit a prefilled request to its decode worker's batch, or return the reason not to.

    Args:
        decode: its decode worker.
        n_tokens: tokens of its prompt.
        tbt_slo_s: limit of the time between tokens, seconds; None: no limit.
        predictor: predicts the decode workers' times.
    """
    if tbt_slo_s is None:
        return ADMITTED
    return _compare_tbt(0.0, predictor.running_tbt_s(decode, n_tokens), tbt_slo_s, decode)


def _compare_tbt(
    prefill_load: float, tbt_s: float, tbt_slo_s: float, decode: WorkerId
) -> AdmissionVerdict:
    decode_load = tbt_s / tbt_slo_s
    if decode_load <= 1:
        return AdmissionVerdict(prefill_load, decode_load)
    return AdmissionVerdict(
        prefill_load,
        decode_load,
        misses="tbt",
        reason=f"predicted time between tokens is {tbt_s:.3g} s at {decode}, "
        f"the limit is {tbt_slo_s:.3g} s",
        retry_after_s=MIN_RETRY_S,
    )


def _load(seconds: float, limit_s: float | None) -> float:
    return 0.0 if limit_s is None else seconds / limit_s
