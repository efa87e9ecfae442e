"""Register the admission modes: which predicted load a request is held to, and when.

A load is a predicted maximum over its limit: time to first token on the prefill side, time
between tokens on the decode side. A request is admitted while neither is over 1. The first four
modes are Mooncake's (arXiv 2407.00079, section 7); a pool's load is the mean of its workers'.

`early` looks at a load that prefills under way have not reached yet. So it admits too many
requests and then none, and the loads of both pools swing. `lookahead` uses the time that the
limit leaves: decode's load rises and falls within seconds, and a request that can wait for a gap
need not be refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.registry import Registry


class DecodeLoadPredictor(Protocol):
    """Predict the time between tokens at decode workers; no call changes state."""

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Return the seconds per step of a worker's present batch and a request of `n_tokens`."""
        ...

    def mean_tbt_s(self, n_tokens: int) -> float:
        """Return the mean over all workers of their present batches and a request."""
        ...

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        """Return the mean over all workers at a later time, if all decode equally long."""
        ...


#: Returns the TBT at the pool for a request of `n_tokens` whose prefill ends at `at_s`.
ExpectedTbt = Callable[[DecodeLoadPredictor, int, float, float], float]


@dataclass(frozen=True, slots=True)
class AdmissionMode:
    """An admission mode: what it expects of decode, and when it refuses."""

    #: The name in settings, options and reports.
    name: str
    #: One line for help texts.
    summary: str
    #: Whether any limit is checked.
    checks_limits: bool = True
    #: Expects decode's TBT when a request arrives; None: decode is not checked then.
    expected_tbt_s: ExpectedTbt | None = None
    #: Whether decode is checked when a prefill is done, whatever `double_check` says. A refusal
    #: then has wasted the prefill.
    checks_after_prefill: bool = False
    #: Whether a request that decode is too busy for waits while its first token can be in time.
    waits_for_decode: bool = False


def _mean_tbt_s(predictor: DecodeLoadPredictor, n_tokens: int, at_s: float, now: float) -> float:
    return predictor.mean_tbt_s(n_tokens)


def _uniform_tbt_s(predictor: DecodeLoadPredictor, n_tokens: int, at_s: float, now: float) -> float:
    return predictor.uniform_tbt_s(n_tokens, at_s, now)


#: All admission modes.
ADMISSION_MODES: Registry[AdmissionMode] = Registry("admission mode")
for _mode in (
    AdmissionMode("none", "every request is admitted", checks_limits=False),
    AdmissionMode(
        "baseline",
        "decode is checked only when the prefill is done: a refusal then has wasted it",
        checks_after_prefill=True,
    ),
    AdmissionMode(
        "early",
        "the decode pool's present load is checked when the request arrives",
        expected_tbt_s=_mean_tbt_s,
    ),
    AdmissionMode(
        "predicted",
        "the decode pool's load when the prefill will be done, if all requests decode equally long",
        expected_tbt_s=_uniform_tbt_s,
    ),
    AdmissionMode(
        "lookahead",
        "as predicted, and a request waits rather than being refused, before and after its prefill",
        expected_tbt_s=_uniform_tbt_s,
        waits_for_decode=True,
    ),
):
    ADMISSION_MODES.register(_mode)
