from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.decode.decode_batch import (
    DecodeBatch,
    ReservationRefused,
    finish_reason,
)
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from tests.scheduling.models import model_test

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
STOP = 99


def stopping(max_new: int = 8, min_new: int = 0) -> Stopping:
    return Stopping(max_new_tokens=max_new, stop_token_ids=(STOP,), min_new_tokens=min_new)


def batch(
    n_pages: int = 16, *, max_running: int = 8, max_context: int = 1000, ttl_s: float = 60.0
) -> DecodeBatch:
    return DecodeBatch(
        PageAllocator(n_pages),
        block_size=4,
        max_running=max_running,
        max_context=max_context,
        landing_ttl_s=ttl_s,
    )


@pytest.mark.parametrize(
    ("n_new", "token", "rules", "expected"),
    [
        (1, 5, stopping(), ""),
        (1, STOP, stopping(), "stop"),
        # It comes early only where nothing else may come.
        (2, STOP, stopping(min_new=3), "stop"),
        (8, 5, stopping(), "length"),
        (8, STOP, stopping(), "stop"),
        (1, 5, stopping(max_new=1), "length"),
    ],
)
def test_a_request_finishes_by_a_stop_token_that_counts_or_by_length(
    n_new: int, token: int, rules: Stopping, expected: str
) -> None:
    assert finish_reason(rules, n_new, token) == expected


#: Of each refusal: the batch, tokens and new tokens asked for, whether to ask again.
REFUSALS: dict[str, tuple[dict[str, int], int, int, bool]] = {
    "need 5 pages of 4 tokens, the pool has 4": ({"n_pages": 4}, 10, 8, False),
    "95 tokens and 6 new ones are 101, max_context is 100": ({"max_context": 100}, 95, 6, False),
    "3 pages wanted and 2 to be left for growing, 4 of 5": ({"n_pages": 5}, 12, 8, True),
    "1 requests are running or landing, 1 is the limit": ({"max_running": 1}, 4, 8, True),
}


@pytest.mark.parametrize(("reason", "case"), REFUSALS.items(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_with_the_numbers(
    reason: str, case: tuple[dict[str, int], int, int, bool]
) -> None:
    sizes, n_tokens, max_new, retryable = case
    b = batch(**sizes)
    if retryable:
        b.reserve(A, 4, stopping(), now=0)
    with pytest.raises(ReservationRefused, match=reason) as refused:
        b.reserve(B, n_tokens, stopping(max_new=max_new), now=0)
    assert refused.value.retryable == retryable


def test_requests_that_can_not_grow_need_no_headroom_and_those_of_one_token_no_decode() -> None:
    b = batch(n_pages=2)
    b.reserve(A, 3, stopping(max_new=2), now=0)
    b.reserve(B, 3, stopping(max_new=1), now=0)
    with pytest.raises(ValueError, match="nothing to decode"):
        b.start(B, 1, now=0)
    assert b.cancel(B)


def started(b: DecodeBatch, *ids: RequestId, n_tokens: int = 4, max_new: int = 12) -> None:
    for rid in ids:
        b.reserve(rid, n_tokens, stopping(max_new=max_new), now=0)
    for rid in ids:
        b.start(rid, 0, now=0)


def step(b: DecodeBatch) -> tuple[list[RequestId], tuple[RequestId, ...]]:
    done = b.next_step()
    for row in done.rows:
        b.on_token(row.request_id, row.token + 1)
    return [row.request_id for row in done.rows], done.preempted


def test_when_pages_run_out_the_youngest_is_preempted_and_the_others_go_on() -> None:
    b = batch(n_pages=8)
    started(b, A, B, C)
    for _ in range(4):
        assert step(b) == ([A, B, C], ())
    # Six pages are held, two are free, and three rows cross a border.
    assert step(b) == ([A, B], (C,))
    assert C not in b


def test_a_landing_runs_out_and_can_not_be_started_then() -> None:
    b = batch(ttl_s=10)
    b.reserve(A, 4, stopping(), now=0)
    b.reserve(B, 4, stopping(), now=5)
    assert b.expire(now=9.9) == []
    assert b.expire(now=10) == [A]
    with pytest.raises(KeyError, match="no landing is held for request 'a'"):
        b.start(A, 1, now=10)
    with pytest.raises(KeyError, match="ran out before its start"):
        b.start(B, 1, now=15)
    assert b.free_pages == 16


def test_pages_aside_are_free_early_once_the_last_write_has_ended_and_only_once() -> None:
    b = batch()
    b.reserve(A, 8, stopping(), now=0)
    number = b.set_aside(A, until_s=10)
    assert (b.pages_quarantined, b.free_pages, b.is_aside(number)) == (2, 14, True)
    b.free_early(number)
    assert (b.pages_quarantined, b.free_pages, b.is_aside(number)) == (0, 16, False)
    b.reserve(A, 8, stopping(), now=1)
    again = b.set_aside(A, until_s=20)
    b.free_early(number)  # of the landing before, which had the same name and pages
    b.free_aside(now=10)
    assert (b.pages_quarantined, b.is_aside(again)) == (2, True)
    b.check()


@dataclass
class Model:
    n_tokens: int
    stopping: Stopping
    deadline_s: float
    running: bool = False
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class BatchAgainstModel(RuleBasedStateMachine):
    """The batch beside a list of requests with their tokens and pages."""

    IDS = st.sampled_from([RequestId(name) for name in "abcdef"])

    def __init__(self) -> None:
        super().__init__()
        self.batch = DecodeBatch(
            PageAllocator(9), block_size=2, max_running=4, max_context=16, landing_ttl_s=5
        )
        self.now = 0.0
        self.models: dict[RequestId, Model] = {}
        self.started: list[RequestId] = []
        self.aside: list[Model] = []

    def forget(self, rid: RequestId) -> None:
        del self.models[rid]
        if rid in self.started:
            self.started.remove(rid)

    @rule(rid=IDS, n_tokens=st.integers(1, 15), max_new=st.integers(2, 8), low=st.integers(0, 3))
    def reserve(self, rid: RequestId, n_tokens: int, max_new: int, low: int) -> None:
        rules = stopping(max_new, low)
        if rid in self.models:
            with pytest.raises(ValueError, match="is here already"):
                self.batch.reserve(rid, n_tokens, rules, self.now)
            return
        try:
            pages = self.batch.reserve(rid, n_tokens, rules, self.now)
        except ReservationRefused as refusal:
            too_long = n_tokens + max_new > 16 or n_tokens + max_new - 1 > 18
            assert refusal.retryable == (not too_long)
            if refusal.retryable:
                assert self.models or self.aside, "an empty pool refused what fits it"
            return
        assert len(pages) == (n_tokens + 1) // 2
        self.models[rid] = Model(n_tokens, rules, self.now + 5, pages=pages)

    @rule(rid=IDS)
    def start(self, rid: RequestId) -> None:
        model = self.models.get(rid)
        if model is None or model.running or model.deadline_s <= self.now:
            with pytest.raises(KeyError):
                self.batch.start(rid, 0, self.now)
            if model is not None and not model.running:
                self.forget(rid)
            return
        self.batch.start(rid, 0, self.now)
        model.running = True
        model.tokens = [0]
        self.started.append(rid)

    @rule(stops=st.sets(st.integers(0, 3)))
    def step(self, stops: set[int]) -> None:
        oldest = self.started[0] if self.started else None
        step = self.batch.next_step()
        gone = list(step.preempted)
        assert oldest not in gone
        assert gone == list(reversed(self.started))[: len(gone)], "not the youngest first"
        for rid in gone:
            self.forget(rid)
        rows = [row.request_id for row in step.rows]
        assert rows == self.started[len(self.started) - len(rows) :]
        assert len(rows) >= len(self.started) - 1, "only the oldest may sit out"
        if rows != self.started:
            assert self.batch.free_pages == 0
        for i, row in enumerate(step.rows):
            model = self.models[row.request_id]
            assert row.token == model.tokens[-1]
            assert row.position == model.n_tokens + len(model.tokens) - 1
            assert row.pages[: len(model.pages)] == tuple(model.pages)
            assert len(row.pages) == max(len(model.pages), row.position // 2 + 1)
            model.pages = list(row.pages)
            early = len(model.tokens) < model.stopping.min_new_tokens
            assert row.masked == ((STOP,) if early else ())
            token = STOP if i in stops else len(model.tokens)
            model.tokens.append(token)
            finish = self.batch.on_token(row.request_id, token)
            n_new = len(model.tokens)
            if token == STOP:
                assert finish == "stop"
            else:
                assert finish == ("length" if n_new == model.stopping.max_new_tokens else "")
            if finish:
                self.forget(row.request_id)

    @rule(rid=IDS, aside_s=st.sampled_from([None, 0.5, 2.0, 50.0]))
    def cancel(self, rid: RequestId, aside_s: float | None) -> None:
        model = self.models.get(rid)
        until_s = None if aside_s is None else self.now + aside_s
        assert self.batch.cancel(rid, aside_until_s=until_s) == (model is not None)
        if model is not None:
            self.forget(rid)
            if until_s is not None and not model.running:
                model.deadline_s = until_s  # it may be later than the end of the landing
                self.aside.append(model)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [r for r, m in self.models.items() if not m.running and m.deadline_s <= self.now]
        assert self.batch.expire(self.now) == late
        for rid in late:
            self.forget(rid)
        self.aside = [model for model in self.aside if model.deadline_s > self.now]

    @invariant()
    def pages_agree(self) -> None:
        self.batch.check()
        held = [page for m in (*self.models.values(), *self.aside) for page in m.pages]
        assert len(held) == len(set(held)), "two requests share a page"
        assert self.batch.n_running == len(self.started)
        assert self.batch.n_reserved == len(self.models) - len(self.started)
        assert self.batch.free_pages == 9 - len(held)
        assert self.batch.pages_quarantined == sum(len(model.pages) for model in self.aside)

    def teardown(self) -> None:
        for rid in list(self.models):
            self.batch.cancel(rid)
        self.batch.expire(self.now + 100)
        assert self.batch.free_pages == 9


TestBatchAgainstModel = model_test(BatchAgainstModel, at_night=180)
