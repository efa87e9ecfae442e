"""What admission learns from, what it bounds, and the limits on waiting, through the whole core."""

import io

import msgspec
import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import DecodeRefused, DecodeReserved, PrefillCost, PrefillFailed
from halfmoon_scheduling.commands import AnyCommand, Reject
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.conductor.journal import encode_entry, encode_header, replay_journal
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
)
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

P0, D0 = WorkerId("prefill-0"), WorkerId("decode-0")
LIMIT_S = 10.5
#: Within a prompt's own second by the profile, of which it takes `TAKES_S`.
PREFILL = PrefillCost(c0_s=1.0, c1_s=0.0)
TAKES_S = 2.0


class Core:
    """A prefill and a decode worker; prompts take twice as long as predicted."""

    def __init__(self, **config: object) -> None:
        fields = {"admission": "lookahead", "ttft_slo_s": LIMIT_S, "admission_quantile": 0.9}
        self.config = msgspec.convert(fields | config, SchedulingConfig)
        self.conductor = Conductor(self.config)
        self.journal = io.BytesIO()
        self.journal.write(encode_header(self.config))
        self.now = 0.0
        self.n = 0
        self.handle(WorkerJoined(a_worker("prefill-0", prefill_cost=PREFILL)))
        self.handle(WorkerJoined(a_worker("decode-0", n_blocks=100_000)))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        self.journal.write(encode_entry(self.now, event, commands))
        return commands

    def arrive(self, **fields: object) -> tuple[RequestId, Decision]:
        """A new request, and what was decided."""
        self.n += 1
        name = f"r{self.n}"
        self.handle(RequestArrived(a_request(name, **fields)))  # type: ignore[arg-type]
        return RequestId(name), self.conductor.decisions[-1]

    def reserved(self, request_id: RequestId) -> None:
        landing = a_landing("decode-0")
        answer = DecodeReserved(request_id=request_id, landing=landing, expires_s=60.0)
        self.handle(MessageReceived(D0, answer))

    def prefilled(self, request_id: RequestId) -> None:
        # A fetch that takes all the time: the worker's correction learns nothing from it.
        done = a_prefill_done(request_id, compute_s=1.0, fetch_s=1.0)
        self.handle(MessageReceived(P0, done))

    def serve(self, n: int, takes_s: float = TAKES_S) -> None:
        """Serve requests one after the other."""
        for _ in range(n):
            request_id, _ = self.arrive()
            self.reserved(request_id)
            self.now += takes_s
            self.prefilled(request_id)
            self.handle(RequestFinished(request_id, 1))

    def ratio(self) -> float:
        """The ratio by which a prompt's prediction is multiplied."""
        request_id, decision = self.arrive()
        self.handle(RequestCancelled(request_id))
        assert decision.ttft_bound is not None
        return decision.ttft_bound.ratio


def test_a_request_is_refused_by_the_errors_of_earlier_predictions() -> None:
    core = Core()
    core.serve(60)
    for _ in range(20):
        core.arrive()
    outcomes = [d.outcome for d in list(core.conductor.decisions)[-20:]]
    # Each waits for those before it, a second by the prediction and two in truth: five fit.
    assert outcomes == ["placed"] * 5 + ["refused"] * 15
    refused = core.conductor.decisions[-1]
    assert refused.prefill_load > 1 and refused.ttft_bound is not None
    assert refused.ttft_bound.ratio == pytest.approx(2.0, rel=0.03)
    assert "0.95 quantile" in refused.reason and "the limit is 10.5 s" in refused.reason


def test_with_no_quantile_the_mean_prediction_is_compared() -> None:
    core = Core(admission_quantile=0.0)
    core.serve(30)
    for _ in range(20):
        core.arrive()
    outcomes = [d.outcome for d in list(core.conductor.decisions)[-20:]]
    assert outcomes == ["placed"] * 10 + ["refused"] * 10
    assert core.conductor.decisions[-1].ttft_bound is None


def test_a_first_request_has_the_margin_of_the_prior() -> None:
    assert Core().ratio() == pytest.approx(1.25, rel=0.02)


def test_cancelled_requests_teach_nothing() -> None:
    core = Core()
    for _ in range(30):
        request_id, _ = core.arrive()
        core.reserved(request_id)
        core.now += 9.0
        core.handle(RequestCancelled(request_id))
    assert core.ratio() == pytest.approx(1.25, rel=0.02)


def test_requests_that_were_placed_again_teach_nothing() -> None:
    core = Core()
    core.handle(WorkerJoined(a_worker("decode-1", n_blocks=100_000)))
    for _ in range(30):
        request_id, decision = core.arrive()
        first = decision.placement.decode
        assert first is not None
        refusal = DecodeRefused(
            request_id=request_id, reason="full", retryable=True, retry_after_s=0.0
        )
        core.handle(MessageReceived(first, refusal))
        second = core.conductor.decisions[-1].placement.decode
        assert second not in (None, first)
        landing = a_landing(second)
        answer = DecodeReserved(request_id=request_id, landing=landing, expires_s=60.0)
        core.handle(MessageReceived(second, answer))
        core.now += 5.0
        core.prefilled(request_id)
        core.handle(RequestFinished(request_id, 1))
        core.handle(Tick())
    assert core.ratio() == pytest.approx(1.25, rel=0.02)


def test_requests_whose_prefill_failed_teach_nothing() -> None:
    core = Core()
    for _ in range(30):
        request_id, _ = core.arrive()
        core.reserved(request_id)
        core.now += 9.0
        core.handle(
            MessageReceived(P0, PrefillFailed(request_id=request_id, reason="x", retryable=False))
        )
    assert core.ratio() == pytest.approx(1.25, rel=0.02)


def test_a_request_with_nothing_ahead_is_admitted_by_the_profile_and_teaches_better() -> None:
    """Else a bad minute would refuse all, and nothing could show that it is over."""
    core = Core(ttft_slo_s=3.0)
    core.serve(30, takes_s=9.0)
    assert core.ratio() > 8  # eight times a second are over the limit of three
    core.serve(100, takes_s=1.0)
    outcomes = {d.outcome for d in core.conductor.decisions}
    assert outcomes == {"placed"}
    core.now += 100.0
    core.serve(30, takes_s=1.0)
    assert core.ratio() < 1.5


def test_a_request_with_nothing_ahead_is_refused_where_the_profile_is_over_the_limit() -> None:
    core = Core(ttft_slo_s=0.5)
    assert core.arrive()[1].outcome == "refused"


def test_a_journal_replays_to_the_same_commands() -> None:
    core = Core(max_queued_requests=8)
    core.serve(30)
    for _ in range(20):
        core.arrive()
    core.journal.seek(0)
    n, difference = replay_journal(core.journal)
    assert difference is None and n == 2 + 30 * 4 + 20


# -- limits on waiting ---------------------------------------------------------------------------


def test_no_more_requests_wait_for_a_first_token_than_may() -> None:
    core = Core(ttft_slo_s=None, max_queued_requests=3)
    ids = [core.arrive()[0] for _ in range(3)]
    (reject,) = core.handle(RequestArrived(a_request("more")))
    assert isinstance(reject, Reject)
    assert (reject.kind, core.conductor.refusals) == ("overloaded", {"queue_full": 1})
    assert reject.retry_after_s > 0
    for part in ("3 requests", "max_queued_requests is 3", "--max-queued-requests"):
        assert part in reject.reason
    core.reserved(ids[0])
    core.prefilled(ids[0])  # decodes: it waits no more
    core.arrive()
    assert core.conductor.refusals == {"queue_full": 1}


def test_a_retry_is_not_refused_for_the_number_that_waits() -> None:
    core = Core(ttft_slo_s=None, max_queued_requests=1)
    core.arrive()
    core.handle(RequestArrived(a_request("again", attempt=2)))
    assert not core.conductor.refusals


def test_none_is_admitted_behind_a_longer_queue_than_allowed() -> None:
    core = Core(admission="none", ttft_slo_s=None, max_queue_s=2.5)
    outcomes = [core.arrive()[1].outcome for _ in range(5)]
    assert outcomes == ["placed"] * 3 + ["refused"] * 2  # behind 0, 1, 2 and 3 s
    assert core.conductor.refusals == {"queue_time": 2}
    reason = core.conductor.decisions[-1].reason
    assert "3 s" in reason and "max_queue_s is 2.5" in reason and "--max-queue-s" in reason


def test_a_longer_prompt_than_the_queue_may_be_is_admitted_when_idle() -> None:
    core = Core(admission="none", ttft_slo_s=None, max_queue_s=0.5)
    assert core.arrive()[1].outcome == "placed"
