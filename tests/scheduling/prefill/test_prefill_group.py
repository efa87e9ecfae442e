"""A prompt at the machines of a group: chunks in order, slots as back-pressure, and other ends."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import StartPrefill
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.chunk_flow import SLOTS_PER_SHARE
from halfmoon_scheduling.prefill.prefill_commands import (
    EndRequest,
    FetchPrefix,
    FreeSlot,
    KeepBlocks,
    PrefillCommand,
    PrefillPass,
    PrefillStop,
    ReleaseHoldings,
    ReportDone,
    ReserveRoom,
    SendChunk,
    SettleTransfers,
    StartStages,
    WakeEngine,
)
from halfmoon_scheduling.prefill.prefill_events import (
    BlocksKept,
    ChunkArrived,
    DoneReported,
    HoldingsReleased,
    NextSlotFreed,
    PassEnded,
    PassFailed,
    PrefillCancelled,
    PrefillEvent,
    PrefillFailure,
    PrefillRequested,
    PrefixLeased,
    RoomReserved,
    StagesStarted,
    StepFailed,
    TransfersSettled,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_scheduling.prefill.prefill_request import PrefillPhase
from halfmoon_scheduling.prefill.prompt_share import PromptShare
from tests.scheduling.models import model_test
from tests.scheduling.prefill.prompts import BLOCK, BROKEN, HOME, A, a_start

CHUNK = 32


def a_machine(n_pages: int = 32, max_shares: int = 2) -> PrefillMachine:
    queue = PrefillQueue(chunk_tokens=64, max_requests=16)
    return PrefillMachine(PrefillRules(BLOCK, max_shares=max_shares), queue, PageAllocator(n_pages))


def a_share(stage: int, n_stages: int, start: StartPrefill, n_leased: int = 0) -> PrefillRequested:
    is_last = stage + 1 == n_stages
    return PrefillRequested(
        start,
        PromptShare(stage, n_stages),
        CHUNK,
        n_leased=n_leased,
        n_next_slots=0 if is_last else SLOTS_PER_SHARE,
        has_room=start.store_in is not None,
    )


def post(machine: PrefillMachine, event: PrefillEvent) -> list[PrefillCommand]:
    commands = machine.handle(event, 1.0)
    machine.check()
    return commands


def run(machine: PrefillMachine) -> PrefillPass | None:
    due = machine.next_pass(1.0)
    machine.check()
    return due


def spans(due: PrefillPass | None) -> list[tuple[int, int]]:
    return [] if due is None else [(chunk.start, chunk.stop) for chunk in due.chunks]


# -- one stage -----------------------------------------------------------------------------------


@pytest.fixture
def first() -> PrefillMachine:
    """Stage 0 of two, with its stages started."""
    machine = a_machine()
    post(machine, a_share(0, 2, a_start(n_tokens=100)))
    assert post(machine, PrefixLeased(A)) == [StartStages(A)]
    assert run(machine) is None, "the other stage has no slots yet"
    assert post(machine, StagesStarted(A, SLOTS_PER_SHARE, CHUNK)) == [WakeEngine()]
    return machine


def test_stage_0_computes_as_many_chunks_as_the_next_stage_has_slots(
    first: PrefillMachine,
) -> None:
    for slot in range(SLOTS_PER_SHARE):
        due = run(first)
        assert due is not None and due.stage is not None
        assert (due.stage.incoming, due.stage.outgoing) == (None, slot)
        start = slot * CHUNK
        assert spans(due) == [(start, start + CHUNK)]
        assert post(first, PassEnded()) == [SendChunk(A, start, start + CHUNK, slot), WakeEngine()]
    assert run(first) is None
    post(first, NextSlotFreed(A, 1))
    due = run(first)
    assert due is not None and due.stage is not None
    assert (spans(due), due.stage.outgoing) == ([(64, 96)], 1)


def test_whole_prompts_are_computed_while_a_share_waits_for_a_slot(first: PrefillMachine) -> None:
    for _ in range(SLOTS_PER_SHARE):
        run(first)
        post(first, PassEnded())
    short = RequestId("short")
    post(first, PrefillRequested(a_start(short, 10)))
    post(first, PrefixLeased(short))
    due = run(first)
    assert due is not None and due.stage is None
    assert [chunk.request_id for chunk in due.chunks] == [short]


def test_stage_0_is_done_when_all_stages_are(first: PrefillMachine) -> None:
    for slot in (0, 1, 0, 1):
        run(first)
        commands = post(first, PassEnded())
        post(first, NextSlotFreed(A, slot))
    assert SettleTransfers(A) in commands
    (done,) = post(first, TransfersSettled(A, first_token=7))
    assert isinstance(done, ReportDone)
    assert done.first_token == 7


def test_a_further_stage_computes_the_chunks_that_came_and_frees_their_slots() -> None:
    machine = a_machine()
    (opened,) = post(machine, a_share(1, 2, a_start(n_tokens=80), n_leased=1))
    assert opened == FetchPrefix(A, (0, 1, 2, 3, 4), 1)
    assert post(machine, PrefixLeased(A, n_blocks=1)) == [WakeEngine()]
    assert run(machine) is None, "no chunk has come"
    post(machine, ChunkArrived(A, 16, 48, 0))
    post(machine, ChunkArrived(A, 48, 80, 1))
    due = run(machine)
    assert due is not None and due.stage is not None
    assert (spans(due), due.stage.incoming, due.stage.outgoing) == ([(16, 48)], 0, None)
    assert post(machine, PassEnded()) == [FreeSlot(A, 0), WakeEngine()]
    run(machine)
    assert post(machine, PassEnded({A: 5})) == [FreeSlot(A, 1), SettleTransfers(A), WakeEngine()]
    (done,) = post(machine, TransfersSettled(A))
    assert isinstance(done, ReportDone)
    assert done.first_token == 5


def test_a_stage_in_the_middle_settles_without_a_token() -> None:
    machine = a_machine()
    post(machine, a_share(1, 3, a_start(n_tokens=20)))
    post(machine, PrefixLeased(A))
    post(machine, ChunkArrived(A, 0, 20, 1))
    run(machine)
    sends = [SendChunk(A, 0, 20, 0), FreeSlot(A, 1), SettleTransfers(A), WakeEngine()]
    assert post(machine, PassEnded()) == sends
    (done,) = post(machine, TransfersSettled(A))
    assert isinstance(done, ReportDone)
    assert done.first_token is None


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (ChunkArrived(A, 16, 48, 0), "the next chunk begins at 0"),
        (ChunkArrived(A, 0, 0, 0), "the next chunk begins at 0"),
        (ChunkArrived(A, 0, 101, 0), "of 100"),
        (ChunkArrived(A, 0, 33, 0), "slots hold 32"),
        (ChunkArrived(A, 0, 32, SLOTS_PER_SHARE), "it has 2 slots"),
    ],
)
def test_a_chunk_that_can_not_be_meant_ends_the_share(chunk: ChunkArrived, said: str) -> None:
    machine = a_machine()
    post(machine, a_share(1, 2, a_start(n_tokens=100)))
    post(machine, PrefixLeased(A))
    assert post(machine, chunk) == [ReleaseHoldings(A)]
    (end,) = post(machine, HoldingsReleased(A))
    assert isinstance(end, EndRequest) and isinstance(end.ending, PrefillFailure)
    assert said in end.ending.reason


def test_a_slot_that_is_freed_twice_ends_the_share(first: PrefillMachine) -> None:
    run(first)
    post(first, PassEnded())
    post(first, NextSlotFreed(A, 0))
    assert post(first, NextSlotFreed(A, 0)) == [ReleaseHoldings(A)]


def test_a_third_prompt_of_the_group_waits_until_one_of_two_is_over() -> None:
    machine = a_machine()
    ids = [RequestId(name) for name in "abc"]
    for request_id in ids:
        post(machine, a_share(1, 2, a_start(request_id, 20)))
    phases = [machine.requests[request_id].phase for request_id in ids]
    assert phases == [PrefillPhase.LEASING, PrefillPhase.LEASING, PrefillPhase.WAITING]
    post(machine, PrefillCancelled(ids[0]))
    opened, ended = post(machine, HoldingsReleased(ids[0]))
    assert isinstance(opened, FetchPrefix) and opened.request_id == ids[2]
    assert ended == EndRequest(ids[0], PrefillStop())


# -- all stages, in any order --------------------------------------------------------------------


@dataclass
class Member:
    """A machine, and what its shell is to do."""

    machine: PrefillMachine
    due: dict[RequestId, PrefillCommand] = field(default_factory=dict)
    under_way: PrefillPass | None = None
    #: Messages that have not arrived here; those about one request keep their order.
    inbox: deque[PrefillEvent] = field(default_factory=deque)


#: What comes of the commands for a whole prompt.
WHOLE: dict[type, Any] = {
    FetchPrefix: PrefixLeased,
    SettleTransfers: TransfersSettled,
    ReportDone: DoneReported,
    ReleaseHoldings: HoldingsReleased,
}


class GroupInAnyOrder(RuleBasedStateMachine):
    """A group whose commands, passes and messages end in any order, and fail as they like.

    The KV of each stage is a set of tokens; a chunk's activations are right only if its slot has
    what the stage before computed of these very tokens.
    """

    n_stages = 3

    def __init__(self) -> None:
        super().__init__()
        self.members = [Member(a_machine(n_pages=16)) for _ in range(self.n_stages)]
        self.n_begun = 0
        self.starts: dict[RequestId, StartPrefill] = {}
        self.n_leased: dict[RequestId, int] = {}
        #: What the slots of a stage hold: request, start and stop of a chunk.
        self.slots: dict[tuple[RequestId, int, int], tuple[int, int]] = {}
        #: Tokens whose KV is there, by request and stage.
        self.computed: dict[tuple[RequestId, int], int] = {}
        self.shares_done: dict[RequestId, set[int]] = {}
        #: Requests that stage 0 has begun to end: their shares are to stop.
        self.stopping: dict[RequestId, set[int]] = {}
        self.answered: dict[RequestId, Any] = {}

    # -- the world -----------------------------------------------------------------------

    def post(self, stage: int, event: PrefillEvent) -> None:
        member = self.members[stage]
        for command in member.machine.handle(event, 1.0):
            self.on_command(stage, command)

    def on_command(self, stage: int, command: PrefillCommand) -> None:
        member = self.members[stage]
        match command:
            case WakeEngine():
                pass
            case SendChunk(request_id=request_id):
                key = request_id, stage + 1, command.slot
                assert key not in self.slots, "a slot that is in use was written"
                self.slots[key] = command.start, command.stop
                arrived = ChunkArrived(request_id, command.start, command.stop, command.slot)
                self.members[stage + 1].inbox.append(arrived)
            case FreeSlot(request_id=request_id):
                del self.slots[request_id, stage, command.slot]
                self.members[stage - 1].inbox.append(NextSlotFreed(request_id, command.slot))
            case EndRequest(request_id=request_id):
                self.on_end(stage, request_id, command.ending)
            case ReleaseHoldings(request_id=request_id):
                if member.under_way is not None:
                    assert all(c.request_id != request_id for c in member.under_way.chunks)
                member.due[request_id] = command
            case _:
                assert command.request_id not in member.due, "two steps at once"
                member.due[command.request_id] = command

    def on_end(self, stage: int, request_id: RequestId, ending: Any) -> None:
        if stage == 0:
            assert not any(request_id in member.machine.requests for member in self.members[1:]), (
                "answered while a further stage may write"
            )
            self.answered[request_id] = ending
        elif ending is not None and request_id in self.members[0].machine.requests:
            self.members[0].inbox.append(StepFailed(request_id, BROKEN))

    def perform(self, stage: int, request_id: RequestId, *, fails: bool = False) -> None:
        """Perform a due command; one that waits for other stages stays due."""
        member = self.members[stage]
        command = member.due[request_id]
        others = self.members[1:]
        match command:
            case ReleaseHoldings() if stage == 0:
                alive = [m for m in others if request_id in m.machine.requests]
                for each in alive:
                    each.inbox.append(PrefillCancelled(request_id))
                if alive:
                    return
            case SettleTransfers() if stage == 0 and not fails:
                if self.shares_done.get(request_id, set()) != set(range(1, self.n_stages)):
                    return
            case StartStages() if not fails:
                for index, each in enumerate(others, start=1):
                    if request_id not in each.machine.requests:
                        start, n_leased = self.starts[request_id], self.n_leased[request_id]
                        self.post(index, a_share(index, self.n_stages, start, n_leased))
                if any(
                    m.machine.requests[request_id].phase
                    in (PrefillPhase.WAITING, PrefillPhase.LEASING)
                    for m in others
                    if request_id in m.machine.requests
                ):
                    return
            case _:
                pass
        del member.due[request_id]
        if fails and not isinstance(command, ReleaseHoldings):
            self.post(stage, StepFailed(request_id, BROKEN))
            return
        self.post(stage, self.outcome(stage, command))

    def outcome(self, stage: int, command: PrefillCommand) -> PrefillEvent:
        match command:
            case FetchPrefix(request_id=request_id):
                n_leased = self.n_leased[request_id]
                self.computed[request_id, stage] = n_leased * BLOCK
                source = HOME if n_leased and stage == 0 else None
                return PrefixLeased(request_id, source, n_leased)
            case ReserveRoom(request_id=request_id):
                return RoomReserved(request_id)
            case StartStages(request_id=request_id):
                return StagesStarted(request_id, SLOTS_PER_SHARE, CHUNK)
            case SettleTransfers(request_id=request_id):
                n_tokens = len(self.starts[request_id].token_ids)
                assert self.computed[request_id, stage] == n_tokens
                return TransfersSettled(request_id, 5 if stage == 0 else None)
            case ReportDone(request_id=request_id):
                self.shares_done.setdefault(request_id, set()).add(stage)
                return DoneReported(request_id)
            case KeepBlocks(request_id=request_id):
                return BlocksKept(request_id)
            case ReleaseHoldings(request_id=request_id):
                # Its slots are memory of its own, and go with it.
                for key in [key for key in self.slots if key[:2] == (request_id, stage)]:
                    del self.slots[key]
                return HoldingsReleased(request_id)
            case _:
                raise AssertionError(command)

    def begin_pass(self, stage: int) -> None:
        member = self.members[stage]
        if member.under_way is None:
            member.under_way = member.machine.next_pass(1.0)

    def end_pass(self, stage: int, *, fails: bool = False) -> None:
        member = self.members[stage]
        ended, member.under_way = member.under_way, None
        assert ended is not None
        if fails:
            self.post(stage, PassFailed("broken"))
            return
        tokens = {}
        for chunk in ended.chunks:
            if ended.stage is not None:
                key = chunk.request_id, stage
                assert self.computed[key] == chunk.start, "a chunk was skipped"
                if ended.stage.incoming is not None:
                    held = self.slots[(*key, ended.stage.incoming)]
                    assert held == (chunk.start, chunk.stop), "activations of another chunk"
                self.computed[key] = chunk.stop
            if chunk.last and (ended.stage is None or ended.stage.share.is_last):
                tokens[chunk.request_id] = 5
        self.post(stage, PassEnded(tokens))

    def deliver(self, stage: int) -> None:
        event = self.members[stage].inbox.popleft()
        request_id = getattr(event, "request_id", None)
        # What comes for a share that has ended is dropped by the worker.
        if request_id in self.members[stage].machine.requests:
            self.post(stage, event)

    # -- rules ---------------------------------------------------------------------------

    @rule(n_tokens=st.integers(1, 16 * BLOCK), n_leased=st.integers(0, 15), stored=st.booleans())
    def request(self, n_tokens: int, n_leased: int, stored: bool) -> None:
        request_id = RequestId(f"r{self.n_begun}")
        self.n_begun += 1
        n_leased = min(n_leased, (n_tokens - 1) // BLOCK)
        start = a_start(request_id, n_tokens, store_in=HOME if stored else None)
        self.starts[request_id] = start
        # Leased without being named as cached: how much there is, is told by `PrefixLeased`.
        self.n_leased[request_id] = n_leased
        self.post(0, a_share(0, self.n_stages, start))

    @rule(stage=st.integers(0, 2), n_tokens=st.integers(1, 4 * BLOCK))
    def whole_prompt(self, stage: int, n_tokens: int) -> None:
        request_id = RequestId(f"w{self.n_begun}")
        self.n_begun += 1
        self.starts[request_id], self.n_leased[request_id] = a_start(request_id, n_tokens), 0
        member = self.members[stage]
        for command in member.machine.handle(PrefillRequested(self.starts[request_id]), 1.0):
            if isinstance(command, EndRequest):
                continue
            self.on_command(stage, command)

    @precondition(lambda self: any(member.due for member in self.members))
    @rule(data=st.data(), fails=st.integers(0, 15))
    def perform_some(self, data: st.DataObject, fails: int) -> None:
        due = [(i, r) for i, member in enumerate(self.members) for r in sorted(member.due)]
        stage, request_id = data.draw(st.sampled_from(due))
        whole = request_id.startswith("w")
        if whole:
            self.perform_whole(stage, request_id)
        else:
            self.perform(stage, request_id, fails=fails == 0)

    def perform_whole(self, stage: int, request_id: RequestId) -> None:
        member = self.members[stage]
        command = member.due.pop(request_id)
        outcome = WHOLE[type(command)](request_id)
        for following in member.machine.handle(outcome, 1.0):
            if not isinstance(following, EndRequest):
                self.on_command(stage, following)

    @rule(stage=st.integers(0, 2), fails=st.integers(0, 15))
    def compute(self, stage: int, fails: int) -> None:
        if self.members[stage].under_way is None:
            self.begin_pass(stage)
        else:
            self.end_pass(stage, fails=fails == 0)

    @precondition(lambda self: any(member.inbox for member in self.members))
    @rule(data=st.data())
    def deliver_some(self, data: st.DataObject) -> None:
        stages = [i for i, member in enumerate(self.members) if member.inbox]
        self.deliver(data.draw(st.sampled_from(stages)))

    @precondition(lambda self: self.members[0].machine.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.members[0].machine.requests)))
        self.post(0, PrefillCancelled(request_id))

    @invariant()
    def is_sound(self) -> None:
        for member in self.members:
            member.machine.check()

    def teardown(self) -> None:
        """Perform everything: each request ends at every stage, and nothing is left."""
        for _ in range(600):
            for stage, member in enumerate(self.members):
                while member.inbox:
                    self.deliver(stage)
                self.begin_pass(stage)
                if member.under_way is not None:
                    self.end_pass(stage)
                for request_id in list(member.due):
                    if request_id.startswith("w"):
                        self.perform_whole(stage, request_id)
                    else:
                        self.perform(stage, request_id)
            if not any(member.machine.requests for member in self.members):
                break
        for member in self.members:
            assert not member.machine.requests, "a share does not end"
            assert member.machine.pages is not None
            assert member.machine.pages.n_free == member.machine.pages.n_pages
        assert not self.slots, "a slot leaks"


TestGroupInAnyOrder = model_test(GroupInAnyOrder, at_night=120, steps_at_night=60)
