"""Pages of finished requests are found by their blocks, and cost no other request anything."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.decode.decode_batch import DecodeBatch, ReservationRefused
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from tests.scheduling.models import model_test

SIZE = 2
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    """Name each full block by all tokens up to its end."""
    return [BlockHash(bytes(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


def stopping(max_new: int = 6) -> Stopping:
    return Stopping(max_new_tokens=max_new)


def batch(n_pages: int) -> DecodeBatch:
    return DecodeBatch(
        PageAllocator(n_pages), block_size=SIZE, max_running=8, max_context=99, landing_ttl_s=10
    )


def run(b: DecodeBatch, rid: RequestId, prompt: list[int]) -> list[int]:
    """Reserve and start a request; return its pages."""
    pages = b.reserve(rid, len(prompt), stopping(), 0, hashes_of(prompt))
    b.start(rid, 9, 0)
    return pages


def test_the_next_prompt_shares_the_blocks_of_a_finished_one() -> None:
    b = batch(8)
    before = run(b, A, [1, 2, 3, 4, 5])
    b.cancel(A)
    assert b.free_pages == 8
    pages = b.reserve(B, 7, stopping(), 0, hashes_of([1, 2, 3, 4, 5, 6, 7]))
    assert b.held_blocks(B) == 2
    assert pages[:2] == before[:2]
    b.check()


def test_two_running_requests_share_pages_and_one_may_end() -> None:
    b = batch(8)
    run(b, A, [1, 2, 3, 4, 5])
    run(b, B, [1, 2, 3, 4, 6])
    assert b.free_pages == 4  # two shared ones, and one of each
    b.check()
    b.cancel(A)
    assert b.free_pages == 5
    b.check()


def test_pages_that_nothing_knows_go_first_then_the_least_recently_used_last_block_first() -> None:
    pages = PageAllocator(6)
    old, new = pages.allocate(2), pages.allocate(2)
    for i, page in enumerate([*old, *new]):
        pages.keep(page, BlockHash(bytes([i])))
    pages.release(old)
    pages.release(new)
    assert set(pages.allocate(2)).isdisjoint([*old, *new])
    assert pages.allocate(4) == [old[1], old[0], new[1], new[0]]
    assert pages.kept.longest_prefix([BlockHash(b"\0")]) == []


def test_a_chain_that_names_a_block_twice_gets_its_page_once() -> None:
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.keep(page, BlockHash(b"x"))
    assert pages.kept.longest_prefix([BlockHash(b"x")] * 2) == [page]


def test_a_free_page_can_be_neither_kept_nor_held() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="is free, it has no holder"):
        pages.keep(0, BlockHash(b"x"))
    with pytest.raises(ValueError, match="is free, it has no holder"):
        pages.hold([1])


@dataclass
class Model:
    """A request: its tokens so far, of which the last one's KV is not computed yet."""

    tokens: list[int]
    n_prompt: int
    stopping: Stopping
    deadline_s: float
    pages: list[int]
    n_held: int
    running: bool = False
    n_new: int = 0
    step: list[int] = field(default_factory=list)


class PagesHaveTheirTokens(RuleBasedStateMachine):
    """A batch over a pool whose pages have tokens in place of KV."""

    IDS = st.sampled_from([RequestId(name) for name in "abcde"])
    N = 10

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(self.N)
        self.batch = DecodeBatch(
            self.pages, block_size=SIZE, max_running=4, max_context=20, landing_ttl_s=5
        )
        #: What was written to each page, by place.
        self.pool: list[list[object]] = [[None] * SIZE for _ in range(self.N)]
        self.models: dict[RequestId, Model] = {}
        #: Conversations that ended: prompts and answers.
        self.said: list[list[int]] = [[]]
        self.now = 0.0

    def write(self, pages: list[int], position: int, token: object) -> None:
        self.pool[pages[position // SIZE]][position % SIZE] = token

    def read(self, pages: list[int], n: int) -> list[object]:
        return [self.pool[pages[i // SIZE]][i % SIZE] for i in range(n)]

    @rule(rid=IDS, data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def reserve(self, rid: RequestId, data: st.DataObject, more: list[int]) -> None:
        if rid in self.models:
            return
        before = data.draw(st.sampled_from(self.said))
        prompt = [*before, *more][: data.draw(st.integers(1, 14))]
        free, rules = self.batch.free_pages, stopping()
        unshared = all(not model.n_held for model in self.models.values())
        try:
            pages = self.batch.reserve(rid, len(prompt), rules, self.now, hashes_of(prompt))
        except ReservationRefused as refusal:
            assert refusal.retryable and (self.models or free < self.N)
            return
        n_held = self.batch.held_blocks(rid)
        assert n_held * SIZE < len(prompt)
        assert self.read(pages, n_held * SIZE) == prompt[: n_held * SIZE], "not its own prefix"
        assert free - self.batch.free_pages <= len(pages)
        assert n_held or not unshared or free - self.batch.free_pages == len(pages)
        self.models[rid] = Model(prompt, len(prompt), rules, self.now + 5, pages, n_held)
        for page in pages[n_held:]:
            self.pool[page] = ["torn"] * SIZE  # prefill may write to it from now on

    @rule(rid=IDS)
    def start(self, rid: RequestId) -> None:
        model = self.models.get(rid)
        if model is None or model.running or model.deadline_s <= self.now:
            return
        for position in range(model.n_held * SIZE, len(model.tokens)):
            self.write(model.pages, position, model.tokens[position])
        first = len(model.tokens) % 2
        self.batch.start(rid, first, self.now)
        model.running, model.n_new = True, 1
        model.tokens.append(first)

    @rule()
    def step(self) -> None:
        step = self.batch.next_step()
        for rid in step.preempted:
            self.end(rid)
        for row in step.rows:
            model = self.models[row.request_id]
            model.pages = list(row.pages)
            self.write(model.pages, row.position, row.token)
        for row in step.rows:
            model = self.models[row.request_id]
            assert self.read(model.pages, row.position + 1) == model.tokens, "a token is lost"
            if (row.position + 1) % SIZE == 0:
                block = row.position // SIZE
                self.pages.keep(model.pages[block], hashes_of(model.tokens)[block])
            model.tokens.append((row.position * 7) % 2)
            model.n_new += 1
            if self.batch.on_token(row.request_id, model.tokens[-1]):
                self.end(row.request_id)

    def end(self, rid: RequestId) -> None:
        self.said.append(self.models.pop(rid).tokens)

    @rule(rid=IDS, in_doubt=st.booleans())
    def cancel(self, rid: RequestId, in_doubt: bool) -> None:
        if rid in self.models:
            self.batch.cancel(rid, aside_until_s=self.now + 2 if in_doubt else None)
            self.end(rid)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for rid in self.batch.expire(self.now):
            self.end(rid)

    @invariant()
    def shared_pages_are_whole(self) -> None:
        self.batch.check()
        for model in self.models.values():
            n = model.n_held * SIZE if not model.running else len(model.tokens) - 1
            assert self.read(model.pages, n) == model.tokens[:n]
        for said in self.said:
            kept = self.pages.kept.longest_prefix(hashes_of(said))
            assert self.read(kept, len(kept) * SIZE) == said[: len(kept) * SIZE]

    def teardown(self) -> None:
        for rid in list(self.models):
            self.batch.cancel(rid)
        self.batch.expire(self.now + 100)
        assert self.batch.free_pages == self.N


TestPagesHaveTheirTokens = model_test(PagesHaveTheirTokens, at_night=450)
