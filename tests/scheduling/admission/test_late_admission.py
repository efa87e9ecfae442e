"""Waiting before a decode worker that is too busy, through the whole core, with costs by hand."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeCost,
    DecodeFailed,
    DecodeLoad,
    DecodeReserved,
    PrefillCost,
    StartDecode,
)
from halfmoon_scheduling.commands import AnyCommand, Deliver, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

D0, P0 = WorkerId("decode-0"), WorkerId("prefill-0")


class Core:
    """One prefill and one decode worker, audited after every event. A step takes 0.1 s for each
    request in it, and 0.2 s are the limit; every answer is over a moment after it began, by the
    forecast, so that all are let in when they arrive and meet at the door."""

    def __init__(self, **config: Any) -> None:
        fields = {
            "admission": "lookahead",
            "tbt_slo_s": 0.2,
            "ttft_slo_s": 20.0,
            "decode_time_s": 1e-6,
        }
        self.conductor = Conductor(SchedulingConfig(**{**fields, **config}))
        self.now = 0.0
        prefill = PrefillCost(c0_s=0.01, c1_s=0.0)
        step = DecodeCost(d0_s=0.0, d1_s=0.1, d2_s=0.0)
        self.handle(WorkerJoined(a_worker("prefill-0", prefill_cost=prefill)))
        self.handle(WorkerJoined(a_worker("decode-0", decode_cost=step, n_blocks=1000)))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def tick(self, now: float) -> list[AnyCommand]:
        self.now = now
        return self.handle(Tick())

    def land(self, name: str, **fields: Any) -> list[AnyCommand]:
        """It arrives and is prefilled; what follows from that."""
        self.arrive(name, **fields)
        return self.prefill(name)

    def arrive(self, name: str, expires_s: float = 60.0, **fields: Any) -> None:
        """It arrives and gets its pages, for so long."""
        self.handle(RequestArrived(a_request(name, **{"max_new_tokens": 500, **fields})))
        reserved = DecodeReserved(
            request_id=RequestId(name), landing=a_landing("decode-0"), expires_s=expires_s
        )
        self.handle(MessageReceived(D0, reserved))

    def prefill(self, name: str) -> list[AnyCommand]:
        """Its prefill is done."""
        return self.handle(MessageReceived(P0, a_prefill_done(name)))

    def fill(self) -> None:
        """Two requests decode, which is as many as may."""
        for name in ("a", "b"):
            assert went_in(self.land(name)) == [name]

    def finish(self, name: str) -> list[AnyCommand]:
        return self.handle(RequestFinished(RequestId(name), 5))

    def phase(self, name: str) -> Phase | None:
        return self.conductor.phase_of(RequestId(name))


def went_in(commands: list[AnyCommand]) -> list[str]:
    """Whose first token is delivered, and whose decode is started right behind it."""
    delivered = [c.request_id for c in commands if isinstance(c, Deliver)]
    sent = [c.message for c in commands if isinstance(c, Send)]
    assert [m.request_id for m in sent if isinstance(m, StartDecode)] == delivered
    return list(delivered)


def test_with_a_quantile_a_wait_ends_a_tick_before_a_first_token_is_due() -> None:
    """A deadline is acted on at the next tick: none has yet shown how late that is."""
    core = Core(admission_quantile=0.9, tbt_slo_s=0.21)
    core.fill()
    for i in range(1, 20):
        core.tick(0.5 * i)
    core.land("c", ttft_slo_s=5.25)  # due at 14.75
    assert core.phase("c") is Phase.LANDED
    assert went_in(core.tick(14.0)) == []
    assert went_in(core.tick(14.5)) == ["c"]


def test_a_request_waits_with_its_first_token_until_another_one_ends() -> None:
    core = Core()
    core.fill()
    assert core.land("c") == []
    assert core.phase("c") is Phase.LANDED
    assert core.tick(1.0) == []
    commands = core.finish("a")
    assert went_in(commands) == ["c"]
    (deliver,) = [c for c in commands if isinstance(c, Deliver)]
    assert deliver.token == 7
    assert core.phase("c") is Phase.DECODING
    assert core.conductor.refusals == {}


def test_one_place_is_given_to_one_and_by_priority_and_then_by_arrival() -> None:
    core = Core()
    core.fill()
    for name, priority in (("c", 0), ("d", 0), ("e", 1)):
        assert core.land(name, priority=priority) == []
    assert [went_in(core.finish(name)) for name in ("a", "b", "e")] == [["e"], ["c"], ["d"]]


def test_who_comes_later_does_not_go_past_those_who_wait() -> None:
    core = Core()
    core.fill()
    core.land("c")
    core.land("d", tbt_slo_s=0.4)  # fits in by its own limit
    assert core.phase("d") is Phase.LANDED
    assert went_in(core.finish("a")) == ["c", "d"]


def test_a_more_important_one_that_fits_by_its_own_limit_goes_past_them_at_once() -> None:
    core = Core()
    core.fill()
    core.land("c")
    assert went_in(core.land("d", tbt_slo_s=0.4, priority=1)) == ["d"]
    assert core.phase("c") is Phase.LANDED


def test_a_load_report_that_says_that_there_is_room_opens_the_door() -> None:
    core = Core()
    core.fill()
    load = DecodeLoad(
        n_running=4, n_reserved=0, context_tokens=0, free_pages=900, n_pages=1000, step_s=0.4
    )
    core.land("c")
    core.handle(MessageReceived(D0, load))  # others decode there too
    core.finish("a")
    assert core.phase("c") is Phase.LANDED
    less = DecodeLoad(
        n_running=1, n_reserved=1, context_tokens=0, free_pages=900, n_pages=1000, step_s=0.1
    )
    assert went_in(core.handle(MessageReceived(D0, less))) == ["c"]


def test_what_can_wait_no_longer_for_its_first_token_goes_in_anyway() -> None:
    core = Core()
    core.fill()
    core.land("c")
    assert core.tick(19.9) == []
    assert went_in(core.tick(20.0)) == ["c"]


def test_what_is_late_already_does_not_wait_at_all() -> None:
    core = Core()
    core.fill()
    core.arrive("c")
    core.now = 20.5
    assert went_in(core.prefill("c")) == ["c"]


def test_or_is_refused_if_decode_is_to_be_checked_twice() -> None:
    core = Core(double_check=True)
    core.fill()
    assert core.land("c") == []
    reject, cancel = core.tick(20.0)
    assert isinstance(reject, Reject)
    assert (reject.kind, core.conductor.refusals) == ("overloaded", {"tbt_late": 1})
    assert cancel == Send(D0, Cancel(request_id=RequestId("c")))
    assert core.phase("c") is None


def test_nobody_waits_past_the_end_of_the_pages_held_for_it() -> None:
    core = Core(landing_margin_s=5.0)
    core.fill()
    core.land("c", expires_s=12.0)
    assert core.tick(6.9) == []
    assert went_in(core.tick(7.0)) == ["c"]


def test_without_a_limit_for_the_first_token_the_wait_is_that_of_a_deferral() -> None:
    core = Core(ttft_slo_s=None, defer_s=3.0)
    core.fill()
    core.land("c")
    assert core.tick(2.9) == []
    assert went_in(core.tick(3.0)) == ["c"]


@pytest.mark.parametrize("mode", ["none", "baseline", "predicted"])
def test_in_other_modes_nobody_waits_at_the_door(mode: str) -> None:
    core = Core(admission=mode)
    core.fill()
    core.land("c")
    assert core.phase("c") is (None if mode == "baseline" else Phase.DECODING)


def test_a_retry_does_not_wait_since_its_stream_has_begun() -> None:
    core = Core()
    core.fill()
    assert went_in(core.land("c~2", attempt=2)) == ["c~2"]


def test_a_client_that_goes_leaves_the_door_to_the_next() -> None:
    core = Core()
    core.fill()
    core.land("c")
    core.land("d")
    (cancel,) = core.handle(RequestCancelled(RequestId("c")))
    assert cancel == Send(D0, Cancel(request_id=RequestId("c")))
    assert went_in(core.finish("a")) == ["d"]


def test_a_prefill_worker_that_is_lost_takes_nobody_from_the_door() -> None:
    core = Core()
    core.fill()
    core.land("c")
    assert core.handle(WorkerLost(P0, "gone")) == []
    assert went_in(core.finish("a")) == ["c"]


def test_those_at_the_door_of_a_decode_worker_that_is_lost_are_tried_again() -> None:
    core = Core()
    core.fill()
    core.land("c")
    again = core.handle(WorkerLost(D0, "gone"))
    assert [c.request_id for c in again if isinstance(c, Resubmit)] == ["a", "b", "c"]


def test_pages_that_decode_took_back_from_one_at_the_door_mean_another_try() -> None:
    core = Core()
    core.fill()
    core.land("c")
    failed = DecodeFailed(request_id=RequestId("c"), reason="expired", retryable=True)
    (again,) = core.handle(MessageReceived(D0, failed))
    assert isinstance(again, Resubmit)
    assert core.finish("a") == []


def test_one_who_waits_at_the_door_is_in_no_prefill_queue() -> None:
    core = Core()
    core.fill()
    core.land("c")
    assert core.conductor.loads(core.now).prefill == 0
    assert core.conductor.n_requests["landed"] == 1
