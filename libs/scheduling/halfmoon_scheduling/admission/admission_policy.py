"""Decide whether a placed request is admitted, by its predicted latencies and their limits.

A load is a predicted latency over its limit: time to first token on the prefill side, time between
tokens on the decode side. A request is admitted while neither is over 1. The modes differ in the
decode load that they compare, and when:

    none        no load at all
    baseline    the decode worker's, when the prefill is done: a refusal then has wasted it
    early       the decode pool's now, when the request arrives
    predicted   the decode pool's at the time when the prefill will be done, if every request
                decodes for the same time
    lookahead   the same; and a request waits rather than being refused, before its prefill and
                after it, as long as its first token can still be in time

The first four are Mooncake's (arXiv 2407.00079, section 7). A pool's load is the mean of its
workers'. `early` compares a load that prefills under way have not reached yet. So it admits too
many requests and then none, and the loads of both pools swing. `lookahead` uses the time that the
limit leaves: decode's load changes within seconds, so a request that can wait for a gap need not be
refused. `late_admission` has the wait after the prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.config import AdmissionMode, SchedulingConfig
from halfmoon_scheduling.placement.placement_policy import Placement

#: Seconds after which a refused client may retry, at least.
MIN_RETRY_S = 1.0


class DecodeLoadPredictor(Protocol):
    """Predict the time between tokens of decode workers; no method changes anything."""

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Return seconds per step of a worker's running requests and one more of `n_tokens`."""
        ...

    def mean_tbt_s(self, n_tokens: int) -> float:
        """Return the mean over all workers of the same."""
        ...

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        """Return that mean at a later moment, if all requests decode for the same time."""
        ...


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

#: Predicts the time between tokens of a case with a decode worker.
_TbtPrediction = Callable[[AdmissionCase, DecodeLoadPredictor, WorkerId], float]


def _early(case: AdmissionCase, predictor: DecodeLoadPredictor, decode: WorkerId) -> float:
    return predictor.mean_tbt_s(case.n_tokens)


def _predicted(case: AdmissionCase, predictor: DecodeLoadPredictor, decode: WorkerId) -> float:
    at_s = case.now + case.placement.ttft_s
    return predictor.uniform_tbt_s(case.n_tokens, at_s, case.now)


#: The prediction of decode that each mode uses at arrival; None: it uses none.
_TBT_PREDICTIONS: dict[AdmissionMode, _TbtPrediction | None] = {
    "baseline": None,
    "early": _early,
    "predicted": _predicted,
    "lookahead": _predicted,
}


def decide_on_arrival(
    mode: AdmissionMode, case: AdmissionCase, predictor: DecodeLoadPredictor
) -> AdmissionVerdict:
    """Admit a request when it arrives, or return the reason not to.

    Args:
        mode: see the module's table.
        case: the placed request.
        predictor: predicts the decode workers' times.
    """
    if mode == "none":
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
    predict = _TBT_PREDICTIONS[mode]
    if predict is None or placement.decode is None or case.tbt_slo_s is None:
        return AdmissionVerdict(prefill_load)
    tbt_s = predict(case, predictor, placement.decode)
    return _compare_tbt(prefill_load, tbt_s, case.tbt_slo_s, placement.decode)


def refuses_after_prefill(config: SchedulingConfig) -> bool:
    """Return whether a request may be refused after its prefill, which is then wasted."""
    return config.admission == "baseline" or (config.double_check and config.admission != "none")


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
