"""What admission learns from, what it bounds, and the limits on waiting, through the whole core."""

import pytest

from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.commands import Reject
from halfmoon_scheduling.conductor.decision_log import Decision
from tests.scheduling.core import Core, only

LIMIT_S = 10.5
#: A prompt takes a second by the profile.
PREFILL = PrefillCost(c0_s=1.0, c1_s=0.0)


class Bounded(Core):
    """A prefill and a decode worker; prompts take twice as long as predicted."""

    def __init__(self, **config: object) -> None:
        fields = {"admission": "lookahead", "ttft_slo_s": LIMIT_S, "admission_quantile": 0.9}
        super().__init__(**(fields | config))
        self.n = 0
        self.join("prefill-0", prefill_cost=PREFILL)
        self.join("decode-0", n_blocks=100_000)

    def decide(self) -> tuple[str, Decision]:
        """A new request, and what is decided."""
        self.n += 1
        self.arrive(f"r{self.n}")
        return f"r{self.n}", self.decision

    def outcomes(self, n: int) -> list[str]:
        return [self.decide()[1].outcome for _ in range(n)]

    def done(self, rid: str) -> None:
        # A fetch that takes all the time: the worker's correction learns nothing from it.
        self.prefilled(rid=rid, compute_s=1.0, fetch_s=1.0)

    def serve(self, n: int, takes_s: float = 2.0) -> None:
        """Serve requests one after the other."""
        for _ in range(n):
            rid, _ = self.decide()
            self.reserved(rid=rid)
            self.now += takes_s
            self.done(rid)
            self.finish(rid, 1)

    def ratio(self) -> float:
        """The ratio by which a prompt's prediction is multiplied."""
        rid, decision = self.decide()
        self.cancel(rid)
        assert decision.ttft_bound is not None
        return decision.ttft_bound.ratio


def test_a_request_is_refused_by_the_errors_of_earlier_predictions() -> None:
    core = Bounded()
    core.serve(60)
    # Each waits for those before it, a second by the prediction and two in truth: five fit.
    assert core.outcomes(20) == ["placed"] * 5 + ["refused"] * 15
    refused = core.decision
    assert refused.prefill_load > 1 and refused.ttft_bound is not None
    assert refused.ttft_bound.ratio == pytest.approx(2.0, rel=0.03)
    assert "0.95 quantile" in refused.reason and "the limit is 10.5 s" in refused.reason


def test_with_no_quantile_the_mean_prediction_is_compared() -> None:
    core = Bounded(admission_quantile=0.0)
    core.serve(30)
    assert core.outcomes(20) == ["placed"] * 10 + ["refused"] * 10
    assert core.decision.ttft_bound is None


@pytest.mark.parametrize("end", ["nothing was seen", "cancelled", "failed", "placed again"])
def test_the_margin_is_the_priors_as_long_as_no_request_teaches_better(end: str) -> None:
    core = Bounded()
    if end == "placed again":
        core.join("decode-1", n_blocks=100_000)
    for _ in range(0 if end == "nothing was seen" else 30):
        rid, decision = core.decide()
        first = decision.placement.decode
        assert first is not None
        if end == "placed again":
            core.refused(first, rid, retry_after_s=0.0)
            second = core.placement.decode
            assert second not in (None, first)
            first = second
        core.reserved(first, rid)
        core.now += 9.0
        if end == "cancelled":
            core.cancel(rid)
        elif end == "failed":
            core.prefill_failed(rid=rid, retryable=False)
        else:
            core.done(rid)
            core.finish(rid, 1)
            core.tick()
    assert core.ratio() == pytest.approx(1.25, rel=0.02)


def test_a_request_with_nothing_ahead_is_admitted_by_the_profile_and_teaches_better() -> None:
    """Else a bad minute would refuse all, and nothing could show that it is over."""
    core = Bounded(ttft_slo_s=3.0)
    core.serve(30, takes_s=9.0)
    assert core.ratio() > 8  # eight times a second are over the limit of three
    core.serve(100, takes_s=1.0)
    outcomes = {d.outcome for d in core.conductor.decisions}
    assert outcomes == {"placed"}
    core.now += 100.0
    core.serve(30, takes_s=1.0)
    assert core.ratio() < 1.5


def test_a_request_with_nothing_ahead_is_refused_where_the_profile_is_over_the_limit() -> None:
    assert Bounded(ttft_slo_s=0.5).outcomes(1) == ["refused"]


# -- limits on waiting ---------------------------------------------------------------------------


def test_no_more_requests_wait_for_a_first_token_than_may() -> None:
    core = Bounded(ttft_slo_s=None, max_queued_requests=3)
    ids = [core.decide()[0] for _ in range(3)]
    reject = only(core.arrive("more"), Reject)
    assert (reject.kind, core.conductor.refusals) == ("overloaded", {"queue_full": 1})
    assert reject.retry_after_s > 0
    for part in ("3 requests", "max_queued_requests is 3", "--max-queued-requests"):
        assert part in reject.reason
    core.arrive("again", attempt=2)  # a retry is not refused
    core.cancel("again")
    core.reserved(rid=ids[0])
    core.done(ids[0])  # decodes: it waits no more
    core.decide()
    assert core.conductor.refusals == {"queue_full": 1}


def test_none_is_admitted_behind_a_longer_queue_than_allowed() -> None:
    core = Bounded(admission="none", ttft_slo_s=None, max_queue_s=2.5)
    assert core.outcomes(5) == ["placed"] * 3 + ["refused"] * 2  # behind 0, 1, 2 and 3 s
    assert core.conductor.refusals == {"queue_time": 2}
    reason = core.decision.reason
    assert "3 s" in reason and "max_queue_s is 2.5" in reason and "--max-queue-s" in reason
    # A longer prompt than the queue may be is admitted when it is idle.
    longer = Bounded(admission="none", ttft_slo_s=None, max_queue_s=0.5)
    assert longer.outcomes(1) == ["placed"]
