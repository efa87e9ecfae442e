"""The prefill machine: a prompt's way, its other ends, and events in any order."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    CachedPrefix,
    KvstoreAddress,
    PrefillCost,
    PrefillFailed,
    PrefillStopped,
    StartPrefill,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks
from halfmoon_scheduling.prefill.prefill_commands import (
    EndRequest,
    FetchPrefix,
    KeepBlocks,
    PrefillCommand,
    PrefillPass,
    PrefillStop,
    ReleaseHoldings,
    ReportDone,
    ReserveRoom,
    SettleTransfers,
    WakeEngine,
    ending_message,
)
from halfmoon_scheduling.prefill.prefill_events import (
    BlocksKept,
    DoneReported,
    FirstToken,
    HoldingsReleased,
    KeepingStopped,
    PagesFreed,
    PassEnded,
    PassFailed,
    PrefillCancelled,
    PrefillEvent,
    PrefillFailure,
    PrefillRequested,
    PrefixFetched,
    PrefixLeased,
    RoomRefused,
    RoomReserved,
    StepFailed,
    TokenDelayed,
    TransfersSettled,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT, PromptShare
from tests.scheduling.models import model_test
from tests.scheduling.prefill.prompts import BLOCK, BROKEN, HOME, A, B, C, a_start

OTHER = KvstoreAddress(worker_id=WorkerId("kvstore-1"), generation=1, commands="b")


def cached(n_blocks: int, at: KvstoreAddress = HOME) -> CachedPrefix:
    return CachedPrefix(kvstore=at, n_blocks=n_blocks)


def a_machine(
    n_pages: int = 8,
    *,
    chunk_tokens: int = 128,
    max_requests: int = 8,
    long_chunks: LongChunks | None = None,
    **rules: Any,
) -> PrefillMachine:
    queue = PrefillQueue(
        chunk_tokens=chunk_tokens, max_requests=max_requests, long_chunks=long_chunks
    )
    return PrefillMachine(PrefillRules(BLOCK, **rules), queue, PageAllocator(n_pages))


@dataclass
class Driven:
    """A machine whose commands are written down, and which is audited after every event."""

    machine: PrefillMachine
    now: float = 0.0

    def post(self, event: PrefillEvent) -> list[PrefillCommand]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def next_pass(self) -> PrefillPass | None:
        due = self.machine.next_pass(self.now)
        self.machine.check()
        return due

    def n_free(self) -> int:
        assert self.machine.pages is not None
        return self.machine.pages.n_free

    def computing(self, *starts: StartPrefill) -> None:
        """Prompts without cache and store, ready to be computed."""
        for start in starts:
            self.post(PrefillRequested(start))
            assert self.post(PrefixLeased(start.request_id)) == [WakeEngine()]

    def computed(self) -> list[PrefillCommand]:
        """It is computed and reported; what follows from that."""
        assert self.next_pass() is not None
        self.post(PassEnded({A: 5}))
        self.post(TransfersSettled(A))
        return self.post(DoneReported(A))

    def chunks(self) -> list[tuple[RequestId, int, int]]:
        """Whose tokens the next pass computes, from where and to where."""
        due = self.next_pass()
        return [(c.request_id, c.start, c.stop) for c in due.chunks] if due else []


@pytest.fixture
def driven() -> Driven:
    return Driven(a_machine())


# -- the way of a prompt -------------------------------------------------------------------------


def test_a_prompt_goes_from_pages_to_kept_blocks(driven: Driven) -> None:
    start = a_start(cached=cached(2), store_in=HOME, n_tokens=48)
    (fetch,) = driven.post(PrefillRequested(start))
    assert fetch == FetchPrefix(A, (0, 1, 2), 2, reserve_from=2)
    assert driven.post(PrefixLeased(A, HOME, 2, has_room=True)) == [WakeEngine()]
    assert driven.chunks() == [(A, 32, 48)]
    assert driven.post(PassEnded({A: 5}, 1.0)) == [SettleTransfers(A), WakeEngine()]
    (done,) = driven.post(TransfersSettled(A))
    assert isinstance(done, ReportDone)
    assert (done.first_token, done.finish, done.n_cached) == (5, "", 32)
    assert driven.post(DoneReported(A)) == [KeepBlocks(A)]
    assert driven.post(BlocksKept(A)) == [ReleaseHoldings(A)]
    assert driven.n_free() == 5
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, None)]
    assert driven.n_free() == 8


def test_a_prompt_that_is_done_gives_up_its_new_blocks_and_ends_well(driven: Driven) -> None:
    driven.post(PrefillRequested(a_start(store_in=HOME)))
    driven.post(PrefixLeased(A))
    driven.post(RoomReserved(A))
    driven.next_pass()
    for event in (PassEnded({A: 5}), TransfersSettled(A)):
        assert driven.post(KeepingStopped(A)) == []
        driven.post(event)
    assert driven.post(KeepingStopped(A)) == [], "its end is not reported yet"
    assert driven.post(DoneReported(A)) == [KeepBlocks(A)]
    assert driven.post(KeepingStopped(A)) == [ReleaseHoldings(A)]
    assert driven.post(KeepingStopped(A)) == []
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, None)]
    assert driven.post(KeepingStopped(A)) == []


#: Of each prompt: its fields, what was leased, and from which block on room is asked for anew.
WITHOUT: dict[str, tuple[dict[str, Any], PrefixLeased, int | None]] = {
    "has no home": ({}, PrefixLeased(A), None),
    "finds its home full": ({"store_in": HOME}, PrefixLeased(A), 0),
    "finds its home full when its prefix is leased": (
        {"cached": cached(1), "store_in": HOME},
        PrefixLeased(A, HOME, 1, has_room=False),
        None,
    ),
    "has less at home than was expected": (
        {"cached": cached(2), "store_in": HOME, "n_tokens": 64},
        PrefixLeased(A, HOME, 1, has_room=True),
        1,
    ),
    "has its prefix elsewhere": (
        {"cached": cached(2), "store_in": HOME, "n_tokens": 64},
        PrefixLeased(A, OTHER, 2, has_room=True),
        0,
    ),
    "has its prefix nowhere": (
        {"cached": cached(2), "store_in": HOME, "n_tokens": 64},
        PrefixLeased(A, None, 0, has_room=True),
        0,
    ),
}


@pytest.mark.parametrize(("fields", "leased", "first"), WITHOUT.values(), ids=WITHOUT)
def test_nothing_is_kept_of_a_prompt_that(
    driven: Driven, fields: dict[str, Any], leased: PrefixLeased, first: int | None
) -> None:
    driven.post(PrefillRequested(a_start(**fields)))
    commands = driven.post(leased)
    if first is not None:  # what was reserved before is gone
        assert commands == [ReserveRoom(A, first)]
        commands = driven.post(RoomRefused(A))
    assert commands == [WakeEngine()]
    assert driven.computed() == [ReleaseHoldings(A)]


#: Of each prompt: its fields, and what is fetched and reserved for it.
FETCHES: dict[str, tuple[dict[str, Any], FetchPrefix]] = {
    "cached elsewhere is also kept at home": (
        {"cached": cached(2, OTHER), "store_in": HOME},
        FetchPrefix(A, (0, 1, 2), 2, reserve_from=0),
    ),
    "all cached at home has nothing reserved": (
        {"cached": cached(2), "store_in": HOME},
        FetchPrefix(A, (0, 1, 2), 2),
    ),
    "all cached has its last token computed": (
        {"cached": cached(2), "n_tokens": 32},
        FetchPrefix(A, (0, 1), 1),
    ),
    "whose scores are wanted is computed": (
        {"cached": cached(2), "sampling": Sampling(prompt_logprobs=1)},
        FetchPrefix(A, (0, 1, 2), 0),
    ),
}


@pytest.mark.parametrize(("fields", "fetch"), FETCHES.values(), ids=FETCHES)
def test_a_prompt(driven: Driven, fields: dict[str, Any], fetch: FetchPrefix) -> None:
    assert driven.post(PrefillRequested(a_start(**fields))) == [fetch]


def test_a_pass_begins_before_the_prefix_is_here(driven: Driven) -> None:
    driven.post(PrefillRequested(a_start(cached=cached(2))))
    assert driven.post(PrefixLeased(A, HOME, 2)) == [WakeEngine()]
    assert driven.next_pass() is not None
    assert driven.post(PrefixFetched(A)) == []


def test_only_one_pass_is_under_way(driven: Driven) -> None:
    driven.computing(a_start())
    assert driven.next_pass() is not None
    driven.computing(a_start(B))
    assert driven.next_pass() is None
    driven.post(PassEnded({A: 5}))
    assert driven.chunks() == [(B, 0, 40)]


def test_pages_are_given_in_the_order_of_the_queue() -> None:
    driven = Driven(a_machine(n_pages=4))
    assert len(driven.post(PrefillRequested(a_start(A, 48)))) == 1
    assert driven.post(PrefillRequested(a_start(B, 64))) == []
    # It would fit, and does not pass the larger one that came before it.
    assert driven.post(PrefillRequested(a_start(C, 16))) == []
    driven.post(PrefillCancelled(A))
    *given, ended = driven.post(HoldingsReleased(A))
    assert [command.request_id for command in given if isinstance(command, FetchPrefix)] == [B]
    assert ended == EndRequest(A, PrefillStop())


def test_pages_freed_by_others_go_to_prompts_that_wait() -> None:
    machine = a_machine(n_pages=4)
    assert machine.pages is not None
    taken = machine.pages.allocate(2)
    driven = Driven(machine)
    assert driven.post(PrefillRequested(a_start(A, 48))) == []
    machine.pages.release(taken)
    assert driven.post(PagesFreed()) != []


def test_a_delayed_token_is_asked_for_until_it_is_chosen(driven: Driven) -> None:
    driven.computing(a_start())
    driven.next_pass()
    assert driven.post(PassEnded({A: TokenDelayed()})) == [WakeEngine()]
    for _ in range(2):
        due = driven.next_pass()
        assert due == PrefillPass((), (A,))
        driven.post(PassEnded({A: TokenDelayed()}))
    driven.next_pass()
    assert SettleTransfers(A) in driven.post(PassEnded({A: 7}))
    assert driven.next_pass() is None


def test_the_time_is_split_into_turn_kvstores_compute_and_last_bytes(driven: Driven) -> None:
    driven.post(PrefillRequested(a_start(cached=cached(1))))
    driven.now = 2.0
    driven.post(PrefixLeased(A, HOME, 1))
    driven.now = 5.0
    driven.next_pass()
    driven.now = 9.0
    driven.post(PassEnded({A: 5}, 4.0, layers_wait_s=1.0))
    driven.now = 9.5
    (done,) = driven.post(TransfersSettled(A))
    assert isinstance(done, ReportDone)
    assert (done.queue_s, done.compute_s, done.drain_s) == (5.0, 4.0, 0.5)
    times = done.times
    assert (times.queue_s, times.fetch_s, times.compute_s, times.transfer_s) == (3.0, 3.0, 3.0, 0.5)


# -- long chunks ---------------------------------------------------------------------------------


def long_chunks(max_s: float) -> LongChunks:
    """At a second a token."""
    limits = LongChunkLimits(max_tokens=1000, max_s=max_s)
    return LongChunks(limits, PrefillCost(c0_s=0.0, c1_s=1.0))


def n_tokens_of(due: PrefillPass | None) -> list[int]:
    assert due is not None
    return [chunk.n_tokens for chunk in due.chunks]


def test_what_passes_take_bounds_long_chunks_and_waits_for_layers_do_not_count() -> None:
    driven = Driven(a_machine(chunk_tokens=8, long_chunks=long_chunks(16.0)))
    driven.computing(a_start(n_tokens=128))
    for _ in range(3):
        assert n_tokens_of(driven.next_pass()) == [16]
        driven.post(PassEnded({}, 20.0, layers_wait_s=4.0))
    driven.next_pass()
    driven.post(PassEnded({}, 32.0))
    assert n_tokens_of(driven.next_pass()) < [16]


def test_a_prompt_whose_tokens_are_scored_has_short_chunks() -> None:
    driven = Driven(a_machine(chunk_tokens=8, long_chunks=long_chunks(16.0)))
    driven.computing(a_start(sampling=Sampling(prompt_logprobs=1)))
    assert n_tokens_of(driven.next_pass()) == [8]


def test_a_larger_priority_waits_for_one_long_chunk_at_the_most() -> None:
    driven = Driven(a_machine(chunk_tokens=8, long_chunks=long_chunks(16.0)))
    driven.computing(a_start())
    driven.next_pass()
    driven.computing(a_start(B, 5, priority=1))
    driven.post(PassEnded({}, 16.0))
    assert driven.chunks() == [(B, 0, 5), (A, 16, 19)]


# -- refusals, failures, cancellations -----------------------------------------------------------


def test_a_prompt_over_the_pool_is_refused_for_good_and_by_a_full_queue_for_now() -> None:
    driven = Driven(a_machine(max_requests=1))
    ending = refusal(driven, a_start(n_tokens=9 * BLOCK))
    assert not ending.retryable
    assert "9 pages: the pool has 8" in ending.reason
    driven.computing(a_start())
    assert refusal(driven, a_start(B)).retryable


def refusal(driven: Driven, start: StartPrefill) -> PrefillFailure:
    (end,) = driven.post(PrefillRequested(start))
    assert isinstance(end, EndRequest) and isinstance(end.ending, PrefillFailure)
    return end.ending


def test_a_cancelled_request_keeps_its_pages_until_the_pass_is_over(driven: Driven) -> None:
    driven.computing(a_start(), a_start(B))
    driven.next_pass()
    assert driven.post(PrefillCancelled(A)) == []
    assert driven.n_free() == 2
    commands = driven.post(PassEnded({A: 5, B: 6}))
    assert commands == [ReleaseHoldings(A), SettleTransfers(B), WakeEngine()]
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, PrefillStop())]


def test_a_failure_ends_a_request_and_no_other(driven: Driven) -> None:
    driven.computing(a_start(), a_start(B))
    assert driven.post(StepFailed(A, BROKEN)) == [ReleaseHoldings(A)]
    assert driven.chunks() == [(B, 0, 40)]
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, BROKEN)]


def test_a_failed_pass_ends_all_that_it_computed_and_chose(driven: Driven) -> None:
    driven.computing(a_start())
    driven.next_pass()
    driven.post(PassEnded({A: TokenDelayed()}))
    driven.computing(a_start(B), a_start(C, 16))
    driven.next_pass()
    driven.post(PrefillCancelled(C))
    commands = driven.post(PassFailed("out of memory"))
    assert commands == [ReleaseHoldings(B), ReleaseHoldings(C), ReleaseHoldings(A), WakeEngine()]
    (end,) = driven.post(HoldingsReleased(B))
    failure = PrefillFailure("out of memory", retryable=True, code="internal_error")
    assert end == EndRequest(B, failure)
    assert driven.post(HoldingsReleased(C)) == [EndRequest(C, PrefillStop())]


def test_a_token_that_its_grammar_refuses_ends_the_request(driven: Driven) -> None:
    driven.computing(a_start())
    driven.next_pass()
    invalid = PrefillFailure("no such word", retryable=False, invalid=True)
    assert driven.post(PassEnded({A: invalid})) == [ReleaseHoldings(A), WakeEngine()]
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, invalid)]


def test_a_cancellation_of_a_request_that_is_done_is_answered(driven: Driven) -> None:
    driven.computing(a_start())
    assert driven.computed() == [ReleaseHoldings(A)]
    assert driven.post(PrefillCancelled(A)) == []
    assert driven.post(HoldingsReleased(A)) == [EndRequest(A, PrefillStop())]


def test_endings_are_told_in_the_words_of_the_protocol() -> None:
    assert ending_message(A, None) is None
    assert ending_message(A, PrefillStop()) == PrefillStopped(request_id=A)
    culprit = WorkerId("kvstore-0")
    failed = PrefillFailed(request_id=A, reason="lost", retryable=True, culprit=culprit)
    assert ending_message(A, PrefillFailure("lost", retryable=True, culprit=culprit)) == failed


# -- prefill at decode ---------------------------------------------------------------------------


def at_decode() -> Driven:
    queue = PrefillQueue(chunk_tokens=10**6, max_requests=8)
    rules = PrefillRules(BLOCK, overlaps_fetch=False, max_pass_prompts=1)
    return Driven(PrefillMachine(rules, queue, None))


def test_at_decode_a_prompt_takes_no_pages_and_its_whole_prefix_is_here_before_the_step() -> None:
    driven = at_decode()
    assert driven.post(PrefillRequested(a_start(cached=cached(2)))) == [FetchPrefix(A, (), 2)]
    assert driven.post(PrefixLeased(A, HOME, 2)) == []
    assert driven.next_pass() is None
    assert driven.post(PrefixFetched(A)) == [WakeEngine()]
    assert driven.next_pass() is not None


def test_at_decode_a_step_has_one_prompt() -> None:
    driven = at_decode()
    driven.computing(a_start(), a_start(B))
    assert driven.chunks() == [(A, 0, 40)]


def test_a_stage_holds_its_layers_of_every_block() -> None:
    first, *_, last = (PromptShare(stage, 4) for stage in range(4))
    assert first.n_pages(9) == last.n_pages(9) == 3
    assert (first.is_first, first.is_last) == (last.is_last, last.is_first) == (True, False)
    assert WHOLE_PROMPT.n_pages(9) == 9
    assert WHOLE_PROMPT.is_first and WHOLE_PROMPT.is_last


# -- any order -----------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """A shell that performs commands late, in any order, and fails as it likes.

    It knows for itself what each request holds, so that it notices a page that is given away
    while a pass or a transfer may touch it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_pages = 9
        self.machine = a_machine(
            self.n_pages, chunk_tokens=20, max_requests=5, long_chunks=long_chunks(40.0)
        )
        self.now = 0.0
        self.n_begun = 0
        #: Commands whose outcome is due, by request.
        self.due: dict[RequestId, PrefillCommand] = {}
        #: Pages by the request that was given them, until its holdings are released.
        self.pages: dict[RequestId, tuple[int, ...]] = {}
        self.reading: set[RequestId] = set()
        self.under_way: PrefillPass | None = None
        self.alive: set[RequestId] = set()
        self.reported: set[RequestId] = set()

    def post(self, event: PrefillEvent) -> None:
        self.now += 1.0
        for command in self.machine.handle(event, self.now):
            match command:
                case WakeEngine():
                    pass
                case EndRequest(request_id=request_id):
                    assert request_id not in self.pages, "ended with pages"
                    assert request_id not in self.due
                    self.alive.remove(request_id)
                    said = request_id in self.reported
                    assert command.ending is not None or said, "ended without an answer"
                case ReleaseHoldings(request_id=request_id):
                    if self.under_way is not None:
                        chunks = self.under_way.chunks
                        assert all(chunk.request_id != request_id for chunk in chunks)
                    self.due[request_id] = command  # in place of the step that it stops
                    self.reading.discard(request_id)
                case _:
                    assert command.request_id not in self.due, "two steps at once"
                    self.due[command.request_id] = command
                    if isinstance(command, FetchPrefix):
                        others = {page for pages in self.pages.values() for page in pages}
                        assert others.isdisjoint(command.pages), "a page was given twice"
                        self.pages[command.request_id] = command.pages

    def some(self, data: st.DataObject, requests: set[RequestId]) -> RequestId:
        return data.draw(st.sampled_from(sorted(requests)))

    @rule(
        n_tokens=st.integers(1, 9 * BLOCK),
        n_cached=st.integers(0, 9),
        stored=st.booleans(),
        priority=st.integers(0, 1),
    )
    def request(self, n_tokens: int, n_cached: int, stored: bool, priority: int) -> None:
        request_id = RequestId(f"r{self.n_begun}")
        self.n_begun += 1
        self.alive.add(request_id)
        start = a_start(
            request_id,
            n_tokens,
            cached=cached(n_cached) if n_cached else None,
            store_in=HOME if stored else None,
            priority=priority,
        )
        self.post(PrefillRequested(start))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = self.some(data, self.alive)
        self.post(PrefillCancelled(request_id))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def want_pages(self, data: st.DataObject) -> None:
        self.post(KeepingStopped(self.some(data, self.alive)))

    @precondition(lambda self: self.due)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def perform(self, data: st.DataObject, fails: int) -> None:
        request_id = self.some(data, set(self.due))
        command = self.due.pop(request_id)
        if fails == 0 and not isinstance(command, ReleaseHoldings):
            self.post(StepFailed(request_id, BROKEN))
            return
        match command:
            case FetchPrefix():
                n_found = data.draw(st.integers(0, command.n_blocks))
                has_room = None if command.reserve_from is None else data.draw(st.booleans())
                if n_found:
                    self.reading.add(request_id)
                    self.post(PrefixLeased(request_id, HOME, n_found, has_room))
                else:
                    self.post(PrefixLeased(request_id, has_room=has_room))
            case ReserveRoom():
                room = data.draw(st.booleans())
                self.post(RoomReserved(request_id) if room else RoomRefused(request_id))
            case SettleTransfers():
                self.reading.discard(request_id)
                self.post(TransfersSettled(request_id))
            case ReportDone():
                self.reported.add(request_id)
                self.post(DoneReported(request_id))
            case KeepBlocks():
                self.post(BlocksKept(request_id))
            case ReleaseHoldings():
                self.pages.pop(request_id, None)
                self.post(HoldingsReleased(request_id))
            case _:
                raise AssertionError(command)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=st.booleans())
    def read(self, data: st.DataObject, fails: bool) -> None:
        request_id = self.some(data, self.reading)
        self.reading.remove(request_id)
        self.post(StepFailed(request_id, BROKEN) if fails else PrefixFetched(request_id))

    @precondition(lambda self: self.under_way is None)
    @rule()
    def begin_pass(self) -> None:
        self.under_way = self.machine.next_pass(self.now)

    @precondition(lambda self: self.under_way is not None)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def end_pass(self, data: st.DataObject, fails: int) -> None:
        assert self.under_way is not None
        ended, self.under_way = self.under_way, None
        if fails == 0:
            self.post(PassFailed("broken"))
            return
        outcomes: list[FirstToken] = [5, TokenDelayed(), BROKEN]
        chosen = [chunk.request_id for chunk in ended.chunks if chunk.last]
        tokens = {
            request_id: data.draw(st.sampled_from(outcomes))
            for request_id in (*chosen, *ended.delayed)
        }
        self.post(PassEnded(tokens, 1.0))

    @invariant()
    def is_sound(self) -> None:
        self.machine.check()
        assert self.machine.requests.keys() == self.alive
        assert self.machine.pages is not None
        held = sum(len(pages) for pages in self.pages.values())
        assert held + self.machine.pages.n_free == self.n_pages

    def teardown(self) -> None:
        """Perform everything: each request then ends, and nothing is left."""
        for _ in range(400):
            if self.under_way is None:
                self.under_way = self.machine.next_pass(self.now)
            if self.under_way is not None:
                ended, self.under_way = self.under_way, None
                last = [chunk.request_id for chunk in ended.chunks if chunk.last]
                self.post(PassEnded(dict.fromkeys((*last, *ended.delayed), 5)))
            for request_id, command in list(self.due.items()):
                del self.due[request_id]
                if isinstance(command, ReleaseHoldings):
                    self.pages.pop(request_id, None)
                    self.post(HoldingsReleased(request_id))
                else:
                    if isinstance(command, ReportDone):
                        self.reported.add(request_id)
                    self.post(OUTCOMES[type(command)](request_id))
            self.is_sound()
            if not self.alive:
                break
        assert not self.alive, "a request does not end"
        assert not self.pages
        assert len(self.machine.queue) == 0


OUTCOMES: dict[type, Any] = {
    FetchPrefix: PrefixLeased,
    ReserveRoom: RoomReserved,
    SettleTransfers: TransfersSettled,
    ReportDone: DoneReported,
    KeepBlocks: BlocksKept,
}

TestAnyOrder = model_test(AnyOrder, at_night=180, steps_at_night=40)
