"""A decode batch: what it takes in, whose pages go, and pages that requests share."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.decode.decode_batch import DecodeBatch, ReservationRefused
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from tests.scheduling.models import model_test

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
#: Tokens of a block, and the token that ends an answer.
SIZE, STOP = 2, 99


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    """Name each full block by all tokens up to its end."""
    return [BlockHash(bytes(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


def stopping(max_new: int = 8, min_new: int = 0) -> Stopping:
    return Stopping(max_new_tokens=max_new, stop_token_ids=(STOP,), min_new_tokens=min_new)


def batch(
    n_pages: int = 16, *, block_size: int = 4, max_running: int = 8, max_context: int = 1000
) -> DecodeBatch:
    pages, sizes = PageAllocator(n_pages), {"max_running": max_running, "max_context": max_context}
    return DecodeBatch(pages, block_size=block_size, landing_ttl_s=60.0, **sizes)


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


def test_when_pages_run_out_the_youngest_is_preempted_and_the_others_go_on() -> None:
    b = batch(n_pages=8)
    for rid in (A, B, C):
        b.reserve(rid, 4, stopping(max_new=12), now=0)
        b.start(rid, 0, now=0)
    for n_before in range(5):
        step = b.next_step()
        # Six pages are held at the end, two are free, and three rows cross a border.
        gone = (C,) if n_before == 4 else ()
        assert ([row.request_id for row in step.rows], step.preempted) == (
            [rid for rid in (A, B, C) if rid not in gone],
            gone,
        )
        for row in step.rows:
            b.on_token(row.request_id, 1)
    assert C not in b


def test_a_landing_runs_out_and_can_not_be_started_then() -> None:
    b = batch()
    b.reserve(A, 4, stopping(), now=0)
    b.reserve(B, 4, stopping(), now=5)
    assert b.expire(now=59.9) == []
    assert b.expire(now=60) == [A]
    with pytest.raises(KeyError, match="no landing is held for request 'a'"):
        b.start(A, 1, now=60)
    with pytest.raises(KeyError, match="ran out before its start"):
        b.start(B, 1, now=65)
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


def test_a_prompt_shares_the_blocks_of_one_that_runs_or_has_ended() -> None:
    b = batch(8, block_size=SIZE)
    before = b.reserve(A, 5, stopping(6), 0, hashes_of([1, 2, 3, 4, 5]))
    b.start(A, 9, 0)
    pages = b.reserve(B, 5, stopping(6), 0, hashes_of([1, 2, 3, 4, 6]))
    assert (b.held_blocks(B), pages[:2]) == (2, before[:2])
    assert b.free_pages == 4  # two shared ones, and one of each
    b.cancel(A)
    assert b.free_pages == 5
    b.cancel(B)
    assert b.free_pages == 8
    pages = b.reserve(C, 7, stopping(6), 0, hashes_of([1, 2, 3, 4, 5, 6, 7]))
    assert (b.held_blocks(C), pages[:2]) == (2, before[:2])
    b.check()


@dataclass
class Model:
    """A request: its tokens so far, of which the last one's KV is not computed yet."""

    tokens: list[int]
    stopping: Stopping
    deadline_s: float
    pages: list[int]
    n_held: int
    #: New tokens of one that runs.
    n_new: int = 0

    @property
    def running(self) -> bool:
        return self.n_new > 0


class BatchAgainstModel(RuleBasedStateMachine):
    """The batch beside its requests, over a pool whose pages have tokens in place of KV."""

    IDS = st.sampled_from([RequestId(name) for name in "abcdef"])
    N = 10

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(self.N)
        self.batch = DecodeBatch(
            self.pages, block_size=SIZE, max_running=4, max_context=22, landing_ttl_s=5
        )
        #: What was written to each page, by place.
        self.pool: list[list[object]] = [[None] * SIZE for _ in range(self.N)]
        self.models: dict[RequestId, Model] = {}
        self.started: list[RequestId] = []
        self.aside: list[Model] = []
        #: Conversations that ended: prompts and answers.
        self.said: list[list[int]] = [[]]
        self.now = 0.0

    def write(self, pages: list[int], position: int, token: object) -> None:
        self.pool[pages[position // SIZE]][position % SIZE] = token

    def read(self, pages: list[int], n: int) -> list[object]:
        return [self.pool[pages[i // SIZE]][i % SIZE] for i in range(n)]

    def prefill_writes(self, model: Model) -> None:
        """Whatever is under way to a landing may come at any time."""
        for page in model.pages[model.n_held :]:
            self.pool[page] = ["torn"] * SIZE

    def end(self, rid: RequestId) -> None:
        self.said.append(self.models.pop(rid).tokens)
        if rid in self.started:
            self.started.remove(rid)

    @rule(
        rid=IDS,
        data=st.data(),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        max_new=st.integers(2, 8),
        low=st.integers(0, 3),
        named=st.booleans(),
        lands=st.booleans(),
    )
    def reserve(
        self,
        rid: RequestId,
        data: st.DataObject,
        more: list[int],
        max_new: int,
        low: int,
        named: bool,
        lands: bool,
    ) -> None:
        before = data.draw(st.sampled_from(self.said))
        prompt = [*before, *more][: data.draw(st.integers(1, 15))]
        rules, hashes = stopping(max_new, low), hashes_of(prompt) if named else []
        if rid in self.models:
            with pytest.raises(ValueError, match="is here already"):
                self.batch.reserve(rid, len(prompt), rules, self.now, hashes)
            return
        try:
            pages = self.batch.reserve(rid, len(prompt), rules, self.now, hashes)
        except ReservationRefused as refusal:
            too_long = len(prompt) + max_new > 22 or len(prompt) + max_new - 1 > 2 * self.N
            assert refusal.retryable == (not too_long)
            if refusal.retryable:
                assert self.models or self.aside, "an empty pool refused what fits it"
            return
        assert len(pages) == (len(prompt) + 1) // 2
        n_held = self.batch.held_blocks(rid)
        assert n_held * SIZE < len(prompt)
        assert self.read(pages, n_held * SIZE) == prompt[: n_held * SIZE], "not its own prefix"
        self.models[rid] = Model(prompt, rules, self.now + 5, pages, n_held)
        self.prefill_writes(self.models[rid])
        if lands:
            self.start(rid)

    @rule(rid=IDS)
    def start(self, rid: RequestId) -> None:
        model = self.models.get(rid)
        first = 0 if model is None else len(model.tokens) % 2
        if model is None or model.running or model.deadline_s <= self.now:
            with pytest.raises(KeyError):
                self.batch.start(rid, first, self.now)
            if model is not None and not model.running:
                self.end(rid)
            return
        for position in range(model.n_held * SIZE, len(model.tokens)):
            self.write(model.pages, position, model.tokens[position])
        self.batch.start(rid, first, self.now)
        model.tokens.append(first)
        model.n_new = 1
        self.started.append(rid)

    @rule(stops=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=6))
    def steps(self, stops: list[set[int]]) -> None:
        for each in stops:
            self.step(each)

    def step(self, stops: set[int]) -> None:
        oldest = self.started[0] if self.started else None
        step = self.batch.next_step()
        gone = list(step.preempted)
        assert oldest not in gone
        assert gone == list(reversed(self.started))[: len(gone)], "not the youngest first"
        for rid in gone:
            self.end(rid)
        rows = [row.request_id for row in step.rows]
        assert rows == self.started[len(self.started) - len(rows) :]
        assert len(rows) >= len(self.started) - 1, "only the oldest may sit out"
        if rows != self.started:
            assert self.batch.free_pages == 0
        for row in step.rows:
            model = self.models[row.request_id]
            assert (row.token, row.position) == (model.tokens[-1], len(model.tokens) - 1)
            assert row.pages[: len(model.pages)] == tuple(model.pages)
            assert len(row.pages) == max(len(model.pages), row.position // SIZE + 1)
            early = model.n_new < model.stopping.min_new_tokens
            assert row.masked == ((STOP,) if early else ())
            model.pages = list(row.pages)
            self.write(model.pages, row.position, row.token)
        for i, row in enumerate(step.rows):
            model = self.models[row.request_id]
            assert self.read(model.pages, row.position + 1) == model.tokens, "a token is lost"
            if (row.position + 1) % SIZE == 0:
                block = row.position // SIZE
                self.pages.keep(model.pages[block], hashes_of(model.tokens)[block])
            token = STOP if i in stops else (row.position * 7) % 2
            model.tokens.append(token)
            model.n_new += 1
            is_last = model.n_new == model.stopping.max_new_tokens
            expected = "stop" if token == STOP else "length" if is_last else ""
            assert self.batch.on_token(row.request_id, token) == expected
            if expected:
                self.end(row.request_id)

    @rule(rid=IDS, aside_s=st.sampled_from([None, 0.5, 2.0, 50.0]))
    def cancel(self, rid: RequestId, aside_s: float | None) -> None:
        model = self.models.get(rid)
        until_s = None if aside_s is None else self.now + aside_s
        assert self.batch.cancel(rid, aside_until_s=until_s) == (model is not None)
        if model is not None:
            self.end(rid)
            if until_s is not None and not model.running:
                model.deadline_s = until_s  # it may be later than the end of the landing
                self.aside.append(model)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [r for r, m in self.models.items() if not m.running and m.deadline_s <= self.now]
        assert self.batch.expire(self.now) == late
        for rid in late:
            self.end(rid)
        self.aside = [model for model in self.aside if model.deadline_s > self.now]
        for model in self.aside:
            self.prefill_writes(model)

    @invariant()
    def pages_agree(self) -> None:
        self.batch.check()
        assert self.batch.n_running == len(self.started)
        assert self.batch.n_reserved == len(self.models) - len(self.started)
        held = {page for one in (*self.models.values(), *self.aside) for page in one.pages}
        assert self.batch.free_pages == self.N - len(held)
        landing = {page for m in self.models.values() if not m.running for page in m.pages}
        aside = {page for model in self.aside for page in model.pages}
        assert self.batch.pages_quarantined == len(aside - landing)

    @invariant()
    def shared_pages_are_whole(self) -> None:
        for model in self.models.values():
            n = len(model.tokens) - 1 if model.running else model.n_held * SIZE
            assert self.read(model.pages, n) == model.tokens[:n]
        for said in self.said:
            kept = self.pages.kept.longest_prefix(hashes_of(said))
            assert self.read(kept, len(kept) * SIZE) == said[: len(kept) * SIZE]

    def teardown(self) -> None:
        for rid in list(self.models):
            self.batch.cancel(rid)
        self.batch.expire(self.now + 100)
        assert self.batch.free_pages == self.N


TestBatchAgainstModel = model_test(BatchAgainstModel, at_night=450)
