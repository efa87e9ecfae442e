"""Admission, deferral, priorities and waits at decode's door, with costs worked out by hand."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeCost,
    PrefillCost,
    StartDecode,
    StartPrefill,
)
from halfmoon_scheduling.commands import AnyCommand, Deliver, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.request_admission import MAX_FAILED_RETRIES
from halfmoon_scheduling.requests.request_state import Phase
from tests.scheduling.core import D0, P0, Core, asked, only, resubmitted, sent

#: A step takes 0.1 s for each request in it: with 0.2 s between tokens two may decode at once.
STEP = DecodeCost(d0_s=0.0, d1_s=0.1, d2_s=0.0)


class Hall(Core):
    """One prefill worker, of 10 s for each prompt, and one decode worker."""

    prefill_s = 10.0
    fetch_s = 30.0  # as long as the prefill took: nothing is learnt from it

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"tbt_slo_s": 0.2, **config})
        self.join("prefill-0", prefill_cost=PrefillCost(c0_s=self.prefill_s, c1_s=0.0))
        self.join("decode-0", decode_cost=STEP, n_blocks=1000)

    def come(self, name: str, **fields: Any) -> list[AnyCommand]:
        return self.arrive(name, **{"max_new_tokens": 500, **fields})

    def lets_in(self, name: str, **fields: Any) -> bool:
        return bool(asked(self.come(name, **fields)))

    def refuses(self, name: str, **fields: Any) -> Reject:
        return only(self.come(name, **fields), Reject)

    def prefill(self, name: str) -> list[AnyCommand]:
        """It gets its pages, and its prefill is done."""
        self.reserved(rid=name)
        return self.prefilled(rid=name, compute_s=30.0, fetch_s=self.fetch_s)

    def decode(self, *names: str) -> None:
        """These are decoding."""
        for name in names:
            assert self.lets_in(name), name
            self.prefill(name)
            assert self.phase(name) is Phase.DECODING


# -- the modes -----------------------------------------------------------------------------------


def test_baseline_lets_decode_refuse_when_the_prefill_is_done_and_wasted() -> None:
    hall = Hall(admission="baseline")
    hall.decode("a", "b")
    assert hall.lets_in("c")
    assert sent(hall.reserved(rid="c")) == [(P0, StartPrefill)]
    reject, cancel = hall.prefilled(rid="c")
    assert isinstance(reject, Reject)
    assert reject.kind == "overloaded"
    assert reject.retry_after_s > 0
    assert cancel == Send(D0, Cancel(request_id=RequestId("c")))
    assert hall.phase("c") is None
    assert hall.conductor.refusals == {"tbt_late": 1}
    assert hall.decision.outcome == "refused_late"
    hall.come("d~2", attempt=2)
    assert isinstance(hall.prefill("d~2")[0], Deliver), "a retry is not refused late"


@pytest.mark.parametrize("double_check", [False, True])
def test_early_refuses_late_only_if_it_is_to_check_twice(double_check: bool) -> None:
    hall = Hall(admission="early", double_check=double_check)
    hall.decode("a")
    for name in ("b", "c"):
        hall.come(name)
        hall.reserved(rid=name)
    hall.prefilled(rid="b")
    assert isinstance(hall.prefilled(rid="c")[0], Reject if double_check else Deliver)


def test_predicted_counts_those_that_prefill_will_have_finished() -> None:
    hall = Hall(admission="predicted", decode_time_s=100.0)
    hall.decode("a")
    assert hall.lets_in("b")  # two will decode at 10
    assert not hall.lets_in("c")  # three at 20


@pytest.mark.parametrize("quantile", [0.0, 0.9])
def test_with_a_quantile_the_first_short_answer_is_not_taken_for_all(quantile: float) -> None:
    hall = Hall(admission="predicted", admission_quantile=quantile, tbt_slo_s=0.21)
    hall.decode("a", "b")
    hall.now = 1.0
    hall.finish("a", 0)
    hall.decode("c")
    hall.now = 20.0  # both have decoded for 19 s and more, and another would join at 30
    assert hall.lets_in("d") == (quantile == 0)


def test_lookahead_holds_back_what_predicted_would_refuse_unless_told_not_to() -> None:
    for config in ({"admission": "predicted"}, {"admission": "lookahead", "max_deferred": 0}):
        refusing = Hall(decode_time_s=100.0, **config)
        refusing.decode("a", "b")
        refusing.refuses("c")
        assert refusing.conductor.refusals == {"tbt": 1}
    waiting = Hall(admission="lookahead", decode_time_s=100.0)
    waiting.decode("a", "b")
    assert waiting.come("c") == []
    assert waiting.phase("c") is Phase.DEFERRED
    assert waiting.decision.outcome == "deferred"
    assert waiting.tick(0.5) == []
    waiting.finish("a")
    assert list(asked(waiting.tick(1.0))) == ["c"]


def test_limits_may_be_multiples_of_what_an_idle_worker_takes() -> None:
    hall = Hall(admission="early", tbt_slo_s=None, ttft_slo_multiple=2.5, tbt_slo_multiple=2.0)
    assert hall.lets_in("a")
    assert hall.lets_in("b")
    assert not hall.lets_in("c")  # 30 s > 2.5 · 10 s
    assert hall.conductor.refusals == {"ttft": 1}
    for name in ("a", "b"):
        hall.prefill(name)
    assert not hall.lets_in("d")  # 0.3 s > 2 · 0.1 s
    assert hall.lets_in("e", tbt_slo_s=0.31)  # what a request states counts


# -- deferral ------------------------------------------------------------------------------------


def a_busy_hall(**config: Any) -> Hall:
    """Two requests decode, and up to four more are held back."""
    hall = Hall(**{"admission": "early", "max_deferred": 4, **config})
    hall.decode("a", "b")
    return hall


def test_what_is_held_back_too_long_is_refused_with_how_long_it_was() -> None:
    hall = a_busy_hall(defer_s=5.0)
    hall.now = 100.0
    hall.come("c")
    hall.come("d", defer_s=2.0)
    first = only(hall.tick(102.0), Reject)
    assert (first.request_id, first.kind) == ("d", "overloaded")
    second = only(hall.tick(105.0), Reject)
    assert (second.request_id, second.reason) == ("c", "decode was too busy for 5 s")


def test_what_may_not_be_held_back_or_is_one_too_many_is_refused_at_once() -> None:
    hall = a_busy_hall(max_deferred=1)
    hall.refuses("c", defer_s=0.0)
    assert hall.come("d") == []
    hall.refuses("e")
    assert hall.cancel("d") == []
    assert hall.come("f") == []  # its place is free


def test_a_late_first_token_is_not_held_back_since_that_makes_it_later() -> None:
    hall = Hall(admission="early", max_deferred=4, ttft_slo_s=15.0)
    hall.come("a")
    hall.refuses("b")


def test_what_was_held_back_is_held_to_its_limit_from_its_arrival_on() -> None:
    for finished, at_s in ((True, 102.0), (False, 101.9)):  # 2 s and 10 s of prefill
        hall = a_busy_hall(ttft_slo_s=12.0)
        hall.now = 100.0
        hall.come("c")
        if finished:
            hall.finish("a")
        assert list(asked(hall.tick(at_s))) == (["c"] if finished else [])
    assert "first token" in only(hall.tick(102.1), Reject).reason


def test_what_is_held_back_too_long_is_refused_also_behind_many_that_may_wait_on() -> None:
    hall = a_busy_hall(max_deferred=2 * MAX_FAILED_RETRIES)
    for i in range(MAX_FAILED_RETRIES):
        hall.come(f"patient-{i}", defer_s=50.0, priority=1)
    hall.come("c", defer_s=2.0)
    assert only(hall.tick(2.0), Reject).request_id == "c"


def test_what_was_held_back_waits_for_pages_once_decode_is_only_full() -> None:
    hall = a_busy_hall()
    hall.come("c")
    full: dict[str, Any] = {"n_pages": 1000, "n_running": 1, "context_tokens": 40, "step_s": 0.1}
    hall.cancel("a")
    hall.load(free_pages=0, **full)
    assert hall.tick(1.0) == []
    assert hall.phase("c") is Phase.WAITING
    assert list(asked(hall.load(free_pages=9, **full))) == ["c"]


# -- priorities ----------------------------------------------------------------------------------


def test_of_those_held_back_the_more_important_goes_first_and_then_the_earlier() -> None:
    hall = a_busy_hall()
    for name, priority in (("low", 0), ("high", 2), ("low-too", 0), ("higher", 3)):
        hall.come(name, priority=priority)
    hall.finish("a")
    # `early` sees no request on its way, so all go as soon as there is room for one.
    assert list(asked(hall.tick(1.0))) == ["higher", "high", "low", "low-too"]


def test_of_those_that_wait_for_pages_the_more_important_goes_first() -> None:
    hall = Hall(admission="none")
    hall.decode("a")  # three pages
    hall.load(free_pages=2, n_pages=1000, n_running=1, step_s=0.1)
    hall.come("low")
    hall.come("high", priority=1)
    assert hall.phase("low") is hall.phase("high") is Phase.WAITING
    assert not hall.lets_in("small", n_tokens=8, max_new_tokens=2)  # overtakes none
    assert hall.lets_in("urgent", n_tokens=8, max_new_tokens=2, priority=2)
    assert list(asked(hall.finish("a"))) == ["high"]


# -- learning ------------------------------------------------------------------------------------


def test_a_queue_is_not_taken_for_longer_because_prefills_share_their_passes() -> None:
    hall = Hall(admission="none")
    for first in range(0, 90, 3):  # three at a time, done together after what three take: 30 s
        names = [f"r{first + i}" for i in range(3)]
        for name in names:
            hall.come(name)
            hall.reserved(rid=name)
        hall.now += 30.0
        for name in names:
            hall.prefilled(rid=name, compute_s=30.0)
            hall.finish(name, 0)
    hall.come("next")
    assert hall.placement.ttft_s == pytest.approx(10.0, rel=0.15)


# -- at decode's door ----------------------------------------------------------------------------


class Door(Hall):
    """Every answer is over a moment after it began, by the forecast: all are let in when they
    arrive, and meet at the door. Two decode already, which is as many as may."""

    prefill_s = 0.01

    def __init__(self, **config: Any) -> None:
        lookahead = {"admission": "lookahead", "ttft_slo_s": 20.0, "decode_time_s": 1e-6}
        super().__init__(**{**lookahead, **config})
        for name in ("a", "b"):
            assert went_in(self.land(name)) == [name]

    def land(self, name: str, expires_s: float = 60.0, **fields: Any) -> list[AnyCommand]:
        """It arrives, gets its pages for so long, and is prefilled; what follows from that."""
        self.come(name, **fields)
        self.reserved(rid=name, expires_s=expires_s)
        return self.prefilled(rid=name)


def went_in(commands: list[AnyCommand]) -> list[str]:
    """Whose first token is delivered, and whose decode is started right behind it."""
    delivered = [c.request_id for c in commands if isinstance(c, Deliver)]
    messages = [c.message for c in commands if isinstance(c, Send)]
    assert [m.request_id for m in messages if isinstance(m, StartDecode)] == delivered
    return list(delivered)


def test_with_a_quantile_a_wait_ends_a_tick_before_a_first_token_is_due() -> None:
    """A deadline is acted on at the next tick: none has yet shown how late that is."""
    door = Door(admission_quantile=0.9, tbt_slo_s=0.21)
    for i in range(1, 20):
        door.tick(0.5 * i)
    door.land("c", ttft_slo_s=5.25)  # due at 14.75
    assert door.phase("c") is Phase.LANDED
    assert went_in(door.tick(14.0)) == []
    assert went_in(door.tick(14.5)) == ["c"]


def test_a_request_waits_with_its_first_token_until_another_one_ends() -> None:
    door = Door()
    assert door.land("c") == []
    assert door.phase("c") is Phase.LANDED
    assert door.conductor.loads(door.now).prefill == 0, "it is in no prefill queue"
    assert door.conductor.n_requests["landed"] == 1
    assert door.tick(1.0) == []
    commands = door.finish("a")
    assert went_in(commands) == ["c"]
    assert [c.token for c in commands if isinstance(c, Deliver)] == [7]
    assert door.phase("c") is Phase.DECODING
    assert door.conductor.refusals == {}


def test_one_place_is_given_to_one_and_by_priority_and_then_by_arrival() -> None:
    door = Door()
    for name, priority in (("c", 0), ("d", 0), ("e", 1)):
        assert door.land(name, priority=priority) == []
    assert [went_in(door.finish(name)) for name in ("a", "b", "e")] == [["e"], ["c"], ["d"]]


def test_only_a_more_important_one_that_fits_by_its_own_limit_goes_past_those_who_wait() -> None:
    door = Door()
    door.land("c")
    door.land("d", tbt_slo_s=0.4)  # fits in by its own limit
    assert door.phase("d") is Phase.LANDED
    assert went_in(door.land("e", tbt_slo_s=0.5, priority=1)) == ["e"]
    assert door.phase("c") is Phase.LANDED
    door.finish("e")
    assert went_in(door.finish("a")) == ["c", "d"]


def test_a_load_report_that_says_that_there_is_room_opens_the_door() -> None:
    door = Door()
    door.land("c")
    here: dict[str, Any] = {"free_pages": 900, "n_pages": 1000}
    door.load(**here, n_running=4, step_s=0.4)  # others decode there too
    door.finish("a")
    assert door.phase("c") is Phase.LANDED
    assert went_in(door.load(**here, n_running=1, n_reserved=1, step_s=0.1)) == ["c"]


WAITS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "its first token is due": ({}, {}, 20.0),
    "its pages are held no longer": ({"landing_margin_s": 5.0}, {"expires_s": 12.0}, 7.0),
    "a deferral ends where no limit is": ({"ttft_slo_s": None, "defer_s": 3.0}, {}, 3.0),
}


@pytest.mark.parametrize(("config", "fields", "until_s"), WAITS.values(), ids=WAITS)
def test_nobody_waits_longer_than_until(config: Any, fields: Any, until_s: float) -> None:
    door = Door(**config)
    door.land("c", **fields)
    assert door.tick(until_s - 0.1) == []
    assert went_in(door.tick(until_s)) == ["c"]


def test_what_is_late_already_or_a_retry_does_not_wait_at_all() -> None:
    door = Door()
    door.come("c")
    door.reserved(rid="c")
    door.now = 20.5
    assert went_in(door.prefilled(rid="c")) == ["c"]
    assert went_in(door.land("d~2", attempt=2)) == ["d~2"]  # its stream has begun


def test_who_can_wait_no_longer_is_refused_if_decode_is_to_be_checked_twice() -> None:
    door = Door(double_check=True)
    assert door.land("c") == []
    reject, cancel = door.tick(20.0)
    assert isinstance(reject, Reject)
    assert (reject.kind, door.conductor.refusals) == ("overloaded", {"tbt_late": 1})
    assert cancel == Send(D0, Cancel(request_id=RequestId("c")))
    assert door.phase("c") is None


@pytest.mark.parametrize("mode", ["none", "baseline", "predicted"])
def test_in_other_modes_nobody_waits_at_the_door(mode: str) -> None:
    door = Door(admission=mode)
    door.land("c")
    assert door.phase("c") is (None if mode == "baseline" else Phase.DECODING)


def test_neither_a_client_that_goes_nor_a_lost_prefill_worker_shuts_the_door() -> None:
    door = Door()
    door.land("c")
    door.land("d")
    assert door.cancel("c") == [Send(D0, Cancel(request_id=RequestId("c")))]
    assert door.lose("prefill-0") == []
    assert went_in(door.finish("a")) == ["d"]


def test_those_at_the_door_of_a_lost_worker_or_without_their_pages_are_tried_again() -> None:
    door = Door()
    door.land("c")
    door.land("d")
    assert isinstance(only(door.decode_failed(rid="d", reason="expired"), Resubmit), Resubmit)
    assert resubmitted(door.lose("decode-0")) == ["a", "b", "c"]
