from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.decode.decode_batch import (
    BatchRow,
    DecodeBatch,
    ReservationRefused,
    finish_reason,
)
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from tests.nightly import by_day

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


def test_a_landing_has_pages_for_all_its_tokens() -> None:
    b = batch()
    assert len(b.reserve(A, 9, stopping(), now=0)) == 3
    assert (b.n_reserved, b.n_running, b.free_pages) == (1, 0, 13)


def test_the_first_step_computes_the_first_token_right_after_the_prompt() -> None:
    b = batch()
    pages = b.reserve(A, 7, stopping(), now=0)
    b.start(A, 42, now=1)
    assert b.next_step().rows == (BatchRow(A, 42, 7, tuple(pages)),)
    assert b.context_tokens == 8


def test_a_row_gets_a_page_when_it_crosses_a_block_border() -> None:
    b = batch()
    pages = b.reserve(A, 8, stopping(), now=0)
    b.start(A, 42, now=0)
    (row,) = b.next_step().rows
    assert row.position == 8
    assert row.pages[:2] == tuple(pages)
    assert len(row.pages) == 3
    b.on_token(A, 43)
    (again,) = b.next_step().rows
    assert again == BatchRow(A, 43, 9, row.pages)


def test_stop_tokens_are_masked_until_enough_new_tokens_are_there() -> None:
    b = batch()
    b.reserve(A, 4, stopping(min_new=3), now=0)
    b.start(A, 5, now=0)  # the first new token
    masked = []
    for token in (6, 7, 8):
        (row,) = b.next_step().rows
        masked.append(row.masked)
        b.on_token(A, token)
    assert masked == [(STOP,), (STOP,), ()]


def test_a_finished_request_leaves_and_frees_its_pages() -> None:
    b = batch()
    b.reserve(A, 8, stopping(max_new=3), now=0)
    b.start(A, 1, now=0)
    b.next_step()
    assert b.on_token(A, 2) == ""
    b.next_step()
    assert b.on_token(A, 3) == "length"
    assert (b.n_running, b.free_pages) == (0, 16)
    with pytest.raises(KeyError):
        b.on_token(A, 4)


def test_the_last_token_needs_no_page() -> None:
    b = batch(n_pages=2)
    b.reserve(A, 5, stopping(max_new=4), now=0)  # KV of 5 + 3 tokens: two pages of four
    b.start(A, 1, now=0)
    finishes = []
    for token in (2, 3, 4):
        assert len(b.next_step().rows) == 1
        finishes.append(b.on_token(A, token))
    assert finishes == ["", "", "length"]


def test_what_can_never_fit_is_refused_for_good_with_the_numbers() -> None:
    b = batch(n_pages=4, max_context=100)
    with pytest.raises(ReservationRefused, match="need 5 pages of 4 tokens, the pool has 4") as e:
        b.reserve(A, 10, stopping(max_new=8), now=0)
    assert not e.value.retryable
    with pytest.raises(
        ReservationRefused, match="95 tokens and 6 new ones are 101, max_context is 100"
    ) as e:
        b.reserve(A, 95, stopping(max_new=6), now=0)
    assert not e.value.retryable


def test_what_fits_an_empty_pool_exactly_is_taken() -> None:
    b = batch(n_pages=4)
    b.reserve(A, 10, stopping(max_new=7), now=0)
    b.start(A, 1, now=0)
    for token in range(2, 8):
        assert len(b.next_step().rows) == 1
        b.on_token(A, token)
    assert b.free_pages == 4


def test_a_request_is_admitted_only_if_everybody_can_grow_by_one_page() -> None:
    b = batch(n_pages=5)
    b.reserve(A, 4, stopping(), now=0)
    with pytest.raises(
        ReservationRefused, match="3 pages wanted and 2 to be left for growing, 4 of 5"
    ) as e:
        b.reserve(B, 12, stopping(), now=0)
    assert e.value.retryable
    b.reserve(C, 8, stopping(), now=0)


def test_requests_that_can_not_grow_need_no_headroom() -> None:
    b = batch(n_pages=2)
    b.reserve(A, 3, stopping(max_new=2), now=0)
    b.reserve(B, 3, stopping(max_new=2), now=0)


def test_as_many_requests_as_may_run_are_held() -> None:
    b = batch(max_running=1)
    b.reserve(A, 4, stopping(), now=0)
    with pytest.raises(
        ReservationRefused, match="1 requests are running or landing, 1 is the limit"
    ) as e:
        b.reserve(B, 4, stopping(), now=0)
    assert e.value.retryable


def test_a_request_is_reserved_once() -> None:
    b = batch()
    b.reserve(A, 4, stopping(), now=0)
    with pytest.raises(ValueError, match="is here already"):
        b.reserve(A, 4, stopping(), now=0)


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


def test_a_youngest_request_that_needs_a_page_itself_gives_up_its_own() -> None:
    b = batch(n_pages=4)
    started(b, A, B, max_new=12)
    for _ in range(4):
        step(b)
    assert step(b) == ([A], (B,))


def test_the_oldest_is_never_preempted_but_sits_out_until_there_is_a_page() -> None:
    b = batch(n_pages=8)
    started(b, A, max_new=20)
    b.reserve(B, 20, stopping(), now=0)  # five pages; two are left for A to grow into
    for _ in range(8):
        assert step(b) == ([A], ())
    assert step(b) == ([], ())
    assert (b.n_running, b.free_pages) == (1, 0)
    b.cancel(B)
    assert step(b) == ([A], ())


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


def test_a_running_request_does_not_run_out() -> None:
    b = batch(ttl_s=10)
    b.reserve(A, 4, stopping(), now=0)
    b.start(A, 1, now=9)
    assert b.expire(now=100) == []
    assert b.n_running == 1


def test_a_request_of_one_token_has_nothing_to_decode() -> None:
    b = batch()
    b.reserve(A, 4, stopping(max_new=1), now=0)
    with pytest.raises(ValueError, match="nothing to decode"):
        b.start(A, 1, now=0)
    assert b.cancel(A)


def test_cancelling_frees_a_landing_and_a_running_request() -> None:
    b = batch()
    started(b, A)
    b.reserve(B, 4, stopping(), now=0)
    assert (b.cancel(A), b.cancel(B), b.cancel(C)) == (True, True, False)
    assert b.free_pages == 16


@pytest.mark.parametrize("ttl_s", [5, 999])
def test_a_landing_in_doubt_is_kept_aside_for_a_time(ttl_s: float) -> None:
    """Also past its deadline: the last write may have begun just before."""
    b = batch(ttl_s=ttl_s)
    b.reserve(A, 8, stopping(), now=0)
    assert b.is_landing(A)
    assert b.cancel(A, aside_until_s=10)
    assert A not in b
    assert (b.pages_quarantined, b.free_pages) == (2, 14)
    b.check()
    assert b.expire(now=9) == []
    assert b.pages_quarantined == 2
    assert b.expire(now=10) == []
    assert (b.pages_quarantined, b.free_pages) == (0, 16)


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


def test_a_running_request_has_landed_so_there_is_no_doubt() -> None:
    b = batch()
    started(b, A)
    b.cancel(A, aside_until_s=5)
    assert (b.pages_quarantined, b.free_pages) == (0, 16)


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

    def teardown(self) -> None:
        for rid in list(self.models):
            self.batch.cancel(rid)
        self.batch.expire(self.now + 100)
        assert self.batch.free_pages == 9


TestBatchAgainstModel = BatchAgainstModel.TestCase
TestBatchAgainstModel.settings = settings(
    max_examples=by_day(25, at_night=180),
    stateful_step_count=by_day(20, at_night=50),
    deadline=None,
)
