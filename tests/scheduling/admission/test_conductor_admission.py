"""Admission, deferral and priorities through the whole core, with costs worked out by hand."""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeCost,
    DecodeLoad,
    DecodeReserved,
    PrefillCost,
    ReserveDecode,
    StartPrefill,
    ToConductor,
)
from halfmoon_scheduling.commands import AnyCommand, Deliver, Reject, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.request_admission import MAX_FAILED_RETRIES
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
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

D0, P0 = WorkerId("decode-0"), WorkerId("prefill-0")
#: A prefill takes 10 s, a step 0.1 s for each request in it: with a limit of 0.2 s between
#: tokens two requests may decode at once.
PREFILL = PrefillCost(c0_s=10.0, c1_s=0.0)
STEP = DecodeCost(d0_s=0.0, d1_s=0.1, d2_s=0.0)


class Core:
    """One prefill and one decode worker, audited after every event."""

    def __init__(self, **config: Any) -> None:
        fields = {"tbt_slo_s": 0.2, **config}
        self.conductor = Conductor(SchedulingConfig(**fields))
        self.now = 0.0
        self.handle(WorkerJoined(a_worker("prefill-0", prefill_cost=PREFILL)))
        self.handle(WorkerJoined(a_worker("decode-0", decode_cost=STEP, n_blocks=1000)))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def arrive(self, name: str, **fields: Any) -> list[AnyCommand]:
        return self.handle(RequestArrived(a_request(name, **{"max_new_tokens": 500, **fields})))

    def hear(self, worker: WorkerId, message: ToConductor) -> list[AnyCommand]:
        return self.handle(MessageReceived(worker, message))

    def reserved(self, name: str) -> list[AnyCommand]:
        landing = a_landing("decode-0")
        return self.hear(
            D0, DecodeReserved(request_id=RequestId(name), landing=landing, expires_s=60.0)
        )

    def prefilled(self, name: str, fetch_s: float = 30.0) -> list[AnyCommand]:
        """In no time at all, which teaches nothing as long as it waited for cached blocks."""
        return self.hear(P0, a_prefill_done(name, compute_s=30.0, fetch_s=fetch_s))

    def decode(self, *names: str, **fields: Any) -> None:
        """These are decoding."""
        for name in names:
            assert self.let_in(self.arrive(name, **fields)), name
            self.reserved(name)
            self.prefilled(name)
            assert self.phase(name) is Phase.DECODING

    def finish(self, name: str, n_new: int = 0) -> list[AnyCommand]:
        return self.handle(RequestFinished(RequestId(name), n_new))

    def tick(self, now: float) -> list[AnyCommand]:
        self.now = now
        return self.handle(Tick())

    def phase(self, name: str) -> Phase | None:
        return self.conductor.phase_of(RequestId(name))

    @staticmethod
    def let_in(commands: list[AnyCommand]) -> bool:
        return any(isinstance(c, Send) and isinstance(c.message, ReserveDecode) for c in commands)


def reserved_for(commands: list[AnyCommand]) -> list[str]:
    return [
        c.message.request_id
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, ReserveDecode)
    ]


# -- the modes -----------------------------------------------------------------------------------


def test_early_looks_at_what_decodes_now_and_not_at_what_is_on_its_way() -> None:
    core = Core(admission="early")
    core.decode("a")
    assert core.let_in(core.arrive("b"))  # on its way
    assert core.let_in(core.arrive("c"))
    for name in ("b", "c"):
        core.reserved(name)
        core.prefilled(name)
    (reject,) = core.arrive("d")
    assert isinstance(reject, Reject)
    assert (reject.kind, core.conductor.refusals) == ("overloaded", {"tbt": 1})


def test_early_looks_at_the_mean_of_the_pool_with_the_request_in_it() -> None:
    core = Core(admission="early")
    core.handle(WorkerJoined(a_worker("decode-1", decode_cost=STEP, n_blocks=1000)))
    busy = DecodeLoad(
        n_running=3, n_reserved=0, context_tokens=0, free_pages=900, n_pages=1000, step_s=0.3
    )
    core.hear(D0, busy)  # 0.3 s and nothing: with one more 0.2 s on average
    assert core.let_in(core.arrive("a"))
    core.hear(WorkerId("decode-1"), msgspec.structs.replace(busy, n_running=1, step_s=0.1))
    assert not core.let_in(core.arrive("b"))


def test_early_counts_what_others_run_there_by_the_load_report() -> None:
    core = Core(admission="early")
    load = DecodeLoad(
        n_running=2, n_reserved=0, context_tokens=80, free_pages=900, n_pages=1000, step_s=0.2
    )
    core.hear(D0, load)
    assert not core.let_in(core.arrive("a"))


def test_baseline_lets_decode_refuse_when_the_prefill_is_done_and_wasted() -> None:
    core = Core(admission="baseline")
    core.decode("a", "b")
    assert core.let_in(core.arrive("c"))
    (start,) = core.reserved("c")
    assert isinstance(start, Send)
    assert isinstance(start.message, StartPrefill)
    reject, cancel = core.prefilled("c")
    assert isinstance(reject, Reject)
    assert reject.kind == "overloaded"
    assert reject.retry_after_s > 0
    assert cancel == Send(D0, Cancel(request_id=RequestId("c")))
    assert core.phase("c") is None
    assert core.conductor.refusals == {"tbt_late": 1}
    assert core.conductor.decisions[-1].outcome == "refused_late"


def test_baseline_does_not_refuse_a_retry_late() -> None:
    core = Core(admission="baseline")
    core.decode("a", "b")
    core.arrive("c~2", attempt=2)
    core.reserved("c~2")
    assert isinstance(core.prefilled("c~2")[0], Deliver)


@pytest.mark.parametrize("double_check", [False, True])
def test_early_refuses_late_only_if_it_is_to_check_twice(double_check: bool) -> None:
    core = Core(admission="early", double_check=double_check)
    core.decode("a")
    core.arrive("b")
    core.arrive("c")
    core.reserved("b")
    core.reserved("c")
    core.prefilled("b")
    assert isinstance(core.prefilled("c")[0], Reject if double_check else Deliver)


def test_predicted_counts_those_that_prefill_will_have_finished() -> None:
    core = Core(admission="predicted", decode_time_s=100.0)
    core.decode("a")
    assert core.let_in(core.arrive("b"))  # two will decode at 10
    assert not core.let_in(core.arrive("c"))  # three at 20


def test_predicted_lets_those_go_that_have_decoded_for_the_uniform_time() -> None:
    core = Core(admission="predicted", decode_time_s=100.0)
    core.decode("a", "b")
    core.now = 89.0
    assert not core.let_in(core.arrive("c"))  # at 99 both are there
    core.now = 90.0
    assert core.let_in(core.arrive("d"))  # at 100 they are over


def test_predicted_learns_the_decode_time_from_what_ends() -> None:
    core = Core(admission="predicted")
    core.decode("a")
    core.now = 50.0
    core.finish("a")
    core.decode("b", "c")
    core.now = 89.0
    assert not core.let_in(core.arrive("d"))
    core.now = 90.0
    assert core.let_in(core.arrive("e"))


@pytest.mark.parametrize("quantile", [0.0, 0.9])
def test_with_a_quantile_the_first_short_answer_is_not_taken_for_all(quantile: float) -> None:
    core = Core(admission="predicted", admission_quantile=quantile, tbt_slo_s=0.21)
    core.decode("a", "b")
    core.now = 1.0
    core.finish("a")
    core.decode("c")
    core.now = 20.0  # both have decoded for 19 s and more, and another would join at 30
    assert core.let_in(core.arrive("d")) == (quantile == 0)


def test_lookahead_holds_back_what_predicted_would_refuse_without_being_told_to() -> None:
    refusing = Core(admission="predicted", decode_time_s=100.0)
    refusing.decode("a", "b")
    assert isinstance(refusing.arrive("c")[0], Reject)
    waiting = Core(admission="lookahead", decode_time_s=100.0)
    waiting.decode("a", "b")
    assert waiting.arrive("c") == []
    assert waiting.phase("c") is Phase.DEFERRED
    waiting.finish("a")
    assert reserved_for(waiting.tick(1.0)) == ["c"]


def test_lookahead_holds_nobody_back_if_told_so() -> None:
    core = Core(admission="lookahead", decode_time_s=100.0, max_deferred=0)
    core.decode("a", "b")
    assert isinstance(core.arrive("c")[0], Reject)


# -- limits --------------------------------------------------------------------------------------


def test_limits_may_be_multiples_of_what_an_idle_worker_takes() -> None:
    core = Core(admission="early", tbt_slo_s=None, ttft_slo_multiple=2.5, tbt_slo_multiple=2.0)
    assert core.let_in(core.arrive("a"))
    assert core.let_in(core.arrive("b"))
    assert not core.let_in(core.arrive("c"))  # 30 s > 2.5 · 10 s
    assert core.conductor.refusals == {"ttft": 1}
    for name in ("a", "b"):
        core.reserved(name)
        core.prefilled(name)
    assert not core.let_in(core.arrive("d"))  # 0.3 s > 2 · 0.1 s
    assert core.let_in(core.arrive("e", tbt_slo_s=0.31))  # what a request states counts


# -- deferral ------------------------------------------------------------------------------------


def test_what_decode_is_too_busy_for_is_held_back_and_let_in_when_it_is_not() -> None:
    core = Core(admission="early", max_deferred=4)
    core.decode("a", "b")
    assert core.arrive("c") == []
    assert core.phase("c") is Phase.DEFERRED
    assert core.conductor.decisions[-1].outcome == "deferred"
    assert core.tick(1.0) == []
    core.finish("a")
    assert reserved_for(core.tick(2.0)) == ["c"]


def test_what_is_held_back_too_long_is_refused() -> None:
    core = Core(admission="early", max_deferred=4, defer_s=5.0)
    core.decode("a", "b")
    core.arrive("c")
    core.arrive("d", defer_s=2.0)
    (first,) = core.tick(2.0)
    assert isinstance(first, Reject)
    assert (first.request_id, first.kind) == ("d", "overloaded")
    (second,) = core.tick(5.0)
    assert isinstance(second, Reject)
    assert second.request_id == "c"


def test_a_request_that_may_not_be_held_back_is_refused_at_once() -> None:
    core = Core(admission="early", max_deferred=4)
    core.decode("a", "b")
    assert isinstance(core.arrive("c", defer_s=0.0)[0], Reject)


def test_no_more_are_held_back_than_may_be() -> None:
    core = Core(admission="early", max_deferred=1)
    core.decode("a", "b")
    assert core.arrive("c") == []
    assert isinstance(core.arrive("d")[0], Reject)


def test_a_late_first_token_is_not_held_back_since_that_makes_it_later() -> None:
    core = Core(admission="early", max_deferred=4, ttft_slo_s=15.0)
    core.arrive("a")
    assert isinstance(core.arrive("b")[0], Reject)


def test_what_is_held_back_until_its_first_token_would_be_late_is_refused() -> None:
    core = Core(admission="early", max_deferred=4, ttft_slo_s=12.0)
    core.decode("a", "b")
    core.arrive("c")
    assert core.tick(1.9) == []
    (reject,) = core.tick(2.1)
    assert isinstance(reject, Reject)
    assert "first token" in reject.reason


def test_what_was_held_back_is_held_to_its_limit_from_its_arrival_on() -> None:
    core = Core(admission="early", max_deferred=4, ttft_slo_s=12.0)
    core.decode("a", "b")
    core.now = 100.0
    core.arrive("c")
    core.finish("a")
    assert reserved_for(core.tick(102.0)) == ["c"]  # 2 s and 10 s of prefill


def test_a_refusal_says_how_long_the_request_was_held_back() -> None:
    core = Core(admission="early", max_deferred=4, defer_s=5.0)
    core.decode("a", "b")
    core.now = 100.0
    core.arrive("c")
    (reject,) = core.tick(105.0)
    assert isinstance(reject, Reject)
    assert reject.reason == "decode was too busy for 5 s"


def test_what_is_held_back_too_long_is_refused_also_behind_many_that_may_wait_on() -> None:
    core = Core(admission="early", max_deferred=2 * MAX_FAILED_RETRIES)
    core.decode("a", "b")
    for i in range(MAX_FAILED_RETRIES):
        core.arrive(f"patient-{i}", defer_s=50.0, priority=1)
    core.arrive("c", defer_s=2.0)
    (reject,) = core.tick(2.0)
    assert isinstance(reject, Reject)
    assert reject.request_id == "c"


def test_what_was_held_back_waits_for_pages_once_decode_is_only_full() -> None:
    core = Core(admission="early", max_deferred=4)
    core.decode("a", "b")
    core.arrive("c")
    full = DecodeLoad(
        n_running=1, n_reserved=0, context_tokens=40, free_pages=0, n_pages=1000, step_s=0.1
    )
    core.handle(RequestCancelled(RequestId("a")))
    core.hear(D0, full)
    assert core.tick(1.0) == []
    assert core.phase("c") is Phase.WAITING
    assert reserved_for(core.hear(D0, msgspec.structs.replace(full, free_pages=9))) == ["c"]


def test_a_client_that_goes_takes_what_is_held_back_with_it() -> None:
    core = Core(admission="early", max_deferred=1)
    core.decode("a", "b")
    core.arrive("c")
    assert core.handle(RequestCancelled(RequestId("c"))) == []
    assert core.arrive("d") == []  # its place is free


# -- priorities ----------------------------------------------------------------------------------


def test_of_those_held_back_the_more_important_goes_first_and_then_the_earlier() -> None:
    core = Core(admission="early", max_deferred=4)
    core.decode("a", "b")
    for name, priority in (("low", 0), ("high", 2), ("low-too", 0), ("higher", 3)):
        core.arrive(name, priority=priority)
    core.finish("a")
    # `early` sees no request on its way, so all go as soon as there is room for one.
    assert reserved_for(core.tick(1.0)) == ["higher", "high", "low", "low-too"]


def test_of_those_that_wait_for_pages_the_more_important_goes_first() -> None:
    core = Core(admission="none")
    core.decode("a")  # three pages
    load = DecodeLoad(
        n_running=1, n_reserved=0, context_tokens=0, free_pages=2, n_pages=1000, step_s=0.1
    )
    core.hear(D0, load)
    core.arrive("low")
    core.arrive("high", priority=1)
    assert core.phase("low") is core.phase("high") is Phase.WAITING
    assert not core.let_in(core.arrive("small", n_tokens=8, max_new_tokens=2))  # overtakes nobody
    assert core.let_in(core.arrive("urgent", n_tokens=8, max_new_tokens=2, priority=2))
    assert reserved_for(core.finish("a")) == ["high"]


# -- learning ------------------------------------------------------------------------------------


def test_a_queue_is_not_taken_for_longer_because_prefills_share_their_passes() -> None:
    core = Core(admission="none")
    for i in range(90):  # three at a time, done together after what three take: 30 s
        core.arrive(f"r{i}")
        core.reserved(f"r{i}")
        if i % 3 == 2:
            core.now += 30.0
            for j in range(i - 2, i + 1):
                core.prefilled(f"r{j}", fetch_s=0.0)
                core.finish(f"r{j}")
    core.arrive("next")
    assert core.conductor.decisions[-1].placement.ttft_s == pytest.approx(10.0, rel=0.15)
