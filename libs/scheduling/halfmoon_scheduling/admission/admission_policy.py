"""Whether a placed request is let in: a promise is kept or not made.

A load is a predicted maximum over its limit: time to first token on the prefill side, time
between tokens on the decode side. A request is let in while neither is over 1. The modes
differ in the decode load that they look at, and when:

    none        no load at all
    baseline    the decode worker's, when the prefill is done: a refusal then has wasted it
    early       the decode pool's now, when the request arrives
    predicted   the decode pool's at the time when the prefill will be done, if every request
                decodes for the same time
    lookahead   the same; and a request waits rather than being refused, before its prefill and
                after it, as long as its first token can still be in time

The first four are Mooncake's (arXiv 2407.00079, section 7); a pool's load is the mean of its
workers'. `early` looks at a load that prefills under way have not reached yet, so that it lets
too many in and then nobody, and both pools' loads swing. `lookahead` uses the time that the
limit leaves: decode's load goes up and down within seconds, and whoever can wait for a gap
need not be sent away (see `door` for the wait after the prefill).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.config import AdmissionMode, SchedulingConfig
from halfmoon_scheduling.placement.placement_policy import Placement

#: Seconds that a refused client waits at the least.
MIN_RETRY_S = 1.0


class DecodeLoadPredictor(Protocol):
    """What is known and predicted of the decode workers; asking changes nothing."""

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Seconds per step of what runs at a worker now and a request of `n_tokens`."""
        ...

    def mean_tbt_s(self, n_tokens: int) -> float:
        """Mean over all workers of what runs there now, and a request of `n_tokens`."""
        ...

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        """Mean over all workers at a later moment, if all decode for the same time."""
        ...


@dataclass(frozen=True, slots=True)
class AdmissionCase:
    """A placed request that asks to be let in, and the limits that it is held to."""

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
    """What was predicted for a request, and whether it is let in."""

    #: Predicted times over their limits; 0 where there is no limit, or nobody looked.
    prefill_load: float = 0.0
    decode_load: float = 0.0
    #: Which limit would be missed; "" lets the request in.
    misses: Literal["", "ttft", "tbt"] = ""
    reason: str = ""
    retry_after_s: float = 0.0


ADMITTED = AdmissionVerdict()

#: The time between tokens that a mode expects for an applicant with a decode worker.
_Expect = Callable[[AdmissionCase, DecodeLoadPredictor, WorkerId], float]


def _early(applicant: AdmissionCase, outlook: DecodeLoadPredictor, decode: WorkerId) -> float:
    return outlook.mean_tbt_s(applicant.n_tokens)


def _predicted(applicant: AdmissionCase, outlook: DecodeLoadPredictor, decode: WorkerId) -> float:
    at_s = applicant.now + applicant.placement.ttft_s
    return outlook.uniform_tbt_s(applicant.n_tokens, at_s, applicant.now)


#: What each mode expects of decode at arrival; None: it does not look.
_EXPECTS: dict[AdmissionMode, _Expect | None] = {
    "baseline": None,
    "early": _early,
    "predicted": _predicted,
    "lookahead": _predicted,
}


def decide_on_arrival(
    mode: AdmissionMode, applicant: AdmissionCase, outlook: DecodeLoadPredictor
) -> AdmissionVerdict:
    """Let a request in when it arrives, or say why not. Nothing has been spent on it.

    Args:
        mode: see the module's table.
        applicant: the request.
        outlook: the decode workers.
    """
    if mode == "none":
        return ADMITTED
    placement = applicant.placement
    ttft_s = applicant.waited_s + placement.ttft_s
    prefill_load = _load(ttft_s, applicant.ttft_slo_s)
    if prefill_load > 1:
        # The queue ahead shrinks by a second a second: so long until the rest would fit, or,
        # if it never fits, until the queue is gone.
        queue_s = placement.chosen.queue_s
        excess_s = min(ttft_s - (applicant.ttft_slo_s or 0.0), queue_s)
        return AdmissionVerdict(
            prefill_load,
            misses="ttft",
            reason=f"predicted time to first token is {ttft_s:.3g} s at {placement.prefill} "
            f"(queue {queue_s:.3g} s), the limit is {applicant.ttft_slo_s:.3g} s",
            retry_after_s=max(MIN_RETRY_S, excess_s),
        )
    expects = _EXPECTS[mode]
    if expects is None or placement.decode is None or applicant.tbt_slo_s is None:
        return AdmissionVerdict(prefill_load)
    tbt_s = expects(applicant, outlook, placement.decode)
    return _by_decode(prefill_load, tbt_s, applicant.tbt_slo_s, placement.decode)


def refuses_after_prefill(config: SchedulingConfig) -> bool:
    """Whether a request may be refused when its prefill is done, which was in vain then."""
    return config.admission == "baseline" or (config.double_check and config.admission != "none")


def decide_after_prefill(
    decode: WorkerId, n_tokens: int, tbt_slo_s: float | None, outlook: DecodeLoadPredictor
) -> AdmissionVerdict:
    """Let a request whose prefill is done into its decode worker's batch, or say why not.

    Args:
        decode: its decode worker.
        n_tokens: tokens of its prompt.
        tbt_slo_s: time between tokens, seconds; None: no limit.
        outlook: the decode workers.
    """
    if tbt_slo_s is None:
        return ADMITTED
    return _by_decode(0.0, outlook.running_tbt_s(decode, n_tokens), tbt_slo_s, decode)


def _by_decode(
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
